"""Streams that lie, under schemas and checksums that are right: refused when the tensor is read."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import constriction
import numpy as np
import pytest

from factorpack.errors import FormatError
from factorpack.format import entropy
from factorpack.format.bitpack import pack
from factorpack.format.container import Reader
from tests.golden.make import GOLDEN
from tests.helpers import little_memory
from tests.pieces import Pieces, take_apart

BLOB = GOLDEN.read_bytes()
LATENT = take_apart(BLOB).part("conv.weight", "latent")  # (8, 34), 3 bits, two models of eight codes
TABLE = 3 + 1 + 23  # header, a bit a row, 2 * 7 frequencies of 13 bits
MESSAGE = LATENT[TABLE:]
Change = Callable[[bytes], bytes]


def half(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


def patched(position: int, data: bytes) -> Change:
    return lambda old: old[:position] + data + old[position + len(data) :]


def constant(data: bytes) -> Change:
    return lambda _: data


def message_of(symbols: list[int]) -> bytes:
    """A message for the model of one symbol, in which a second one has 2^-24 of the range."""
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(np.array(symbols, np.int32), entropy._model(np.array([entropy.TOTAL])))
    return coder.get_compressed().astype("<u4").tobytes()


def coded(high: int) -> bytes:
    """Codes that are valid but for the width the schema declares."""
    return entropy.encode(np.where(np.arange(8 * 34).reshape(8, 34) == 5, high, 0).astype(np.int8))


def groups(count: int, index: list[int]) -> bytes:
    """Models whose first of two codes has all the weight, with an empty message: every code is zero."""
    width = (count - 1).bit_length()
    return (
        bytes([0, 1, count - 1])
        + pack(np.array(index, np.uint16), width)
        + pack(np.zeros(count, np.uint16), 13)
    )


def frequencies(*values: int) -> bytes:
    return bytes([0, len(values), 0]) + pack(np.array(values, np.uint16), 13)


LATENTS: dict[str, tuple[Change, str]] = {
    "nothing": (constant(b""), "an entropy-coded stream of 0 bytes has no header"),
    "half a header": (constant(LATENT[:2]), "an entropy-coded stream of 2 bytes has no header"),
    "a header alone": (constant(LATENT[:3]), "an entropy-coded stream of 3 bytes is cut short"),
    "half a word": (constant(LATENT[:-2]), "is cut short"),
    "a word less": (constant(LATENT[:-4]), "longer than its codes"),
    "a word more": (constant(LATENT + b"\1\0\0\0"), "longer than its codes"),
    "a zero word more": (constant(LATENT + bytes(4)), "ends in a zero word"),
    "a word more in front": (constant(LATENT[:TABLE] + b"\1\0\0\0" + MESSAGE), "longer than its codes"),
    "256 models": (patched(2, b"\xff"), "256 models for codes -4 to 3"),
    "33 models": (patched(2, bytes([32])), "33 models for codes -4 to 3"),
    "codes beyond int8": (patched(0, b"\x79"), "2 models for codes 121 to 128"),
    "a model that is not there": (constant(groups(3, [0, 1, 2, 3, 0, 0, 0, 0])), "a row uses model 3 of 3"),
    "frequencies of 4097": (constant(frequencies(4096, 1)), "exceed 4096"),
    "frequencies of 8191": (constant(frequencies(8191)), "exceed 4096"),
    "bits behind the models": (
        constant(bytes([0, 1, 2]) + b"\x00\x00" + bytes(4) + b"\x80"),
        "bits are set after the last value",
    ),
    "codes too high for 3 bits": (constant(coded(4)), "codes 0 to 4 do not fit 3 bits"),
    "codes too low for 3 bits": (constant(coded(-5)), "codes -5 to 0 do not fit 3 bits"),
    "a code the model lacks": (
        constant(bytes([0, 0, 0]) + message_of([0] * 271 + [1])),
        "holds a code that its model lacks",
    ),
    "a code the model lacks, beyond int8": (
        constant(bytes([127, 0, 0]) + message_of([1] * 272)),
        "holds a code that its model lacks",
    ),
}


def refused(tmp_path: Path, pieces: Pieces) -> str:
    pieces.sign()
    (tmp_path / "file").write_bytes(pieces.build())
    reader = Reader(tmp_path / "file")
    with little_memory(), pytest.raises(FormatError) as caught:
        dict(reader)
    return str(caught.value)


@pytest.mark.parametrize(("change", "message"), LATENTS.values(), ids=LATENTS)
def test_hostile_messages(tmp_path: Path, change: Change, message: str):
    pieces = take_apart(BLOB)
    pieces.set_part("conv.weight", "latent", change(LATENT))
    found = refused(tmp_path, pieces)
    assert found.startswith("tensor 'conv.weight': part 'latent': ")
    assert message in found


def message_for(codes: np.ndarray) -> bytes:
    """The message the golden latent's own models give to codes."""
    index = np.array([LATENT[3] >> row & 1 for row in range(8)])
    coder = constriction.stream.stack.AnsCoder()
    for group, frequency in reversed(list(enumerate(entropy._read_tables(LATENT[4:TABLE], 2, 8)))):
        coder.encode_reverse(codes[index == group].astype(np.int32).ravel() + 4, entropy._model(frequency))
    return coder.get_compressed().astype("<u4").tobytes()


def test_every_flipped_bit_of_a_message_is_found_or_says_something_else():
    """Under a checksum made right: the decoder must end where the encoder began, so a message that is
    not refused is, bit for bit, the one message of other codes."""
    assert message_for(entropy.decode(LATENT, 8, 34)) == MESSAGE
    others = []
    for position in range(8 * len(MESSAGE)):
        flipped = bytearray(LATENT)
        flipped[TABLE + position // 8] ^= 1 << position % 8
        try:
            codes = entropy.decode(bytes(flipped), 8, 34)
        except FormatError:
            continue
        others.append(position)
        assert message_for(codes) == flipped[TABLE:]
    assert others == [24, 155, 283]


def test_many_models_can_be_read(tmp_path: Path):
    """The cases above start from this, which is valid."""
    pieces = take_apart(BLOB)
    pieces.set_part("conv.weight", "latent", groups(3, [0, 1, 2, 2, 0, 0, 0, 0]))
    pieces.sign()
    (tmp_path / "file").write_bytes(pieces.build())
    assert not Reader(tmp_path / "file")["conv.weight"].parts["latent"].any()


VALUES: dict[str, tuple[str, str, Change, str]] = {
    "NaN scale": ("fc.weight", "scale", patched(4, half(float("nan"))), "part 'scale' holds NaN or infinity"),
    "infinite scale": (
        "fc.weight",
        "scale",
        patched(0, half(float("inf"))),
        "part 'scale' holds NaN or infinity",
    ),
    "negative scale": ("fc.weight", "scale", patched(10, half(-1.0)), "part 'scale' holds a negative scale"),
    "negative codebook scale": (
        "conv.weight",
        "codebook_scale",
        patched(0, half(-1.0)),
        "part 'codebook_scale' holds a negative scale",
    ),
    "NaN latent scale": (
        "up.weight",
        "latent_scale",
        patched(0, struct.pack("<f", float("nan"))),
        "part 'latent_scale' holds NaN or infinity",
    ),
    "NaN mean": (
        "conv.weight",
        "mean",
        patched(8, struct.pack("<f", float("nan"))),
        "part 'mean' holds NaN or infinity",
    ),
    "infinite mean": (
        "conv.weight",
        "mean",
        patched(8, struct.pack("<f", -float("inf"))),
        "part 'mean' holds NaN or infinity",
    ),
    "a boolean of 2": ("mask", "values", patched(1, b"\2"), "part 'values': a boolean is neither 0 nor 1"),
}


@pytest.mark.parametrize(("tensor", "part", "change", "message"), VALUES.values(), ids=VALUES)
def test_hostile_values(tmp_path: Path, tensor: str, part: str, change: Change, message: str):
    pieces = take_apart(BLOB)
    pieces.set_part(tensor, part, change(pieces.part(tensor, part)))
    assert refused(tmp_path, pieces) == f"tensor {tensor!r}: {message}"


def test_bits_behind_packed_codes(tmp_path: Path):
    """239 codes of 4 bits leave half a byte."""
    pieces = take_apart(BLOB)
    pieces.row("fc.weight")["shape"] = [1, 239]
    pieces.row("fc.weight")["parts"] = {
        "codes": ["packed", 4, [1, 239], 120],
        "scale": ["raw", "float16", [1, 1], 2],
    }
    pieces.streams["fc.weight"] = bytes(119) + b"\x10" + half(1.0)
    assert refused(tmp_path, pieces) == "tensor 'fc.weight': part 'codes': bits are set after the last value"


@pytest.mark.parametrize("position", range(5))
def test_filler_that_is_not_zero(tmp_path: Path, position: int):
    pieces = take_apart(BLOB)
    assert pieces.row("zeros")["filler_bytes"] == 5
    stream = pieces.streams["zeros"]
    pieces.streams["zeros"] = patched(len(stream) - 5 + position, b"\1")(stream)
    assert refused(tmp_path, pieces) == "tensor 'zeros': the filler is not zero"


def test_a_small_file_cannot_ask_for_much(tmp_path: Path):
    """The most a stream may claim, 1024 numbers a byte: a megabyte of codes from a kilobyte, and no more."""
    pieces = take_apart(BLOB)
    pieces.row("zeros").update(shape=[2, 1 << 19], filler_bytes=1024 - 7)
    pieces.row("zeros")["parts"]["codes"][2] = [2, 1 << 19]
    pieces.streams["zeros"] = pieces.streams["zeros"][:7] + bytes(1017)
    pieces.sign()
    (tmp_path / "file").write_bytes(pieces.build())
    with little_memory(32 << 20):
        assert Reader(tmp_path / "file")["zeros"].parts["codes"].shape == (2, 1 << 19)
