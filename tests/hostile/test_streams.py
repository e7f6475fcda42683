"""Streams that lie, under schemas and checksums that are right: refused when the tensor is read."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import constriction
import numpy as np
import pytest

from factorpack.errors import FormatError
from factorpack.format import chunks, entropy
from factorpack.format import frequency_tables as tables
from factorpack.format.container import Reader
from factorpack.format.stream_header import read_header
from factorpack.format.symbols import code_order
from tests.golden.make import CHUNKED, GOLDEN
from tests.helpers import little_memory
from tests.tampered import Pieces, take_apart

BLOB = GOLDEN.read_bytes()
LATENT = take_apart(BLOB).part("conv.weight", "latent")  # (8, 34), 3 bits
HEADER = 5
CLASSES = LATENT[3] + 1  # of rows; the columns have one
OWN_TABLES, TAKEN = tables.read_tables(LATENT[HEADER:], [CLASSES, 1], CLASSES, 8, LATENT[0])
TABLE = HEADER + TAKEN
MESSAGE = LATENT[TABLE:]
Change = Callable[[bytes], bytes]


def half(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


def patched(position: int, data: bytes) -> Change:
    return lambda old: old[:position] + data + old[position + len(data) :]


def constant(data: bytes) -> Change:
    return lambda _: data


def coded(high: int) -> bytes:
    """Codes that are valid but for the width the schema declares."""
    return entropy.encode(np.where(np.arange(8 * 34).reshape(8, 34) == 5, high, 0).astype(np.int16))


def stream(
    models: list[list[int]], flags: int = 8, low: int = 0, rows: int = 1, columns: int = 1, split: bytes = b""
) -> bytes:
    """A header and tables; with no message every symbol is the first of its table that has any weight."""
    even = [tables.normalized(np.ones((1, each), np.int64), 8) for each in (rows, columns)]
    whole = np.array(models)
    head = struct.pack("<BbBBB", flags, low, whole.shape[1] - 1, rows - 1, columns - 1)
    return head + split + tables.write_tables(even, whole, 8)


def bits(text: str) -> bytes:
    """Bits as they are read, the lowest of the first byte first."""
    return np.packbits([int(bit) for bit in text.replace(" ", "")], bitorder="little").tobytes()


ONE = [[256, 0, 0, 0, 0, 0, 0, 0]]
HEAD = bytes([8, 0, 3, 0, 0])  # T = 256, codes 0 to 3, one class of each
SIZES = bytes([3])  # the only model has four symbols

LATENTS: dict[str, tuple[Change, str]] = {
    "nothing": (constant(b""), "an entropy-coded stream of 0 bytes has no header"),
    "half a header": (constant(LATENT[:2]), "an entropy-coded stream of 2 bytes has no header"),
    "a wide header cut": (constant(bytes([8 | 32, 0, 0, 0, 0, 0])), "of 6 bytes has no header"),
    "a split header cut": (constant(bytes([8 | 64, 0, 0, 0, 0, 2, 0])), "of 7 bytes has no header"),
    "a header alone": (constant(LATENT[:5]), f"0 bytes cannot hold the sizes of {CLASSES} tables"),
    "half a word": (constant(LATENT[:-2]), "is cut short"),
    "a word less": (constant(LATENT[:-4]), "longer than its codes"),
    "a word more": (constant(LATENT + b"\1\0\0\0"), "longer than its codes"),
    "a zero word more": (constant(LATENT + bytes(4)), "ends in a zero word"),
    "a word more in front": (constant(LATENT[:TABLE] + b"\1\0\0\0" + MESSAGE), "longer than its codes"),
    "a total of 2^7": (patched(0, b"\x07"), "with a total of 2^7"),
    "a total of 2^17": (patched(0, b"\x11"), "with a total of 2^17"),
    "a total of 2^31": (patched(0, b"\x1f"), "with a total of 2^31"),
    "33 classes of rows": (patched(3, bytes([32])), "33 and 1 classes for codes -4 to 3"),
    "256 classes of columns": (patched(4, b"\xff"), "and 256 classes for codes -4 to 3"),
    "codes beyond int8": (patched(1, b"\x79"), "for codes 121 to 128"),
    "codes beyond int16": (
        constant(struct.pack("<BhHBB", 8 | 32, 32767, 1, 0, 0) + bytes(9)),
        "for codes 32767 to 32768",
    ),
    "a split of nothing": (constant(stream(ONE, 8 | 64, split=bytes(4))), "and a split of 0"),
    "a split that does not divide": (
        constant(stream(ONE, 8 | 64, split=struct.pack("<I", 3))),
        "34 columns cannot be split into 3 parts",
    ),
    "a split beyond the columns": (
        constant(stream(ONE, 8 | 64, split=b"\xff\xff\xff\xff")),
        "34 columns cannot be split into 4294967295 parts",
    ),
    "a table beyond the alphabet": (
        constant(bytes([8, 0, 4, 0, 0, 7])),
        "a table of 8 symbols, the alphabet has 5",
    ),
    "bits behind the sizes": (constant(bytes([8, 0, 3, 0, 0, 4])), "bits are set after the last value"),
    "more frequencies than bits": (
        constant(struct.pack("<BhHBB", 16 | 32, -32768, 65535, 0, 0) + b"\xff\xff" + b"\xff" * 100),
        "100 bytes cannot hold 65535 frequencies",
    ),
    "lengths cut short": (constant(HEAD + SIZES + bits("1 00")), "tables of an entropy coder are cut short"),
    "mantissas cut short": (constant(HEAD + SIZES + bits("1 1 1 00000")), "coder are cut short"),
    "a length above the total's": (
        constant(HEAD + SIZES + bits("00000000 1 1 1") + bytes(9)),
        "a frequency of 10 to 10 bits, allowed are 0 to 9",
    ),
    "a length below zero": (
        constant(HEAD + SIZES + bits("0" * 13 + "1 1 1") + bytes(9)),
        "a frequency of -1 to -1 bits, allowed are 0 to 9",
    ),
    "frequencies above the total": (
        constant(HEAD + SIZES + bits("0000 1 1 1") + bytes(9)),  # 128 and so on
        "the frequencies of an entropy model exceed 256",
    ),
    "bits behind the tables": (
        constant(HEAD + bytes([1]) + bits("0" * 11 + "1 1")),
        "bits are set after the last frequency",
    ),
    "codes too high for 3 bits": (constant(coded(4)), "codes 0 to 4 do not fit 3 bits"),
    "codes too low for 3 bits": (constant(coded(-5)), "codes -5 to 0 do not fit 3 bits"),
    "wide codes in 3 bits": (constant(coded(-32768)), "codes -32768 to 0 do not fit 3 bits"),
    "a message for one symbol": (
        constant(bytes([8, 0, 0, 0, 0]) + b"\1\0\0\0"),
        "longer than its codes",
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


LARGE = take_apart(BLOB).part(CHUNKED, "codes")  # (32, 40), four classes of rows, each a chunk
LENGTHS = [length for _, length in read_header(LARGE)[0].chunks]
NAMES, CHUNKS_AT = HEADER, len(LARGE) - sum(LENGTHS)
FIRST_LENGTH = NAMES + 8


def lengthened(extra: bytes) -> Change:
    """The last chunk longer, as its length says."""
    whole = struct.pack("<I", LENGTHS[-1] + len(extra))
    return lambda old: patched(FIRST_LENGTH + 12, whole)(old) + extra


def beyond(data: bytes) -> bytes:
    """The last chunk all of symbol 200, where the last one is 18."""
    wrong = chunks.compress_block(np.full(5000, 200, np.uint8)) or b""
    whole = data[: len(data) - LENGTHS[-1]] + wrong
    return patched(FIRST_LENGTH + 12, struct.pack("<I", len(wrong)))(whole)


CHUNKS: dict[str, tuple[Change, str]] = {
    "names cut": (constant(LARGE[: NAMES + 7]), "ends before its chunks are named"),
    "lengths cut": (constant(LARGE[: FIRST_LENGTH + 15]), "ends before its chunks' lengths"),
    "no chunk": (patched(NAMES, bytes(8)), "chunks of the models 0, in binary, where there are 4"),
    "a model too many": (patched(NAMES, b"\x1f"), "chunks of the models 11111, in binary, where there are 4"),
    "the highest model": (patched(NAMES + 7, b"\x80"), "in binary, where there are 4"),
    "longer than the stream": (patched(FIRST_LENGTH, b"\xff\xff\xff\xff"), "chunks of 4294967"),
    "another version": (patched(CHUNKS_AT - 2, b"\xff\xff"), "the chunks have another version"),
    "an older version": (
        patched(CHUNKS_AT - 2, b"\4\0"),
        "the chunks have another version: [4, 0], expected [4, 1]",
    ),
    "differences": (patched(CHUNKS_AT, b"\x10"), "a chunk does not hold plain values"),
    "multiples": (patched(CHUNKS_AT, b"\x01"), "a chunk does not hold plain values"),
    "an empty chunk": (
        lambda old: patched(FIRST_LENGTH, bytes(4))(old[:CHUNKS_AT] + old[CHUNKS_AT + LENGTHS[0] :]),
        "a chunk does not hold plain values",
    ),
    "a chunk cut": (
        lambda old: patched(FIRST_LENGTH + 12, struct.pack("<I", LENGTHS[-1] - 9))(old[:-9]),
        "cannot be read",
    ),
    "a chunk too long": (lengthened(b"\0\0"), "has 2 too many"),
    "a symbol beyond the last": (beyond, "a chunk has symbol 200, the last one is 18"),
    "no total": (patched(0, b"\x80"), "flags are 128, with a total of 2^0"),
}


@pytest.mark.parametrize(("change", "message"), CHUNKS.values(), ids=CHUNKS)
def test_hostile_chunks(tmp_path: Path, change: Change, message: str):
    pieces = take_apart(BLOB)
    pieces.set_part(CHUNKED, "codes", change(LARGE))
    found = refused(tmp_path, pieces)
    assert found.startswith(f"tensor '{CHUNKED}': part 'codes': ")
    assert message in found


def test_flipped_bits_of_chunks_are_refused_or_stay_within_the_alphabet():
    """A chunk has no end to arrive at, so most changed numbers are numbers too."""
    outcomes: Counter[str] = Counter()
    for position in range(8 * FIRST_LENGTH, 8 * len(LARGE)):
        flipped = bytearray(LARGE)
        flipped[position // 8] ^= 1 << position % 8
        try:
            codes = entropy.decode(bytes(flipped), 32, 40)
        except FormatError:
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        assert codes.shape == (32, 40)
        assert codes.min() >= -9
        assert codes.max() <= 9
    assert min(outcomes["refused"], outcomes["read"]) > 500


def message_for(codes: np.ndarray, other: bytes = MESSAGE) -> bytes:
    """The message the golden latent's own tables give to codes, and to the classes at a message's head."""
    classes = entropy.pop(entropy.open_coder(other), 8, OWN_TABLES[0])
    order = code_order(-4, 8).tolist()
    symbols = np.array([[order.index(code) for code in row] for row in codes.tolist()])
    coder = constriction.stream.stack.AnsCoder()
    for number in reversed(range(CLASSES)):
        entropy.push(coder, symbols[classes == number].ravel(), OWN_TABLES[2 + number])
    entropy.push(coder, classes, OWN_TABLES[0])
    return coder.get_compressed().astype("<u4").tobytes()


def test_every_flipped_bit_of_a_message_is_found_or_says_something_else():
    """Under a checksum made right: the decoder must end where the encoder began, so a message that is
    not refused is, bit for bit, the one message of other classes and codes."""
    assert message_for(entropy.decode(LATENT, 8, 34)) == MESSAGE
    refused = 0
    for position in range(8 * len(MESSAGE)):
        flipped = bytearray(LATENT)
        flipped[TABLE + position // 8] ^= 1 << position % 8
        try:
            codes = entropy.decode(bytes(flipped), 8, 34)
        except FormatError:
            refused += 1
            continue
        assert message_for(codes, bytes(flipped[TABLE:])) == flipped[TABLE:]
    assert refused > 0.9 * 8 * len(MESSAGE)


def test_what_the_cases_start_from_can_be_read(tmp_path: Path):
    for data in (
        stream(ONE),
        stream(ONE, 8 | 64, split=struct.pack("<I", 34)),
        stream(ONE * 5, rows=3, columns=3),
        HEAD + SIZES + bits("0" * 11 + "1 1 1"),
    ):
        pieces = take_apart(BLOB)
        pieces.set_part("conv.weight", "latent", data)
        pieces.sign()
        (tmp_path / "file").write_bytes(pieces.build())
        assert not Reader(tmp_path / "file")["conv.weight"].parts["latent"].any()


def test_wide_codes_beyond_their_bits(tmp_path: Path):
    """The latent of nine bits, one of whose codes is 200, as one of ten bits is fine; 2^8 is not."""
    pieces = take_apart(BLOB)
    codes = Reader(GOLDEN)["kernel.weight"].parts["latent"].numpy().copy()
    codes[3, 4] = 256
    pieces.set_part("kernel.weight", "latent", entropy.encode(codes, 24))
    message = "tensor 'kernel.weight': part 'latent': codes -16 to 256 do not fit 9 bits"
    assert refused(tmp_path, pieces) == message


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


@pytest.mark.parametrize("position", range(3))
def test_filler_that_is_not_zero(tmp_path: Path, position: int):
    pieces = take_apart(BLOB)
    assert pieces.row("zeros")["filler_bytes"] == 3
    stream = pieces.streams["zeros"]
    pieces.streams["zeros"] = patched(len(stream) - 3 + position, b"\1")(stream)
    assert refused(tmp_path, pieces) == "tensor 'zeros': the filler is not zero"


def test_a_small_file_cannot_ask_for_much(tmp_path: Path):
    """The most a stream may claim, 1024 numbers a byte: a megabyte of codes from a kilobyte, and no more."""
    pieces = take_apart(BLOB)
    pieces.row("zeros").update(shape=[2, 1 << 19], filler_bytes=1024 - 9)
    pieces.row("zeros")["parts"]["codes"][2] = [2, 1 << 19]
    pieces.streams["zeros"] = pieces.streams["zeros"][:9] + bytes(1015)
    pieces.sign()
    (tmp_path / "file").write_bytes(pieces.build())
    with little_memory(32 << 20):
        assert Reader(tmp_path / "file")["zeros"].parts["codes"].shape == (2, 1 << 19)
