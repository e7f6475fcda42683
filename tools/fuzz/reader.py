"""Packed files, damaged or forged, through everything that reads one.

A reader may refuse a file with an error of ours and with nothing else. What it accepts must be the original,
bit for bit, unless the checksums were made right; then it may be any other model. That one has to come through
every way to use it the same: decoded, verified, saved again, decoded to a file, and on the page of a report.
Some are compared with the reference reader of the tests, which was written from docs/format.md.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

import factorpack as fp
from factorpack.budget.curves import Curve
from factorpack.decoding import decode_into
from factorpack.errors import FactorpackError, FormatError
from factorpack.format.schema import Schema
from factorpack.format.streams import raw_bytes
from factorpack.record import Encoded
from factorpack.report import html
from factorpack.report.differences import verify
from factorpack.report.facts import gather
from tests.format.reference import read_packed, weight_of
from tests.golden.make import GOLDEN, codes, powers, tensors
from tests.helpers import write_packed
from tools.fuzz.damages import DAMAGES
from tools.fuzz.forgeries import FORGERIES, WHOLE, forged
from tools.fuzz.loop import Judge, Result, Target

REFUSED, SAME, OTHER = "refused", "same", "another model"
KINDS = (*DAMAGES, *FORGERIES, *WHOLE)
RARE = {"forge the size": 0.1, **dict.fromkeys(DAMAGES, 0.2)}
"""The share that kinds have beside the others: what is large takes long, and what is not signed is soon refused."""
COMPARED, MOST_COMPARED = 0.05, 3000
"""The share of accepted files that the reference reads too, and the most elements of one."""


@dataclass(frozen=True, slots=True)
class Original:
    """A valid file and what is in it."""

    blob: bytes
    schema: Schema
    weights: dict[str, bytes]


def prepare(folder: Path) -> Judge:
    valid, path = originals(), folder / "file"
    shares = [RARE.get(kind, 1.0) for kind in KINDS]
    alone = [0.5 + 5 * (len(original.weights) == 1) for original in valid]

    def judge_one(rng: random.Random) -> Result:
        (kind,), (original,) = rng.choices(KINDS, shares), rng.choices(valid, alone)
        path.write_bytes(damaged(kind, original.blob, rng))
        result, size = judge(path, original, kind not in DAMAGES, rng)
        return f"{kind}: {result}", size

    return judge_one


def damaged(kind: str, blob: bytes, rng: random.Random) -> bytes:
    return DAMAGES[kind](blob, rng) if kind in DAMAGES else forged(kind, blob, rng)


def judge(path: Path, original: Original, is_forged: bool, rng: random.Random) -> Result:
    """What reading a damaged file came to; whatever must not happen is raised."""
    size = path.stat().st_size
    try:
        packed = fp.load(path)
        schema = packed._reader.schema  # type: ignore[union-attr]
        size += schema.declared_bytes
        weights = packed.state_dict()
    except FormatError:
        return REFUSED, size
    bits = _bits(weights)
    same = bits == original.weights and schema == original.schema
    if not same and not is_forged:
        raise AssertionError("a damaged file was read as another model")
    if same and rng.random() < 0.9:  # nothing new to see
        return SAME, size
    try:
        use(packed, weights, bits)
    except FactorpackError as error:
        return f"read, then {type(error).__name__}", size
    if rng.random() < COMPARED and sum(value.numel() for value in weights.values()) < MOST_COMPARED:
        compare(path.read_bytes(), packed, weights)
    return SAME if same else OTHER, size


def use(packed: fp.Packed, weights: Mapping[str, Tensor], bits: Mapping[str, bytes]) -> None:
    """Everything that can be done with a file that was read; all of it has to agree."""
    assert packed.path is not None
    folder = packed.path.parent
    assert not [check for check in verify(packed) if check.problem]
    for name, weight in weights.items():
        decode_into(packed[name], torch.empty(weight.shape, dtype=weight.dtype))
    show(packed)
    fp.save(packed, folder / "again")
    assert _bits(fp.load(folder / "again").state_dict()) == bits, "saved again, it is another model"
    packed.decode_to(folder / "plain", progress=False)
    plain = _bits(load_file(folder / "plain"))
    assert plain == bits, "decoded to a file, it is another model"
    assert weights.keys() == {*packed, *packed.aliases}


def show(packed: fp.Packed, curves: Mapping[str, Curve] | None = None) -> None:
    """Makes the page of a report, whose scripts are read once."""
    with patch.object(html, "_template", _template):
        html.page(gather(packed, curves=curves))


_template = cache(html._template)


def _bits(weights: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: raw_bytes(value) for name, value in weights.items()}


def compare(blob: bytes, packed: fp.Packed, weights: Mapping[str, Tensor]) -> None:
    """Codes must be those of the reference reader, and weights those of its formulas up to rounding."""
    document, found = read_packed(blob)
    for row in document["tensors"]:
        encoded, name = packed[row["name"]], row["name"]
        for part, values in encoded.parts.items():
            expected = values.tolist() if part in encoded.bits else raw_bytes(values)
            assert found[name][part] == expected, f"the reference reads another {part}"
        if row["kind"] not in ("keep", "constant"):
            _check_weight(encoded, weights[name])
        elif row["kind"] == "keep":
            assert raw_bytes(encoded.parts["values"].to(encoded.dtype)) == raw_bytes(weights[name])


def _check_weight(encoded: Encoded, weight: Tensor) -> None:
    parts = {name: part.double() for name, part in encoded.parts.items()}
    values = _formula(encoded, parts)
    selects = {"indices", "codes"} if encoded.kind == "levels" else {"indices"}
    largest = _formula(
        encoded, {name: part if name in selects else part.abs() for name, part in parts.items()}
    )
    kind = torch.finfo(encoded.dtype)
    rounding = torch.finfo(torch.float32).eps * (4 + max(encoded.parts[next(iter(parts))].shape))
    allowed = rounding * largest + kind.eps * values.abs() + 2 * kind.smallest_normal
    limit = min(kind.max, torch.finfo(torch.float32).max)
    off = (weight.double() - values.clamp(-limit, limit)).abs() > allowed
    # Where a product leaves the range of FP32 on its way, the result is whatever the order of the sum makes it.
    assert not (off & (largest < limit)).any(), "the weights are not those of the formula"


def _formula(encoded: Encoded, parts: Mapping[str, Tensor]) -> Tensor:
    lists = {name: part.tolist() for name, part in parts.items()}
    bits = encoded.bits.get("indices", 0)
    flat = weight_of(encoded.kind, encoded.shape, encoded.transposed_groups, bits, lists)
    return torch.tensor(flat, dtype=torch.float64).reshape(encoded.shape)


@cache
def originals() -> list[Original]:
    """The golden file and small new ones, one of them with a stream large enough for its own entry."""
    golden = tensors()
    mixed = {
        "a": golden["up.weight"],
        "b": _scalar(3, 50, 3),
        "c": golden["mask"],
        "d": _scalar(1, 9000, 2),
        "f": _codewords(),
    }
    large = Encoded("keep", (4200,), torch.int32, {"values": torch.arange(4200, dtype=torch.int32)})
    models: list[tuple[dict[str, Encoded], dict[str, str]]] = [
        (mixed, {"e": "b"}),
        ({"w": _scalar(4, 200, 4), "empty": golden["empty"]}, {}),
        ({"w": golden["conv.weight"], "b": golden["odd"]}, {}),
        (
            {name: golden[name] for name in ("ternary", "signs", "pruned", "spatial.weight", "path.weight")},
            {},
        ),
        ({"large": large, "w": _scalar(1, 200, 4)}, {}),
    ]
    models += [({name: encoded}, {}) for name, encoded in (golden | {"sums": _codewords()}).items()]
    found = [_original(GOLDEN)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "original"
        for model, names in models:
            write_packed(path, model, names)
            found.append(_original(path))
    return found


def _original(path: Path) -> Original:
    packed = fp.load(path)
    schema = packed._reader.schema  # type: ignore[union-attr]
    return Original(path.read_bytes(), schema, _bits(packed.state_dict()))


def _scalar(rows: int, columns: int, bits: int) -> Encoded:
    """Codes of which every other row is nearly all zeros, so that entropy coding pays."""
    parts = {"codes": codes(rows + 1, columns, bits, salt=rows)[1:], "scale": powers(rows, 1, torch.float16)}
    return Encoded("scalar", (rows, columns), torch.float32, parts, {"codes": bits})


def _codewords() -> Encoded:
    """Sums of two of 2 x 5 codewords, whose 3 bits could hold three more."""
    indices = (codes(2, 60, 8, salt=11).to(torch.int32) % 5 - 4).to(torch.int8)
    parts = {"codebook": powers(10, 4, torch.float16), "indices": indices}
    return Encoded("codewords", (24, 10), torch.float32, parts, {"indices": 3})


TARGET = Target(prepare)
