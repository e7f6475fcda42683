"""Tensors of codewords that lie: refused by the schema before data is read, or when the tensor is."""

from __future__ import annotations

import struct
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from factorpack.errors import FormatError
from factorpack.format import streams
from factorpack.format.bitpack import pack
from factorpack.format.container import Reader
from factorpack.record import Encoded
from tests.helpers import little_memory, read_all, write_packed
from tests.tampered import Pieces, take_apart

COUNT, TILE = 5, 9
INDICES = (torch.arange(2 * 40) * 7 % COUNT - 4).reshape(2, 40).to(torch.int8)
"""Of 2 x 40 tiles in 3 bits: 0 to 4, of the 8 there could be."""
NAME = "conv.weight"


@pytest.fixture
def pieces(tmp_path: Path) -> Pieces:
    """A convolution of 8 x 5 x 3 x 3 as sums of two of 2 x 5 codewords."""
    codebook = torch.arange(2 * COUNT * TILE).reshape(2 * COUNT, TILE).half()
    parts = {"codebook": codebook, "indices": INDICES}
    encoded = Encoded("codewords", (8, 5, 3, 3), torch.float32, parts, {"indices": 3})
    with patch.object(streams, "_MOST_FLOATS", 0):
        write_packed(tmp_path / "file", {NAME: encoded})
    assert read_all(tmp_path / "file")[NAME].shape == (8, 5, 3, 3)
    return take_apart((tmp_path / "file").read_bytes())


BOOK, BYTES = ["raw", "float16", [10, 9], 180], 30  # 80 indices of 3 bits
SCHEMAS: dict[str, tuple[dict[str, object], str]] = {
    "no codebook": ({"indices": ["packed", 3, [2, 40], BYTES]}, "found parts ['indices']"),
    "a scale more": (
        {"codebook": BOOK, "indices": ["packed", 3, [2, 40], BYTES], "scale": ["raw", "float16", [1, 1], 2]},
        "found parts ['codebook', 'indices', 'scale']",
    ),
    "a codebook of codes": (
        {"codebook": ["packed", 4, [10, 9], 45], "indices": ["packed", 3, [2, 40], BYTES]},
        "part 'codebook' is torch.int8",
    ),
    "a codebook of integers": (
        {"codebook": ["raw", "int16", [10, 9], 180], "indices": ["packed", 3, [2, 40], BYTES]},
        "part 'codebook' is torch.int16",
    ),
    "raw indices": (
        {"codebook": BOOK, "indices": ["raw", "int8", [2, 40], 80]},
        "expected a matrix of codes of 2 to 16 bits",
    ),
    "indices of three dimensions": (
        {"codebook": BOOK, "indices": ["packed", 3, [2, 4, 10], BYTES]},
        "expected a matrix of codes",
    ),
    "a flat codebook": (
        {"codebook": ["raw", "float16", [90], 180], "indices": ["packed", 3, [2, 40], BYTES]},
        "a codebook of shape (90,) does not suit 2 stages of 360 elements",
    ),
    "no codewords": (
        {"codebook": ["raw", "float16", [0, 9], 0], "indices": ["packed", 3, [2, 40], BYTES]},
        "a codebook of shape (0, 9) does not suit 2 stages",
    ),
    "codewords of nothing": (
        {"codebook": ["raw", "float16", [10, 0], 0], "indices": ["packed", 3, [2, 40], BYTES]},
        "a codebook of shape (10, 0) does not suit",
    ),
    "no stages": (
        {"codebook": BOOK, "indices": ["packed", 3, [0, 40], 0]},
        "does not suit 0 stages of 360 elements",
    ),
    "stages that do not divide": (
        {"codebook": ["raw", "float16", [9, 9], 162], "indices": ["packed", 3, [2, 40], BYTES]},
        "a codebook of shape (9, 9) does not suit 2 stages",
    ),
    "codewords larger than the weight": (
        {"codebook": ["raw", "float16", [10, 361], 7220], "indices": ["packed", 3, [2, 1], 1]},
        "a codebook of shape (10, 361) does not suit",
    ),
    "too few tiles": (
        {"codebook": BOOK, "indices": ["packed", 3, [2, 39], 30]},
        "part 'indices' has shape (2, 39), expected (2, 40)",
    ),
    "too many bits": (
        {"codebook": BOOK, "indices": ["packed", 4, [2, 40], 40]},
        "indices of 4 bits, 5 codewords have 3",
    ),
    "too few bits": (
        {"codebook": BOOK, "indices": ["packed", 2, [2, 40], 20]},
        "indices of 2 bits, 5 codewords have 3",
    ),
    "a bomb of stages": (
        {"codebook": BOOK, "indices": ["ans", 3, [1 << 40, 40], 5]},
        "elements in 185 bytes, allowed are 1024 per byte",
    ),
}


@pytest.mark.parametrize(("parts", "message"), SCHEMAS.values(), ids=SCHEMAS)
def test_hostile_schemas(tmp_path: Path, pieces: Pieces, parts: dict[str, list[object]], message: str):
    pieces.row(NAME)["parts"] = parts
    pieces.streams[NAME] = bytes(sum(int(str(part[3])) for part in parts.values()))
    pieces.sign()
    (tmp_path / "file").write_bytes(pieces.build())
    with little_memory(), pytest.raises(FormatError) as caught:
        Reader(tmp_path / "file")
    assert f"tensor {NAME!r}: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("shape", [[8, 0, 3, 3], [0]])
def test_an_empty_tensor_has_no_codewords(tmp_path: Path, pieces: Pieces, shape: list[int]):
    pieces.row(NAME)["shape"] = shape
    (tmp_path / "file").write_bytes(pieces.build())
    with pytest.raises(FormatError, match="has no codewords"):
        Reader(tmp_path / "file")


@pytest.mark.parametrize("index", [5, 6, 7])
@pytest.mark.parametrize("place", [0, 39, 40, 79])
def test_an_index_beyond_the_codewords(tmp_path: Path, pieces: Pieces, index: int, place: int):
    """An index of the first stage would else read the second's codewords, one of the last no memory of ours."""
    stored = (INDICES.to(torch.int64) + 4).reshape(-1).numpy().astype(np.uint16)
    stored[place] = index
    pieces.row(NAME)["parts"]["indices"] = ["packed", 3, [2, 40], BYTES]
    pieces.streams[NAME] = pieces.part(NAME, "codebook") + pack(stored, 3)
    pieces.sign()
    (tmp_path / "file").write_bytes(pieces.build())
    message = f"tensor {NAME!r}: part 'indices' holds 0 to {index}, a codebook has codewords 0 to 4"
    with little_memory(), pytest.raises(FormatError, match=message):
        read_all(tmp_path / "file")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_codeword_that_is_no_number(tmp_path: Path, pieces: Pieces, bad: float):
    whole = pieces.part(NAME, "codebook")
    pieces.set_part(NAME, "codebook", whole[:-2] + struct.pack("<e", bad))
    pieces.sign()
    (tmp_path / "file").write_bytes(pieces.build())
    with pytest.raises(FormatError, match="part 'codebook' holds NaN or infinity"):
        read_all(tmp_path / "file")


def test_what_cannot_be_read_is_not_written(tmp_path: Path):
    parts = {"codebook": torch.ones(5, 2), "indices": torch.full((1, 3), 3, dtype=torch.int8)}
    beyond = Encoded("codewords", (6,), torch.float32, parts, {"indices": 3})
    with pytest.raises(FormatError, match="part 'indices' holds 7 to 7"):
        write_packed(tmp_path / "file", {"w": beyond})
