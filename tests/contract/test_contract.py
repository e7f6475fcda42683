"""What every method promises, whatever its settings and the weight's shape, type and unit.

A new method joins by itself, with the settings it is compared by; an entry in each table adds others. Cases
are pairwise: every setting meets every shape, every type and every unit, and every shape every type and unit.
Types come with their units, so what needs three of them at once is seen too, on some shape or with some
setting.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from factorpack.decoding import check, decode, specs
from factorpack.errors import WeightError
from factorpack.format.bitpack import bit_string_bytes
from factorpack.format.container import Reader
from factorpack.methods import (
    AQ,
    BGD,
    LSQ,
    METHODS,
    PQF,
    QSPCA,
    RDOQ,
    SVD,
    TTQ,
    VQ,
    ABCNet,
    Keep,
    Method,
    Prune,
    Scalar,
    SecondOrder,
    SpatialSVD,
)
from factorpack.quantize.uniform import code_dtype, code_range
from factorpack.record import Encoded
from factorpack.size import fixed_bits
from factorpack.weight import Weight
from tests.helpers import assert_same_encoded, assert_same_tensor, relative_error, seeded, write_packed
from tests.pairwise import pairwise

SETTINGS: dict[str, tuple[Method, ...]] = {
    "qspca": (
        QSPCA(256, 5),
        QSPCA(8, 4, sparsity=0.3, tile=16),
        QSPCA(4, 3, tile=9, center=False),
        QSPCA(8, 6, codebook_bits=6, tile=32, latent_scales="column", clip="minmax"),
    ),
    "scalar": (Scalar(), Scalar(3), Scalar(2, "minmax")),
    "second_order": (
        SecondOrder(bits=3),
        SecondOrder(step=0.3),
        SecondOrder(step=0.001, price=0.0),
        SecondOrder(step=0.1, tile=9),
        SecondOrder(step=0.1, tile=9, trellis=8),
    ),
    "vq": (VQ(iterations=3), VQ(5, tile=7, iterations=3)),
    "bgd": (BGD(16, regime="large", iterations=3),),
    "pqf": (PQF(9, tile=6, iterations=3),),
    "aq": (AQ(2, 8, iterations=2), AQ(3, 5, tile=5, iterations=2)),
    "keep": (Keep(), Keep("bfloat16")),
    "lsq": (LSQ(), LSQ(1), LSQ(6, channels=False)),
    "ttq": (TTQ(), TTQ(0.3, channels=True)),
    "abcnet": (ABCNet(1), ABCNet(4, channels=True)),
    "prune": (Prune(), Prune(0.3, 3)),
    "rdoq": (RDOQ(0.3), RDOQ(qp=-9, price=0.0)),
    "svd": (SVD(rank=4), SVD(share=0.5, bits=16)),
    "spatial_svd": (SpatialSVD(rank=4), SpatialSVD(share=0.5, bits=16)),
}

LADDERS: dict[str, tuple[Method, ...]] = {
    "qspca": tuple(QSPCA(8, bits, codebook_bits=6, tile=16) for bits in range(2, 9)),
    "scalar": tuple(Scalar(bits) for bits in range(2, 9)),
    "second_order": tuple(SecondOrder(step=2.0**-power) for power in range(7)),
    "vq": tuple(VQ(4**power) for power in range(1, 5)),
    "bgd": tuple(BGD(4**power) for power in range(1, 5)),
    "pqf": tuple(PQF(4**power, iterations=10) for power in range(1, 5)),
    "aq": tuple(AQ(2, 4**power, iterations=4) for power in range(1, 5)),
    "keep": tuple(Keep(dtype) for dtype in ("float8_e5m2", "bfloat16", "float16", "float32", "float64")),
    "lsq": tuple(LSQ(bits) for bits in (2, 4, 8)),
    "ttq": (TTQ(),),
    "abcnet": tuple(ABCNet(bases) for bases in (1, 3, 5)),
    "prune": tuple(Prune(0.5, bits) for bits in range(2, 9)),
    "rdoq": tuple(RDOQ(2.0**-power) for power in range(7)),
    "svd": tuple(SVD(rank=4, bits=bits) for bits in (2, 4, 8, 16)),
    "spatial_svd": tuple(SpatialSVD(rank=4, bits=bits) for bits in (2, 4, 8, 16)),
}
"""Each method from few bits to many. LSQ's steps are a start, of which neighbours may swap in small rows;
of ABC-Net's signs, those of the next entry are the last one's and more."""

for _name, _method in METHODS.items():  # one that is in no table yet has the settings it is compared by
    _ladder = next(iter(_method.ladders()), None) or (_method(),)
    SETTINGS.setdefault(_name, (_ladder[0], _ladder[-1]))
    LADDERS.setdefault(_name, tuple(_ladder))

KEEPS_ANYTHING = {"keep"}
"""Methods that store numbers as they are, NaN included."""

SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "linear": ((48, 64), 0),
    "embedding": ((101, 12), 0),
    "conv1d": ((24, 10, 5), 0),
    "conv2d": ((32, 16, 3, 3), 0),
    "conv3d": ((8, 6, 2, 3, 3), 0),
    "grouped": ((32, 4, 3, 3), 0),
    "depthwise": ((40, 1, 3, 3), 0),
    "transposed": ((16, 24, 3, 3), 1),
    "transposed grouped": ((16, 6, 3, 3), 4),
    "transposed depthwise": ((12, 1, 4), 12),
    "odd": ((61, 67), 0),
    "tiny": ((2, 2), 0),
    "one": ((1, 1), 0),
    "one row": ((1, 300), 0),
    "one column": ((300, 1), 0),
}

FP16_EPS = torch.finfo(torch.float16).eps
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FAR: dict[str, tuple[torch.dtype, int]] = {
    f"{name} {size}": (dtype, power)
    for name, dtype in {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}.items()
    for size, power in {"1e30": 100, "1e-20": -66, "1e-33": -110}.items()
}
"""Units far from one: a type, and the power of two by which weights of that type are multiplied."""

METHOD_OF = {
    f"{name}{index}": method for name, methods in SETTINGS.items() for index, method in enumerate(methods)
}
each_method = pytest.mark.parametrize("method", METHOD_OF.values(), ids=METHOD_OF)
each_setting = pytest.mark.parametrize("setting", METHOD_OF)


def test_every_method_is_here() -> None:
    assert set(SETTINGS) == set(LADDERS) == set(METHODS)
    for name, methods in SETTINGS.items():
        assert {type(method) for method in (*methods, *LADDERS[name])} == {METHODS[name]}


@contextmanager
def case(*names: object) -> Iterator[None]:
    """A test of many cases says which of them failed."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(map(str, names))}")
        raise


STORED = pairwise(METHOD_OF, SHAPES, DTYPES)


@each_setting
def test_encode_store_decode(setting: str, tmp_path: Path) -> None:
    for each, shape_name, dtype in STORED:
        if each == setting:
            with case(shape_name, dtype):
                check_stored(METHOD_OF[setting], *SHAPES[shape_name], dtype, tmp_path)


def check_stored(
    method: Method, shape: tuple[int, ...], groups: int, dtype: torch.dtype, folder: Path
) -> None:
    weight = seeded(*shape, dtype=dtype)
    before = weight.clone()
    encoded = method.encode(Weight(weight, groups))

    assert_same_tensor(weight, before)
    assert_same_encoded(method.encode(Weight(weight, groups)), encoded)
    check(encoded.kind, encoded.layout, encoded.dtype, specs(encoded))
    for name, bits in encoded.bits.items():
        low, high = code_range(bits)
        assert encoded.parts[name].dtype == code_dtype(bits)
        assert low <= encoded.parts[name].min() <= encoded.parts[name].max() <= high

    decoded = decode(encoded)
    assert (decoded.shape, decoded.dtype) == (weight.shape, weight.dtype)
    assert decoded.isfinite().all()
    assert_same_tensor(decode(encoded), decoded)

    path = folder / "one.packed.safetensors"
    write_packed(path, {"w": encoded})
    reader = Reader(path)
    assert_same_encoded(reader["w"], encoded)
    assert_same_tensor(decode(reader["w"]), decoded)
    for name, bits in encoded.bits.items():
        assert reader.rows["w"].parts[name].stored_bytes <= bit_string_bytes(
            encoded.parts[name].numel(), bits
        )
    if not encoded.extra_zeros:  # else the paper may count a mask in the place of codes
        stored_bits = {name: 8 * part.stored_bytes for name, part in reader.rows["w"].parts.items()}
        assert sum(stored_bits.values()) <= sum(fixed_bits(encoded).values()) + 7 * len(encoded.bits)


@pytest.mark.parametrize("name", METHODS)
def test_more_bits_are_never_worse(name: str) -> None:
    """Up to the rounding of FP16 scales, which decides where nothing else differs."""
    for shape_name, (shape, groups) in SHAPES.items():
        weight = seeded(*shape, dtype=torch.float64)
        errors = [
            relative_error(decode(method.encode(Weight(weight, groups))), weight) for method in LADDERS[name]
        ]
        with case(shape_name):
            for coarse, fine in itertools.pairwise(errors):
                assert fine <= coarse + FP16_EPS


@each_method
def test_zeros_stay_zeros(method: Method) -> None:
    for name, (shape, groups) in SHAPES.items():
        assert decode(method.encode(Weight(torch.zeros(shape), groups))).eq(0).all(), name


def settings_in_units() -> list[tuple[str, str, str]]:
    """Every setting in every unit and every shape in every unit; settings meet shapes above."""
    shapes = itertools.cycle(SHAPES)
    return [(setting, next(shapes), unit) for unit in FAR for setting in METHOD_OF]


def test_units_meet_everything() -> None:
    cases = settings_in_units()
    assert {(shape, unit) for _, shape, unit in cases} == set(itertools.product(SHAPES, FAR))


@each_setting
def test_the_unit_of_the_weights_does_not_matter(setting: str) -> None:
    """Only scales may: they are FP16 where that can hold them, and FP32 elsewhere."""
    method = METHOD_OF[setting]
    for each, shape_name, unit in settings_in_units():
        if each != setting:
            continue
        (shape, groups), (dtype, power) = SHAPES[shape_name], FAR[unit]
        weight = seeded(*shape, dtype=dtype)
        moved = weight * 2.0**power
        there = in_unit(method, 2.0**power)
        with case(shape_name, unit):
            usual = relative_error(decode(method.encode(Weight(weight, groups))), weight)
            found = relative_error(decode(there.encode(Weight(moved, groups))), moved)
            assert abs(found - usual) <= FP16_EPS


def in_unit(method: Method, unit: float) -> Method:
    """A step is in the weights' own unit, and so is a quantization parameter, four of which are an octave."""
    if isinstance(method, SecondOrder) and method.step is not None:
        return dataclasses.replace(method, step=method.step * unit)
    if isinstance(method, RDOQ) and method.qp is not None:
        return dataclasses.replace(method, qp=method.qp + round(4 * math.log2(unit)))
    return method


@each_method
def test_numbers_that_are_none(method: Method) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        weight = seeded(48, 64)
        weight[5, 7] = bad
        with case(bad):
            if method.name in KEEPS_ANYTHING:
                assert str(decode(method.encode(Weight(weight)))[5, 7].item()) == str(bad)
                continue
            with pytest.raises(WeightError, match="1 of 3072 weights are NaN or infinite"):
                method.encode(Weight(weight))


@each_method
def test_views_and_parameters_are_read_as_they_are(method: Method) -> None:
    wide = seeded(64, 96)
    view = wide[:, ::2].T
    expected = method.encode(Weight(view.contiguous()))
    assert_same_encoded(method.encode(Weight(view)), expected)
    trained = method.encode(Weight(torch.nn.Parameter(view)))
    assert_same_encoded(trained, expected)
    assert not any(part.requires_grad for part in trained.parts.values())


@each_method
def test_a_transposed_weight_is_its_plain_twin_turned(method: Method) -> None:
    """The parts are those of the same numbers stored out first, so one order of reading serves all."""
    for groups in (1, 2, 4):
        plain = seeded(24, 16 // groups, 3, 3)
        turned = Weight(turn(plain, groups), groups)
        found, expected = method.encode(turned), method.encode(Weight(plain))
        with case(groups):
            for part, (one, other) in both_parts(found, expected):
                assert torch.equal(one, other), part
            assert_same_tensor(decode(found), turn(decode(expected), groups))


def turn(plain: Tensor, groups: int) -> Tensor:
    """(out, in/g, 3, 3) as a transposed convolution stores it: (in, out/g, 3, 3)."""
    return torch.cat([block.transpose(0, 1) for block in plain.chunk(groups)])


def both_parts(one: Encoded, other: Encoded) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Pairs of parts; kept values lie as in the source, so they have no plain twin."""
    assert list(one.parts) == list(other.parts)
    for name in one.parts:
        if name != "values":
            yield name, (one.parts[name], other.parts[name])
