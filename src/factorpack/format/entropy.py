"""Codes <-> bytes by asymmetric numeral systems, with a fitted model for each class of rows and columns.

The class of an entry is its row's class plus its column's. Several classings are tried, and the shortest
stream is written. docs/format.md gives the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import constriction
import numpy as np
from numpy.typing import NDArray

from factorpack.errors import FormatError
from factorpack.format import chunks
from factorpack.format import frequency_tables as tables
from factorpack.format.chunks import Chunks, SymbolType
from factorpack.format.classes import (
    Classing,
    Symbols,
    class_counts,
    fit_classes,
    one_class,
)
from factorpack.format.frequency_tables import Counts
from factorpack.format.stream_header import Header, read_header, write_header

_CHUNK_MARGIN = 0.005
"""The share by which chunks may lengthen a stream, for the sake of speed."""
_CHUNK_BYTES = 34
"""What one chunk adds to a stream, on average."""
_FEW_CODES = 128
"""With fewer codes, classes do not pay."""
MANY_CODES = 1 << 20
"""With at least as many codes, classes of half the width pay."""
TOTALS = (8, 10, 12, 14, 16)
_SLAB = 1 << 18
"""Codes whose columns are reordered at a time, so that they stay in a core's cache."""

Codes = NDArray[np.signedinteger]
_Kind = TypeVar("_Kind", bound=np.integer[Any])
Coder = Any
"""constriction's AnsCoder, which has no types."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to write a matrix: its view, the classes, and counts of row classes, column classes and codes."""

    split: int
    classing: Classing
    counts: list[Counts]

    def tables(self, total_bits: int) -> list[Counts]:
        return [tables.normalized(counts, total_bits) for counts in self.counts]

    def bits(self, total_bits: int) -> float:
        """Bits of tables and message."""
        frequencies = self.tables(total_bits)
        pairs = zip(self.counts, frequencies, strict=True)
        message = sum(tables.message_bits(counts, each, total_bits).sum() for counts, each in pairs)
        models, symbols = frequencies[2].shape
        written = sum(tables.table_bits(each, total_bits).sum() for each in frequencies)
        return float(message + written + models * tables.size_bits(symbols))

    def fits(self, total_bits: int) -> bool:
        return all(int((counts > 0).sum(1).max()) <= 1 << total_bits for counts in self.counts)


def encode(codes: Codes, split: int = 0) -> bytes:
    """Entropy codes a matrix of at least one code, (r, n); `split` is the number of rows of its other view."""
    low, order, symbols = to_symbols(codes)
    plan, total_bits, _ = _best(symbols, len(order), split)
    classing, frequencies = plan.classing, plan.tables(total_bits)
    ordered = to_view(symbols, plan.split)[np.argsort(classing.rows, kind="stable")]
    ordered = ordered[:, np.argsort(classing.columns, kind="stable")]
    places = _blocks(classing, classing.models)
    blocks = [np.concatenate([ordered[place].ravel() for place in each]) for each in places]
    chunked = _choose_chunks(blocks, plan.counts[2], frequencies[2], total_bits)
    frequencies[2][list(chunked)] = np.eye(1, len(order), dtype=np.int64) * (1 << total_bits)  # takes no bits
    coder = constriction.stream.stack.AnsCoder()
    for block, of_model in zip(reversed(blocks), reversed(frequencies[2]), strict=True):
        push(coder, block, of_model)
    push(coder, classing.columns, frequencies[1][0])
    push(coder, classing.rows, frequencies[0][0])
    lengths = tuple((model, len(chunk)) for model, chunk in chunked.items())
    header = Header(
        total_bits, low, len(order), frequencies[0].size, frequencies[1].size, plan.split, lengths
    )
    words: NDArray[np.uint32] = coder.get_compressed()
    written = tables.write_tables(frequencies[:2], frequencies[2], total_bits)
    return (
        write_header(header)
        + written
        + words.astype("<u4").tobytes()
        + chunks.join_chunks(list(chunked.values()))
    )


def estimated_bytes(codes: Codes, split: int = 0) -> int:
    """Length of `encode`'s stream, within 16 bytes and half a percent, without encoding anything.

    Where chunks replace tables of hundreds of symbols, the stream is a few percent shorter than this.
    """
    low, order, symbols = to_symbols(codes)
    plan, total_bits, bits = _best(symbols, len(order), split)
    coded = bits / 8
    large = int((plan.counts[2].sum(1) >= chunks.FEWEST).sum())
    header = Header(total_bits, low, len(order), 1, 1, plan.split)
    # Half a word is lost at the end, on average.
    return len(write_header(header)) + int(coded + min(_CHUNK_MARGIN * coded, _CHUNK_BYTES * large)) + 4


def _choose_chunks(
    blocks: list[Symbols], counts: Counts, frequencies: Counts, total_bits: int
) -> dict[int, bytes]:
    """Chunks by model: blocks that grow least per code, as long as the stream stays within the margin."""
    message = tables.message_bits(counts, frequencies, total_bits)
    coded = (message + tables.table_bits(frequencies, total_bits)) / 8  # bytes by model
    found = {model: chunk for model, block in enumerate(blocks) if (chunk := chunks.compress_block(block))}
    growth = {model: len(chunk) + chunks.LENGTH.size - coded[model] for model, chunk in found.items()}
    left, kept = _CHUNK_MARGIN * float(coded.sum()), []
    for model in sorted(found, key=lambda model: growth[model] / len(blocks[model])):
        if growth[model] <= left:
            left -= growth[model]
            kept.append(model)
    return {model: found[model] for model in sorted(kept)}


def decode(data: bytes, rows: int, columns: int) -> Codes:
    """The inverse of `encode`."""
    header, start = read_header(data)
    if header.split and columns % header.split:
        raise FormatError(f"{columns} columns cannot be split into {header.split} parts")
    classes = (header.row_classes, header.column_classes)
    (of_rows, of_columns, *models), taken = tables.read_tables(
        data[start:], classes, sum(classes) - 1, header.symbols, header.total_bits
    )
    lengths = [length for _, length in header.chunks]
    end = len(data) - chunks.joined_chunk_bytes(lengths)
    if end < start + taken:
        raise FormatError(f"chunks of {sum(lengths)} bytes in an entropy-coded stream of {len(data)}")
    coder = open_coder(data[start + taken : end])
    height = header.split or rows
    classing = Classing(pop(coder, height, of_rows), pop(coder, rows * columns // height, of_columns))
    codes = _pop_matrix(coder, Chunks(data, end, lengths), classing, models, header)
    if not coder.is_empty():
        raise FormatError("an entropy-coded message is longer than its codes")
    return from_view(codes, header.split, rows)


def open_coder(data: bytes) -> Coder:
    if len(data) % 4:
        raise FormatError(f"an entropy-coded message of {len(data)} bytes is cut short")
    try:
        return constriction.stream.stack.AnsCoder(np.frombuffer(data, "<u4").astype(np.uint32))
    except ValueError as error:
        raise FormatError("an entropy-coded message ends in a zero word") from error


def _pop_matrix(
    coder: Coder, large: Chunks, classing: Classing, models: list[Counts], header: Header
) -> Codes:
    """Block after block, model by model; then rows and columns return to their places."""
    order = code_order(header.low, header.symbols)
    chunked = {model for model, _ in header.chunks}
    ordered: Codes = np.empty((len(classing.rows), len(classing.columns)), order.dtype)
    for model, (places, frequencies) in enumerate(zip(_blocks(classing, len(models)), models, strict=True)):
        counts = [ordered[place].size for place in places]
        if model in chunked:
            symbols = large.next(sum(counts), _symbol_dtype(header.symbols))
            if int(symbols.max(initial=0)) >= header.symbols:
                raise FormatError(f"a chunk has symbol {symbols.max()}, the last one is {header.symbols - 1}")
            codes, at = _codes_of(symbols, order), 0
        else:
            codes, at = order.take(pop(coder, sum(counts), frequencies)), 0
        for place, count in zip(places, counts, strict=True):
            ordered[place] = codes[at : at + count].reshape(ordered[place].shape)
            at += count
    return _unsorted(ordered, classing)


def _unsorted(ordered: Codes, classing: Classing) -> Codes:
    """The inverse of sorting a matrix's rows and columns by class."""
    if not classing.rows.any() and not classing.columns.any():
        return ordered
    rows, columns = (np.argsort(classes, kind="stable") for classes in (classing.rows, classing.columns))
    ranks = np.argsort(columns)
    matrix = np.empty_like(ordered)
    height = max(1, _SLAB // max(len(ranks), 1))
    for top in range(0, len(rows), height):
        matrix[rows[top : top + height]] = ordered[top : top + height].take(ranks, 1)
    return matrix


def _blocks(classing: Classing, models: int) -> list[list[tuple[slice, slice]]]:
    """For each model, where its codes lie once rows and columns are sorted by class, row classes ascending."""
    tops = np.cumsum(np.bincount(classing.rows, minlength=1)).tolist()
    lefts = np.cumsum(np.bincount(classing.columns, minlength=1)).tolist()
    places: list[list[tuple[slice, slice]]] = [[] for _ in range(models)]
    for row, (top, bottom) in enumerate(pairwise([0, *tops])):
        for column, (left, right) in enumerate(pairwise([0, *lefts])):
            places[row + column].append((slice(top, bottom), slice(left, right)))
    return places


def push(coder: Coder, symbols: NDArray[np.integer], frequencies: Counts) -> None:
    """Adds symbols in front of what the message already holds."""
    size = int(tables.used(frequencies[None])[0])
    if size > 1 and symbols.size:
        coder.encode_reverse(symbols.astype(np.int32), tables.model(frequencies[:size]))


def pop(coder: Coder, count: int, frequencies: Counts) -> NDArray[np.int32]:
    """The next symbols of a message; with a table of one symbol they take no bits."""
    if len(frequencies) == 1 or count == 0:
        return np.zeros(count, np.int32)
    found: NDArray[np.int32] = coder.decode(tables.model(frequencies), count)
    return found


def _best(symbols: Symbols, size: int, split: int) -> tuple[Plan, int, float]:
    """The shortest plan found, its total, and its bits without the header."""
    choices = [
        (plan.bits(total_bits), number, total_bits, plan)
        for number, plan in enumerate(_plans(symbols, size, split))
        for total_bits in TOTALS
        if plan.fits(total_bits)
    ]
    bits, _, total_bits, plan = min(choices, key=lambda choice: choice[:3])
    return plan, total_bits, bits


def _plans(symbols: Symbols, size: int, split: int) -> Iterator[Plan]:
    """One model; classes of rows of the matrix; classes of rows and columns of its view."""
    single = one_class(*symbols.shape)
    if symbols.size < max(_FEW_CODES, 4 * size):  # tables would outweigh the codes
        yield _plan(0, single, class_counts(symbols, single, size))
        return
    rows = fit_classes(symbols, 0.5, with_columns=False)
    counts = class_counts(symbols, rows, size)
    yield _plan(0, single, counts.sum(0, keepdims=True))
    yield _plan(0, rows, counts)
    view = to_view(symbols, split)
    both = fit_classes(view, 0.25 if symbols.size >= MANY_CODES else 0.5)
    yield _plan(split, both, class_counts(view, both, size))


def _plan(split: int, classing: Classing, counts: Counts) -> Plan:
    return Plan(
        split, classing, [np.bincount(classing.rows)[None], np.bincount(classing.columns)[None], counts]
    )


def to_symbols(codes: Codes) -> tuple[int, Codes, Symbols]:
    """The lowest code, the code of each symbol, and the codes as symbols."""
    low, high = int(codes.min()), int(codes.max())
    order = code_order(low, high - low + 1)
    symbol_of = np.empty(len(order), _symbol_dtype(len(order)))
    symbol_of[order.astype(np.int64) - low] = np.arange(len(order))
    return low, order, symbol_of[codes.astype(np.int64) - low]


def code_order(low: int, size: int) -> Codes:
    """`size` codes from `low` on, sorted by magnitude, with the negative one of a pair first."""
    codes = np.arange(low, low + size)
    narrow = np.int8 if low >= -128 and low + size <= 128 else np.int16
    return codes[np.argsort(2 * np.abs(codes) + (codes > 0), kind="stable")].astype(narrow)


def _codes_of(symbols: Symbols, order: Codes) -> Codes:
    """The code of every symbol; ten times as fast from bytes to bytes, the usual case."""
    if symbols.dtype.itemsize > 1 or order.dtype.itemsize > 1:
        return order.take(symbols)
    table = order.tobytes().ljust(256, b"\0")
    return np.frombuffer(symbols.tobytes().translate(table), np.int8)


def _symbol_dtype(size: int) -> SymbolType:
    return np.uint8 if size <= 256 else np.uint16


def to_view(matrix: NDArray[_Kind], split: int) -> NDArray[_Kind]:
    """(k, n) as (s, n/s * k): transposed, with each of s groups of columns in one row."""
    return matrix.T.reshape(split, -1) if split else matrix


def from_view(matrix: NDArray[_Kind], split: int, rows: int) -> NDArray[_Kind]:
    """The inverse of `to_view` for a matrix of `rows` rows, whose columns are then contiguous."""
    return matrix.reshape(-1, rows).T if split else matrix
