"""JSON from a file that nobody vouches for: counted before it is parsed, and no key may appear twice.

A deflated schema can be a thousand times as long as its bytes in the file, and parsing makes dozens of bytes
of objects from each of its own. So the text is counted as it is inflated, and its rows are parsed one by one.
"""

from __future__ import annotations

import base64
import binascii
import json
import reprlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from factorpack.errors import FormatError

FREE_BYTES, BYTES_PER_BYTE = 1 << 20, 16
"""Bytes of text that any file may have, and how many more for each byte of the file."""
FREE_VALUES, BYTES_PER_VALUE = 1 << 18, 2
"""Values that any file's schema may have, and how many bytes of the file each further one takes."""
BYTES_PER_HEADER_VALUE = 1024
"""The same for the container's header, whose entries have 11 values for 16 kB or more."""
MOST_DEPTH = 8
"""A schema has 6 levels: itself, rows, a row, parts, a part, a shape."""
_PIECE = 1 << 18
"""Bytes that are counted at a time."""
_LONGEST_NAME = 256
_QUOTE, _BACKSLASH = ord('"'), b"\\"
DEPTH, _IS_COUNTED = np.zeros(256, np.int8), np.zeros(256, np.bool_)
"""By byte: what it adds to the depth, and whether it counts as a value."""
DEPTH[list(b"[{")], DEPTH[list(b"]}")], _IS_COUNTED[list(b"[{,:")] = 1, -1, True
_IS_MARK = _IS_COUNTED | (DEPTH != 0)


def most_text(file_bytes: int) -> int:
    """Bytes of JSON that a file of this size may hold."""
    return FREE_BYTES + BYTES_PER_BYTE * file_bytes


def most_values(file_bytes: int) -> int:
    """Values of JSON that a file of this size may hold."""
    return FREE_VALUES + file_bytes // BYTES_PER_VALUE


def least_file_bytes(text: bytes) -> int:
    """Size of the smallest file that may hold this JSON."""
    if len(text) <= min(FREE_BYTES, FREE_VALUES):
        return 0
    extent = Extent(len(text))
    for piece in _pieces(text):
        extent.add(piece)
    by_values = (extent.values - FREE_VALUES) * BYTES_PER_VALUE
    return max(0, -(-(len(text) - FREE_BYTES) // BYTES_PER_BYTE), by_values)


class Marks(NamedTuple):
    """The brackets, commas and colons of a piece that are outside of strings."""

    places: NDArray[np.int64]
    """In the whole text."""
    codes: NDArray[np.uint8]
    depths: NDArray[np.int64]
    """Behind each of them."""


@dataclass(slots=True)
class Extent:
    """Counts text that comes in pieces; raises FormatError where it goes too deep or has too many values."""

    most_values: int
    values: int = 0
    """Commas, colons and opening brackets outside of strings: no value is without one, but the first."""
    _depth: int = 0
    _in_string: int = 0
    _kept: bytes = b""
    """A backslash at the end of a piece: what follows it belongs to it."""
    _counted: int = 0
    """Bytes before the piece."""

    def add(self, piece: bytes) -> Marks:
        """Counts a piece of text; its marks, for whoever cuts it."""
        piece = self._kept + piece
        lone = (len(piece) - len(piece.rstrip(_BACKSLASH))) % 2
        self._kept, piece = (_BACKSLASH, piece[:-1]) if lone else (b"", piece)
        # Pairs first: a quote after two backslashes ends its string. Every other byte keeps its place.
        codes = np.frombuffer(piece.replace(rb"\\", b"__").replace(rb"\"", b"__"), np.uint8)
        quotes = np.cumsum(codes == _QUOTE, dtype=np.uint8) + np.uint8(self._in_string)
        places = np.flatnonzero(_IS_MARK[codes] & (quotes & 1 == 0))
        self._in_string = int(quotes[-1]) & 1 if len(quotes) else self._in_string
        marks = codes[places]
        depths = np.cumsum(DEPTH[marks], dtype=np.int64) + self._depth
        self.values += int(_IS_COUNTED[marks].sum())
        if len(depths):
            self._depth = int(depths[-1])
            if int(depths.max()) > MOST_DEPTH:
                raise FormatError(
                    f"the metadata is not valid JSON for a packed file: it is nested {depths.max()} deep or "
                    f"more, allowed are {MOST_DEPTH}"
                )
        if self.values > self.most_values:
            raise FormatError(
                f"the metadata has {self.values} values or more, allowed are {self.most_values}"
            )
        places += self._counted
        self._counted += len(piece)
        return Marks(places, marks, depths)


def inflate(field: object, crc: int, most_bytes: int) -> Iterator[bytes]:
    """A deflated schema in base64, piece by piece."""
    if not isinstance(field, str):
        raise FormatError("the schema is not text")
    left = most_bytes
    try:
        packed = base64.b64decode(field, validate=True)
        # base64 ignores the last character's spare bits, so the text itself is compared as well.
        if zlib.crc32(packed) != crc or base64.b64encode(packed).decode() != field:
            raise FormatError("the schema's checksum does not match: the file is damaged")
        del field  # as long as the file
        inflater = zlib.decompressobj()
        while left and (piece := inflater.decompress(packed, min(_PIECE, left))):
            packed = inflater.unconsumed_tail
            left -= len(piece)
            yield piece
    except (binascii.Error, zlib.error, ValueError) as error:
        raise FormatError(f"the schema cannot be read: {error}") from error
    if not inflater.eof or inflater.unused_data:
        raise FormatError(f"the schema is cut short, or longer than {most_bytes} bytes")


def parse_json(text: str | bytes, file_bytes: int) -> object:
    """JSON from the header of a file of this size, in which no key may appear twice."""
    count_header(text, file_bytes)
    return parse_counted(text)


def count_header(text: str | bytes, file_bytes: int) -> None:
    """Raises FormatError where a header holds more than that of a packed file can."""
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    extent = Extent(FREE_VALUES + file_bytes // BYTES_PER_HEADER_VALUE)
    for piece in _pieces(data):
        extent.add(piece)


def parse_counted(text: str | bytes | bytearray) -> object:
    """`parse_json` of text that has been counted already."""
    try:
        # As UTF-8 and nothing else: json would also take UTF-16, which was not counted as such.
        plain = text if isinstance(text, str) else text.decode(errors="surrogatepass")
        return _DECODER.decode(plain)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the metadata is not valid JSON: {error}") from error


def short(value: object) -> str:
    """What a hostile file holds, shortened for an error message."""
    return reprlib.repr(value)


def shown(name: str) -> str:
    """The name of a tensor, shortened only where it is no name."""
    return (
        repr(name) if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]!r}... ({len(name)} characters)"
    )


def _pieces(text: bytes) -> Iterator[bytes]:
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise FormatError(f"the key {short(key)} appears twice in the metadata")
        table[key] = value
    return table


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates)
