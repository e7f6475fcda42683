"""Levels and spatial factors that lie: refused when the file is opened, or, where only the codes tell, when
it is decoded."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from factorpack.decoding import decode
from factorpack.errors import FormatError
from factorpack.format import entropy
from factorpack.format.container import Reader
from factorpack.record import Encoded
from tests.helpers import little_memory, write_packed
from tests.tampered import Pieces, take_apart

CODES = torch.arange(60, dtype=torch.int8).remainder(3).reshape(4, 15) - 1
TERNARY = Encoded(
    "levels",
    (4, 5, 3),
    torch.float32,
    {"codes": CODES, "levels": torch.tensor([[-0.5, 0.0, 0.75]]).half()},
    {"codes": 2},
)
SIGNS = Encoded(
    "levels",
    (4, 5, 3),
    torch.float32,
    {"codes": CODES.clamp(-1, 0), "levels": torch.tensor([[-1.0, 1.0]] * 4)},
    {"codes": 1},
)
SPATIAL = Encoded(
    "spatial",
    (4, 5, 2, 3),
    torch.float32,
    {
        "codebook": torch.ones(10, 2, dtype=torch.int8),
        "codebook_scale": torch.ones(1, 2).half(),
        "latent": torch.ones(2, 12, dtype=torch.int8),
        "latent_scale": torch.ones(2, 1).half(),
    },
    {"codebook": 4, "latent": 4},
)
Tamper = Callable[[Pieces], None]


def pieces(folder: Path) -> Pieces:
    write_packed(folder / "file", {"ternary": TERNARY, "signs": SIGNS, "spatial": SPATIAL})
    return take_apart((folder / "file").read_bytes())


def part(tensor: str, name: str, value: list[object]) -> Tamper:
    return lambda found: found.row(tensor)["parts"].__setitem__(name, value)


def field(tensor: str, name: str, value: object) -> Tamper:
    return lambda found: found.row(tensor).__setitem__(name, value)


SCHEMAS: dict[str, tuple[Tamper, str]] = {
    "more levels than bits tell apart": (
        part("signs", "levels", ["raw", "float32", [1, 3], 12]),
        "levels of shape (1, 3), expected 2 to 2 in each row of a matrix",
    ),
    "a single level": (part("ternary", "levels", ["raw", "float16", [1, 1], 2]), "levels of shape (1, 1)"),
    "no level": (part("ternary", "levels", ["raw", "float16", [1, 0], 0]), "levels of shape (1, 0)"),
    "levels in a list": (part("ternary", "levels", ["raw", "float16", [3], 6]), "levels of shape (3,)"),
    "levels of other channels": (
        part("ternary", "levels", ["raw", "float16", [2, 3], 12]),
        "part 'levels' has shape (2, 3), expected one of [(1, 3), (4, 3)]",
    ),
    "integer levels": (
        part("ternary", "levels", ["raw", "int16", [1, 3], 6]),
        "part 'levels' is torch.int16",
    ),
    "levels that are codes": (
        part("ternary", "levels", ["packed", 16, [1, 3], 6]),
        "part 'levels' is torch.int16",
    ),
    "codes of another shape": (
        part("signs", "codes", ["packed", 1, [15, 4], 8]),
        "part 'codes' has shape (15, 4), expected (4, 15)",
    ),
    "codes of 17 bits": (part("signs", "codes", ["packed", 17, [4, 15], 8]), "codec 'packed' cannot hold 17"),
    "a number without channels": (field("signs", "shape", []), "has no channels to quantize"),
    "an empty weight": (field("signs", "shape", [4, 0]), "has no channels to quantize"),
    "extra zeros": (field("ternary", "extra_zeros", 1), "claims 1 extra zeros among 0 codes"),
    "an integer weight": (field("ternary", "dtype", "int8"), "cannot represent a torch.int8 tensor"),
    "scalar codes of one bit": (
        lambda found: found.row("signs").update(
            kind="scalar",
            parts={"codes": ["packed", 1, [4, 15], 8], "scale": ["raw", "float32", [4, 1], 16]},
        ),
        "part 'codes' has 1 bits",
    ),
    "2^40 numbers": (
        lambda found: found.row("ternary").update(
            shape=[1, 1 << 40],
            parts={"codes": ["ans", 2, [1, 1 << 40], 20], "levels": ["raw", "float16", [1, 3], 6]},
        ),
        "claims 1099511627776 elements in 26 bytes",
    ),
    "spatial factors of a vector": (
        lambda found: found.row("spatial").update(shape=[120]),
        "a tensor of shape (120,) has no filters",
    ),
    "spatial factors of other filters": (
        field("spatial", "shape", [4, 5, 3, 2]),
        "a codebook of 10 rows for 5 inputs and filters 3 high",
    ),
    "spatial factors of other outputs": (
        field("spatial", "shape", [5, 5, 2, 3]),
        "part 'latent' has shape (2, 12), expected (2, 15)",
    ),
    "spatial factors of nothing": (field("spatial", "shape", [0, 5, 2, 3]), "has no factors"),
    "a spatial mean": (
        part("spatial", "mean", ["raw", "float32", [10, 1], 40]),
        "found parts ['codebook', 'codebook_scale', 'latent', 'latent_scale', 'mean']",
    ),
    "extra zeros of a spatial latent": (
        field("spatial", "extra_zeros", 1),
        "claims 1 extra zeros among 0 codes",
    ),
    "spatial factors of groups that do not divide": (
        field("spatial", "transposed_groups", 3),
        "is not a transposed convolution of 3 groups",
    ),
    "2^40 levels": (
        part("ternary", "levels", ["raw", "float16", [1, 1 << 40], 1 << 41]),
        "levels of shape (1, 1099511627776), expected 2 to 4",
    ),
}


@pytest.mark.parametrize(("tamper", "message"), SCHEMAS.values(), ids=SCHEMAS)
def test_hostile_schemas(tmp_path: Path, tamper: Tamper, message: str) -> None:
    found = pieces(tmp_path)
    tamper(found)
    (tmp_path / "file").write_bytes(found.build())
    with little_memory(), pytest.raises(FormatError) as caught:
        Reader(tmp_path / "file")
    assert message in str(caught.value)


@pytest.mark.parametrize("code", [-2, 1])
def test_codes_beyond_the_levels(tmp_path: Path, code: int) -> None:
    """Two bits hold four codes, and there are three levels: the reader gives the codes, decoding refuses."""
    found = pieces(tmp_path)
    other = CODES.clamp(-1, 0).numpy().copy()
    other[2, 3] = code
    found.set_part("ternary", "codes", entropy.encode(other))
    found.row("ternary")["parts"]["codes"][0] = "ans"
    found.sign()
    (tmp_path / "file").write_bytes(found.build())
    encoded = Reader(tmp_path / "file")["ternary"]
    if code == 1:
        assert decode(encoded).max() == 0.75
        return
    with pytest.raises(FormatError, match="codes -2 to 0, 3 levels allow -1 to 1"):
        decode(encoded)


def test_codes_beyond_their_bits(tmp_path: Path) -> None:
    found = pieces(tmp_path)
    found.set_part("signs", "codes", entropy.encode(np.eye(4, 15, dtype=np.int8)))
    found.row("signs")["parts"]["codes"][0] = "ans"
    found.sign()
    (tmp_path / "file").write_bytes(found.build())
    with pytest.raises(FormatError, match="codes 0 to 1 do not fit 1 bits"):
        Reader(tmp_path / "file")["signs"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_levels_that_are_no_numbers(tmp_path: Path, bad: float) -> None:
    found = pieces(tmp_path)
    found.set_part("ternary", "levels", struct.pack("<3e", -0.5, bad, 0.75))
    found.sign()
    (tmp_path / "file").write_bytes(found.build())
    with pytest.raises(FormatError, match="part 'levels' holds NaN or infinity"):
        Reader(tmp_path / "file")["ternary"]


def test_the_files_that_are_tampered_with_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pieces(tmp_path).build())
    reader = Reader(tmp_path / "file")
    assert decode(reader["ternary"]).unique().tolist() == [-0.5, 0.0, 0.75]
    assert decode(reader["signs"]).unique().tolist() == [-1.0, 1.0]
    assert decode(reader["spatial"]).unique().tolist() == [2.0]
