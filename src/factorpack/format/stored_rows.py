"""The rows of a schema as they are in the file: cut from its text, checked one by one, parsed again when used.

A row's objects take ten times the memory of its text. So the objects of the first rows alone are kept, which are all
that most files have.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from factorpack.errors import FormatError
from factorpack.format.untrusted_json import DEPTH, Extent, parse_counted, shown

if TYPE_CHECKING:
    from factorpack.format.schema import TensorRow

MAX_ROW_BYTES = 1 << 20
"""Bytes of a row's text, which is parsed as a whole."""
KEPT_BYTES = 1 << 21
"""Bytes of text of the rows whose objects are kept."""
FREE_OTHERS, BYTES_PER_OTHER = 1 << 16, 16
"""Values beside the rows, so aliases, that any file may have, and how many bytes of the file each further one takes."""
_LONG_NAME, _DIGEST = 256, b"\xff"
"""Bytes of a name that is kept as it is, and what a digest in its place begins with: no UTF-8 does."""
_ROW_DEPTH = 3
"""Behind the opening bracket of a row: the schema has 1, the list 2."""
_COMMA, _SPACES = ord(","), b" \t\n\r"


@dataclass(frozen=True, slots=True)
class CutText:
    """The text of a schema, where its rows are in it, and the rest, which is parsed."""

    text: bytearray
    starts: array[int]
    ends: array[int]
    rest: object


def cut_rows(pieces: Iterable[bytes], extent: Extent, file_bytes: int) -> CutText:
    """Cuts the text of a schema from a file of this size, which is counted as it comes."""
    text, commas = bytearray(), 0
    nowhere = np.empty(0, np.int32)
    found = ([nowhere], [nowhere])
    for piece in pieces:
        places, codes, depths = extent.add(piece)
        text += piece
        steps = DEPTH[codes]
        found[0].append(places[(steps > 0) & (depths == _ROW_DEPTH)].astype(np.int32))
        found[1].append(places[(steps < 0) & (depths == _ROW_DEPTH - 1)].astype(np.int32) + 1)
        commas += int(((codes == _COMMA) & (depths < _ROW_DEPTH)).sum())
    starts, ends = (array("i", np.concatenate(each).tobytes()) for each in found)
    others, most = commas - max(len(ends) - 1, 0), FREE_OTHERS + file_bytes // BYTES_PER_OTHER
    if others > most:
        raise FormatError(f"the schema has {others} values beside its rows, allowed are {most}")
    return CutText(text, starts, ends, parse_counted(_without(text, starts, ends)))


def _without(text: bytearray, starts: array[int], ends: array[int]) -> bytearray:
    """The text of a schema whose list of rows is empty; its rows stood in one list, with commas between them."""
    if not starts:
        return text
    if len(starts) != len(ends):
        raise FormatError("the metadata is not valid JSON: it ends within a row")
    before = text[: starts[0]].rstrip(_SPACES)
    between = (text[end:start].strip(_SPACES) for end, start in zip(ends[:-1], starts[1:], strict=True))
    if not before.endswith(b"[") or any(each != b"," for each in between):
        raise FormatError(
            "the metadata is not valid JSON for a packed file: it has a table or a list besides those of the tensors"
        )
    return before + text[ends[-1] :]


class StoredRows(Mapping[str, "TensorRow"]):
    """The rows of an open file by name, all of them checked."""

    def __init__(self, cut: CutText, check: Callable[[object], TensorRow]) -> None:
        self._cut, self._check = cut, check
        self._kept: list[TensorRow] = []
        self._numbers: dict[bytes, int] = {}
        self.stored_bytes, self.crcs = array("q"), array("q")
        """Of all rows, in their order."""
        for number in range(len(cut.starts)):
            row = self._parse(number)
            key = _key(row.name)
            if key in self._numbers:
                raise FormatError(f"tensor {shown(row.name)} appears twice in the schema")
            self._numbers[key] = number
            self.stored_bytes.append(row.stored_bytes)
            self.crcs.append(row.crc)
            if cut.ends[number] <= KEPT_BYTES:
                self._kept.append(row)

    def __getitem__(self, name: str) -> TensorRow:
        return self._row(self.number(name))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _key(name) in self._numbers  # a Mapping would parse the row

    def __iter__(self) -> Iterator[str]:
        return itertools.starmap(self._name, self._numbers.items())

    def __len__(self) -> int:
        return len(self._numbers)

    def large(self, least_bytes: int) -> dict[str, int]:
        """The rows whose streams are that large, and their sizes."""
        sizes = zip(self._numbers.items(), self.stored_bytes, strict=True)
        return {self._name(*item): size for item, size in sizes if size >= least_bytes}

    def number(self, name: str) -> int:
        """The place of a row among all of them."""
        try:
            return self._numbers[_key(name)]
        except KeyError:
            raise KeyError(name) from None

    def _name(self, key: bytes, number: int) -> str:
        return self._row(number).name if key.startswith(_DIGEST) else key.decode()

    def _row(self, number: int) -> TensorRow:
        return self._kept[number] if number < len(self._kept) else self._parse(number)

    def _parse(self, number: int) -> TensorRow:
        start, end = self._cut.starts[number], self._cut.ends[number]
        if end - start > MAX_ROW_BYTES:
            raise FormatError(f"a tensor row of {end - start} bytes, allowed are {MAX_ROW_BYTES}")
        return self._check(parse_counted(self._cut.text[start:end]))


def _key(name: str) -> bytes:
    """A name in little memory: in UTF-8, or its digest where that is shorter."""
    key = name.encode(errors="surrogatepass")  # which no row has, and anyone may request
    return key if len(key) <= _LONG_NAME else _DIGEST + hashlib.sha256(key).digest()
