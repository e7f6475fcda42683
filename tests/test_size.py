"""Both accountings: the paper's ratios by its formula, and small examples by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import factorpack as fp
from benchmarks.zoo import resnet18
from factorpack.quantize.mantissas import round_mantissas
from factorpack.record import Encoded
from factorpack.size import ITEMS, fixed_bits, size_report, words
from factorpack.weight import Weight
from tests.helpers import seeded


@pytest.mark.parametrize(("rank", "latent_bits", "ratio"), [(256, 5, 6.01), (128, 3, 16.95), (128, 5, 11.24)])
def test_the_papers_ratios_for_resnet18(rank: int, latent_bits: int, ratio: float) -> None:
    """Within half a percent: the paper does not say what its smallest layers get."""
    method = fp.QSPCA(rank, latent_bits, clip="minmax")
    report = fp.compress(resnet18(), method).size()
    assert math.isclose(report.paper_ratio, ratio, rel_tol=0.005)


def test_the_papers_worked_example() -> None:
    """A 256 x 256 x 3 x 3 weight, d = 256, k = 128: the latent has 128 x 2304 entries."""
    encoded = fp.QSPCA(128, 4).encode(Weight(seeded(256, 256, 3, 3)))
    assert encoded.parts["latent"].shape == (128, 2304)
    assert fixed_bits(encoded) == items(
        codebook=256 * 128 * 4, latent=128 * 2304 * 4, scales=2 * 128 * 16, mean=256 * 32
    )


def items(**bits: int) -> dict[str, int]:
    return dict.fromkeys(ITEMS, 0) | bits


def factors(latent: Tensor, extra_zeros: int, latent_bits: int = 4) -> Encoded:
    rank, count = latent.shape
    parts = {
        "codebook": torch.zeros(8, rank, dtype=torch.int8),
        "codebook_scale": torch.ones(1, rank, dtype=torch.float16),
        "latent": latent,
        "latent_scale": torch.ones(rank, 1),
    }
    bits = {"codebook": 3, "latent": latent_bits}
    return Encoded("factors", (8, count), torch.float32, parts, bits, extra_zeros=extra_zeros)


def latent(zeros: int, rank: int = 2, count: int = 50) -> Tensor:
    flat = torch.ones(rank * count, dtype=torch.int8)
    flat[:zeros] = 0
    return flat.reshape(rank, count)


@pytest.mark.parametrize(
    ("zeros", "extra", "latent_bits", "masked"),
    [
        (30, 10, 4, True),  # a mask of 100 saves 120
        (26, 1, 4, True),
        (25, 25, 4, False),  # saves 100 and costs 100: r must exceed 1/b
        (24, 24, 4, False),
        (90, 0, 4, False),  # zeros of rounding alone: the paper's formula has no mask for them
        (51, 51, 2, True),
        (50, 50, 2, False),
        (100, 100, 3, True),
    ],
)
def test_the_mask_counts_only_where_a_threshold_made_zeros_and_where_it_pays(
    zeros: int, extra: int, latent_bits: int, masked: bool
) -> None:
    found = fixed_bits(factors(latent(zeros), extra, latent_bits))
    side = {"codebook": 8 * 2 * 3, "scales": 2 * 16 + 2 * 32}
    if masked:
        assert found == items(**side, mask=100, latent=(100 - zeros) * latent_bits)
    else:
        assert found == items(**side, latent=100 * latent_bits)


def test_scalar_codes_by_hand() -> None:
    encoded = fp.Scalar(3).encode(Weight(seeded(10, 7)))
    assert fixed_bits(encoded) == items(latent=70 * 3, scales=10 * 16)


@pytest.mark.parametrize(("dtype", "width"), [(None, 32), ("float16", 16), ("float8_e5m2", 8)])
def test_kept_values_by_hand(dtype: str | None, width: int) -> None:
    assert fixed_bits(fp.Keep(dtype).encode(Weight(seeded(11)))) == items(values=11 * width)


STATE = {
    "conv.weight": seeded(10, 7),
    "bn.weight": torch.ones(4),
    "bn.running_mean": torch.ones(4),
    "bn.running_var": torch.ones(4),
    "bn.num_batches_tracked": torch.tensor(9),
    "half": seeded(3, dtype=torch.float16),
}


def test_a_small_report_by_hand() -> None:
    report = fp.compress(STATE, fp.Scalar(4)).size()
    lines = {line.name: line for line in report.tensors}
    assert list(lines) == list(STATE)
    assert [line.original_bytes for line in report.tensors] == [280, 16, 16, 16, 8, 12]  # as FP32
    assert [line.source_bytes for line in report.tensors] == [280, 16, 16, 16, 8, 6]
    assert report.original_bytes == 348
    assert report.source_bytes == 342
    # Running statistics and integers are no parameters: conv at 4 bits and 10 scales, the rest as it is.
    assert report.paper_ratio == 8 * (280 + 16 + 12) / (70 * 4 + 160 + 128 + 48)
    assert (report.file_bytes, report.file_ratio) == (None, None)
    assert all(line.stored_bytes is None for line in report.tensors)
    assert lines["conv.weight"].bytes == (70 * 4 + 160) // 8
    assert lines["bn.weight"].words == "kept as float32"
    assert lines["conv.weight"].words.startswith("4 bits, ")
    assert lines["bn.weight"].note == "vector"


def test_rounded_values_in_words() -> None:
    rounded = round_mantissas(seeded(16), 6, torch.float16)
    for values, said in (
        (rounded, "kept as float16, 6 bits of mantissa"),
        (rounded[:15], "kept as float16"),  # so few may be so by chance
        (seeded(16).half(), "kept as float16"),
        (torch.ones(16), "kept as float32"),
    ):
        assert words(Encoded("keep", tuple(values.shape), torch.float32, {"values": values})) == said


def test_a_saved_report_sums_to_the_file(tmp_path: Path) -> None:
    packed = fp.compress(STATE, fp.Scalar(4))
    fp.save(packed, tmp_path / "a.safetensors")
    for report in (packed.size(), fp.load(tmp_path / "a.safetensors").size()):
        assert report.file_bytes == (tmp_path / "a.safetensors").stat().st_size
        assert report.file_ratio == 348 / report.file_bytes
        assert sum(line.bytes for line in report.tensors) == report.file_bytes
        kept = {line.name: line.stored_bytes["values"] for line in report.tensors if line.kind == "keep"}  # type: ignore[index]
        ones = dict.fromkeys(("bn.weight", "bn.running_mean", "bn.running_var"), 7)  # by the codec of floats
        assert kept == ones | {"bn.num_batches_tracked": 8, "half": 6}
        assert all(set(line.stored_bytes or {}) == set(ITEMS) for line in report.tensors)


def test_zeros_in_words() -> None:
    report = size_report({"x": factors(latent(25), 0)})
    assert report.tensors[0].words == "rank 2 of 8, 4 bits, 25% zeros"


def one_step(latent: Tensor) -> Encoded:
    many = factors(latent, 0, latent_bits=12)
    return replace(many, parts={**many.parts, "latent_scale": torch.ones(1, 1)})


def test_a_path_in_words() -> None:
    parts = {"codes": torch.tensor([[2, 0]], dtype=torch.int8), "scale": torch.ones(1, 1)}
    encoded = Encoded("scalar", (1, 2), torch.float32, parts, {"codes": 4}, trellis=8)
    assert words(encoded) == "3 bits, 50% zeros, trellis"


def test_one_step_in_words() -> None:
    """Rank and width are what the codes need, since the declared ones are limits."""
    codes = torch.zeros(6, 50, dtype=torch.int16)
    codes[1, 3], codes[4, 0] = 64, -128
    assert words(one_step(codes)) == "rank 2 of 8, 8 bits, 99% zeros"
    codes[4, 1] = 128
    assert words(one_step(codes)) == "rank 2 of 8, 9 bits, 99% zeros"
    assert words(one_step(torch.zeros(6, 50, dtype=torch.int16))) == "rank 0 of 8, 1 bits, 100% zeros"
    parts = {"codes": codes, "scale": torch.ones(1, 1)}
    assert words(Encoded("scalar", (6, 50), torch.float32, parts, {"codes": 12})) == "9 bits, 99% zeros"


def codewords(stages: int, count: int, tile: int, bits: int) -> Encoded:
    """Six tiles, each the sum of `stages` codewords."""
    parts = {
        "codebook": torch.ones(stages * count, tile).half(),
        "indices": torch.full((stages, 6), -(1 << (bits - 1)), dtype=torch.int8),
    }
    return Encoded("codewords", (6 * tile,), torch.float32, parts, {"indices": bits})


@pytest.mark.parametrize(
    ("encoded", "text"),
    [
        (codewords(1, 5, 9, 3), "5 codewords of 9 values, 3 bits"),
        (codewords(2, 4, 8, 2), "2 x 4 codewords of 8 values, 2 bits"),
    ],
)
def test_codewords_count_the_codebook_and_the_indices(encoded: Encoded, text: str) -> None:
    assert words(encoded) == text
    codebook, indices = encoded.parts["codebook"].numel(), encoded.parts["indices"].numel()
    assert fixed_bits(encoded) == items(codebook=16 * codebook, latent=indices * encoded.bits["indices"])


def test_a_constant_counts_its_one_value() -> None:
    encoded = Encoded("constant", (30, 5), torch.int64, {"value": torch.tensor([3])})
    assert words(encoded) == "one value everywhere"
    assert fixed_bits(encoded) == items(values=64)
    assert size_report({"x": encoded}).original_bytes == 1200


def test_nothing_at_all() -> None:
    report = size_report({})
    assert (report.tensors, report.original_bytes, report.paper_ratio) == ((), 0, 1.0)
