"""Rows and streams of paths through a trellis that lie, under checksums that are right."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from factorpack.decoding import decode
from factorpack.errors import FormatError
from factorpack.format import frequency_tables as tables
from factorpack.format import trellis_stream as trellis
from factorpack.format.container import Reader
from factorpack.methods import SecondOrder
from factorpack.weight import Weight
from tests.helpers import little_memory, seeded, write_packed
from tests.tampered import Pieces, take_apart

ENCODED = SecondOrder(step=0.3, trellis=8).encode(Weight(seeded(40, 60)))
FACTORS = SecondOrder(step=0.3, trellis=4, tile=9).encode(Weight(seeded(32, 32, 3, 3)))
assert (ENCODED.trellis, FACTORS.trellis) == (8, 4)


@pytest.fixture(scope="module")
def blob(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("path") / "file"
    write_packed(
        path, {"w": ENCODED, "f": FACTORS, "plain": SecondOrder(step=0.3).encode(Weight(seeded(40, 60)))}
    )
    return path.read_bytes()


def refused(tmp_path: Path, pieces: Pieces) -> str:
    pieces.sign()
    (tmp_path / "file").write_bytes(pieces.build())
    with little_memory(), pytest.raises(FormatError) as caught:
        dict(Reader(tmp_path / "file"))
    return str(caught.value)


ROWS: dict[str, tuple[str, str, object, str]] = {
    "3 states": ("w", "trellis", 3, "a trellis of 3 states, known are 4, 8"),
    "16 states": ("w", "trellis", 16, "a trellis of 16 states, known are 4, 8"),
    "true states": ("w", "trellis", True, "trellis is True"),
    "states of text": ("w", "trellis", "8", "trellis is '8'"),
    "negative states": ("w", "trellis", -8, "trellis is -8"),
    "a path without states": (
        "w",
        "trellis",
        0,
        "0 trellis states and ['codes'] coded as a path, expected []",
    ),
    "states without a path": (
        "plain",
        "trellis",
        8,
        "8 trellis states and [] coded as a path, expected ['codes']",
    ),
}


@pytest.mark.parametrize(("tensor", "field", "value", "message"), ROWS.values(), ids=ROWS)
def test_hostile_rows(
    blob: bytes, tmp_path: Path, tensor: str, field: str, value: object, message: str
) -> None:
    pieces = take_apart(blob)
    pieces.row(tensor)[field] = value
    found = refused(tmp_path, pieces)
    assert found.startswith(f"tensor {tensor!r}: ")
    assert message in found


def test_states_of_a_kept_tensor(blob: bytes, tmp_path: Path) -> None:
    pieces = take_apart(blob)
    values = ["raw", "float32", [40, 60], 9600]
    pieces.row("w").update(kind="keep", parts={"values": values}, trellis=8)
    pieces.streams["w"] = bytes(9600)
    assert "8 trellis states and [] coded as a path" in refused(tmp_path, pieces)


def test_a_codebook_that_is_a_path(blob: bytes, tmp_path: Path) -> None:
    pieces = take_apart(blob)
    pieces.row("f")["parts"]["codebook"][0] = "trellis"
    assert "['codebook', 'latent'] coded as a path, expected ['latent']" in refused(tmp_path, pieces)


def test_floats_that_are_a_path(blob: bytes, tmp_path: Path) -> None:
    pieces = take_apart(blob)
    pieces.row("w")["parts"]["scale"][0] = "trellis"
    assert "codec 'trellis' cannot hold 'float16'" in refused(tmp_path, pieces)


Change = Callable[[bytes], bytes]
HEADER = 5


def with_segment(rows: int) -> Change:
    return lambda old: old[:HEADER] + struct.pack("<H", rows) + old[HEADER + 2 :]


def empty(symbols: int = 1, low: int = 0, segment: int = 64, flags: int = 8, split: bytes = b"") -> bytes:
    """A stream of one class and no message: every index is the first of its table."""
    even = [tables.normalized(np.ones((1, size), np.int64), 8) for size in (1, 2)]
    whole = np.array([[256] + [0] * (symbols - 1)] * 2)
    head = struct.pack("<BbBBB", flags, low, symbols - 1, 0, 0) + split + struct.pack("<H", segment)
    return head + tables.write_tables(even, whole, 8)


STREAMS: dict[str, tuple[Change, str]] = {
    "half a header": (lambda old: old[:3], "an entropy-coded stream of 3 bytes has no header"),
    "no segment": (lambda old: old[: HEADER + 1], "a path's stream of 6 bytes has no header"),
    "segments of no row": (with_segment(0), "segments of 0 rows, allowed are 16 to 1024"),
    "segments of 15 rows": (with_segment(15), "segments of 15 rows, allowed are 16 to 1024"),
    "segments of 65535 rows": (with_segment(65535), "segments of 65535 rows, allowed are 16 to 1024"),
    "a split that does not divide": (
        lambda _: empty(flags=8 | 64, split=struct.pack("<I", 7)),
        "60 columns cannot be split into 7 parts",
    ),
    "tables cut short": (lambda old: old[: HEADER + 4], "cannot hold"),
    "a word less": (lambda old: old[:-4], "longer than its codes"),
    "a word more": (lambda old: old + b"\1\0\0\0", "longer than its codes"),
    "half a word": (lambda old: old[:-2], "is cut short"),
    "levels beyond their bits": (lambda _: empty(low=100), "codes 200 to 200 do not fit"),
}


@pytest.mark.parametrize(("change", "message"), STREAMS.values(), ids=STREAMS)
def test_hostile_streams(blob: bytes, tmp_path: Path, change: Change, message: str) -> None:
    pieces = take_apart(blob)
    pieces.set_part("w", "codes", change(pieces.part("w", "codes")))
    found = refused(tmp_path, pieces)
    assert found.startswith("tensor 'w': part 'codes': ")
    assert message in found


def large_path() -> tuple[np.ndarray, bytes]:
    """Levels of 160 x 200 codes, and their stream, which has chunks."""
    levels = SecondOrder(step=0.8, trellis=8, try_plain=False).encode(Weight(seeded(160, 200))).parts["codes"]
    stream = trellis.encode(levels.numpy(), 8)
    assert stream[0] >= 128
    return levels.numpy(), stream


CHUNKS: dict[str, tuple[Change, str]] = {
    "an index less in a chunk": (lambda old: with_count(old, -1), "chunk"),
    "an index more in a chunk": (lambda old: with_count(old, 1), "chunk"),
    "more indices than codes": (lambda old: with_count(old, 32_000), "indices for 32000 codes"),
    "a model that does not exist": (lambda old: old[:20] + b"\x80" + old[21:], "chunks of the models"),
    "no lengths": (lambda old: old[:24], "ends before its chunks' lengths"),
    "no counts": (lambda old: old[: counts_at(old) + 3], "has no header"),
    "chunks longer than the stream": (lambda old: old[:21] + b"\xff\xff\xff\x7f" + old[25:], "chunks of"),
    "a chunk cut short": (lambda old: old[:-4], "chunks have another version"),
    "half a word": (lambda old: old[:-1], "is cut short"),
}


def counts_at(stream: bytes) -> int:
    """Where the counts of a path's chunks begin."""
    lengths_at = HEADER + 16
    return lengths_at + 4 * int.from_bytes(stream[HEADER:lengths_at], "little").bit_count()


def with_count(stream: bytes, more: int) -> bytes:
    """A path's stream whose first chunk is said to have `more` indices."""
    at = counts_at(stream)
    (count,) = struct.unpack_from("<I", stream, at)
    return stream[:at] + struct.pack("<I", count + more) + stream[at + 4 :]


@pytest.mark.parametrize(("change", "message"), CHUNKS.values(), ids=CHUNKS)
def test_hostile_chunks(change: Change, message: str) -> None:
    levels, stream = large_path()
    assert (trellis.decode(stream, 160, 200, 8) == levels).all()
    with little_memory(), pytest.raises(FormatError, match=message):
        trellis.decode(change(stream), 160, 200, 8)


INDEPENDENT: dict[str, tuple[Change, str]] = {
    "half a header": (lambda old: old[:6], "has no header"),
    "short segments": (lambda old: b"\0\1\0" + old[3:], "segments of 1 rows, allowed are 16 to 1024"),
    "a split that does not divide": (lambda old: old[:3] + b"\7\0\0\0" + old[7:], "cannot be split into 7"),
    "half a stream": (lambda old: old[: len(old) // 2], "cut short|longer than its codes|chunk"),
}


@pytest.mark.parametrize(("change", "message"), INDEPENDENT.values(), ids=INDEPENDENT)
def test_hostile_streams_of_independent_indices(change: Change, message: str) -> None:
    levels = SecondOrder(step=0.1, trellis=8, try_plain=False).encode(Weight(seeded(40, 60))).parts["codes"]
    stream = trellis.encode(levels.numpy(), 8)
    assert stream[0] == 0
    with little_memory(), pytest.raises(FormatError, match=message):
        trellis.decode(change(stream), 40, 60, 8)


def test_what_the_cases_start_from_can_be_read(blob: bytes, tmp_path: Path) -> None:
    pieces = take_apart(blob)
    pieces.set_part("w", "codes", empty())
    pieces.sign()
    (tmp_path / "file").write_bytes(pieces.build())
    assert not Reader(tmp_path / "file")["w"].parts["codes"].any()


@pytest.mark.parametrize("position", range(0, 400, 7))
def test_flipped_bits_are_found_or_are_another_path(blob: bytes, position: int) -> None:
    """Whatever is read can be written: levels that no path has never come out of a stream."""
    data = bytearray(take_apart(blob).part("w", "codes"))
    data[position // 8 % len(data)] ^= 1 << position % 8
    try:
        levels = trellis.decode(bytes(data), 40, 60, 8)
    except FormatError:
        return
    assert (trellis.decode(trellis.encode(levels, 8), 40, 60, 8) == levels).all()


def test_a_small_file_cannot_ask_for_much(blob: bytes, tmp_path: Path) -> None:
    """A megabyte of codes from a kilobyte, and no more, in whatever shape."""
    for shape in ([2, 1 << 19], [1 << 19, 2]):
        pieces = take_apart(blob)
        data = empty(segment=16) if shape[0] > 2 else empty(segment=1024)
        pieces.set_part("w", "codes", data)
        pieces.row("w").update(shape=shape, filler_bytes=1024 - len(data) - 2)
        pieces.row("w")["parts"]["codes"][2] = shape
        pieces.streams["w"] += bytes(1024 - len(pieces.streams["w"]))
        pieces.sign()
        (tmp_path / "file").write_bytes(pieces.build())
        with little_memory(48 << 20):
            encoded = Reader(tmp_path / "file")["w"]
        assert not decode(encoded).any()
