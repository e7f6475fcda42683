"""Codes that are a path through a trellis <-> bytes: indices, with models by class and by quantizer.

A row's quantizers are known once the rows above it are read. So a message goes row by row, beginning with
the first row of every segment, and a chunk holds the indices of its model in the same order. Where that is as
short, models ignore the quantizer, and all indices are read before any path. docs/format.md gives the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

import constriction
import numpy as np
from numpy.typing import NDArray

from factorpack.errors import FormatError
from factorpack.format import chunks, entropy
from factorpack.format import frequency_tables as tables
from factorpack.format.chunks import Chunks
from factorpack.format.classes import Classing, class_counts, fit_both, one_class, sample
from factorpack.format.frequency_tables import Counts
from factorpack.format.path_reader import Indices, Paths, by_model, models_of
from factorpack.format.stream_header import Header, read_header, write_header
from factorpack.format.stream_plan import Plan, best_plan, class_width, shortest
from factorpack.format.symbols import Codes, Data, Symbols, code_order, from_view, to_symbols, to_view
from factorpack.quantize.trellis import (
    Flags,
    indices_of,
    quiet_columns,
    segment_rows,
    walk,
)

LEAST_ROWS, MOST_ROWS = 16, 1024
"""Rows of a segment: with more a reader takes many steps, with fewer each step takes much memory."""
STEPS_PER_BYTE = 16
"""Steps of a path that each byte of its stream allows: what a step costs does not depend on its length."""
_INDEPENDENT = struct.Struct("<BHI")
"""A zero, rows of a segment and split, before a stream whose models ignore the quantizer."""
_MARGIN = 0.005
"""The share by which such models may lengthen a stream, for the sake of speed."""
_NEAR = 0.015
"""Where one table for both quantizers takes a larger share of bits more, no plan for it is made."""
_SEGMENT, _COUNT = struct.Struct("<H"), struct.Struct("<I")
_SLAB = 1 << 20
"""Entries that are sorted by model at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A matrix of codes as indices along its paths, and how they are written."""

    segment: int
    low: int
    order: Codes
    symbols: Symbols
    quantizer: NDArray[np.uint8]
    quiet: Flags
    plan: Plan
    total_bits: int
    bits: float
    is_independent: bool
    """Whether the plan is that of a plain stream of indices."""


def encode(codes: Codes, states: int, split: int = 0, pool: Executor | None = None) -> bytes:
    """Entropy codes a matrix, (r, n), whose view of `split` rows is a path; raises an error where it is not."""
    source = _prepare(codes, states, split)
    if source.is_independent:
        head = _INDEPENDENT.pack(0, source.segment, split)
        return head + entropy.write_plan(source.plan, source.total_bits, source.low, len(source.order), pool)
    plan, total_bits = source.plan, source.total_bits
    models = models_of(plan.classing, slice(None), source.quantizer)
    frequencies = plan.tables(total_bits)
    blocks = _blocks(source, models, len(frequencies[2]))
    extra = chunks.LENGTH.size + _COUNT.size
    chunked = entropy.choose_chunks(blocks, plan.coded_bytes(total_bits), pool, extra)
    frequencies[2][list(chunked)] = entropy.no_symbol_but_the_first(len(source.order), total_bits)
    lengths = tuple((model, len(chunk)) for model, chunk in chunked.items())
    classes = (frequencies[0].size, frequencies[1].size // 2)
    header = Header(total_bits, source.low, len(source.order), *classes, split, lengths)
    return (
        write_header(header, models_per_class=2)
        + b"".join(_COUNT.pack(len(blocks[model])) for model in chunked)
        + _SEGMENT.pack(source.segment)
        + tables.write_tables(frequencies[:2], frequencies[2], total_bits)
        + _message(source, models, blocks, frequencies)
        + chunks.join_chunks(list(chunked.values()))
    )


def _message(
    source: _Source, models: NDArray[np.uint8], blocks: list[Symbols], frequencies: list[Counts]
) -> bytes:
    """Classes and indices, the last first. Models whose symbols are in chunks have a table that takes no bits."""
    coder = constriction.stream.stack.AnsCoder()
    ends = [len(block) for block in blocks]
    for row in reversed(range(min(source.segment, len(models)))):
        sizes = np.bincount(models[row :: source.segment].ravel()).tolist()
        for model in reversed(range(len(sizes))):
            start = ends[model] - sizes[model]
            entropy.push(coder, blocks[model][start : ends[model]], frequencies[2][model])
            ends[model] = start
    classing = source.plan.classing
    entropy.push(coder, 2 * classing.columns + ~source.quiet, frequencies[1][0])
    entropy.push(coder, classing.rows, frequencies[0][0])
    words: NDArray[np.uint32] = coder.get_compressed()
    return words.astype("<u4").tobytes()


def estimated_bytes(codes: Codes, states: int, split: int = 0) -> int:
    """Length of `encode`'s stream, within 16 bytes and half a percent, without encoding anything."""
    source = _prepare(codes, states, split)
    header = Header(source.total_bits, source.low, len(source.order), 1, 1, split)
    coded = source.bits / 8
    coded += entropy.added_by_chunks(coded, source.plan.counts[2])
    return len(write_header(header)) + _SEGMENT.size + int(coded) + 4


def decode(data: Data, rows: int, columns: int, states: int) -> Codes:
    """The inverse of `encode`."""
    if bytes(data[:1]) == b"\0":
        return _decode_independent(data, rows, columns, states)
    header, start = read_header(data, models_per_class=2)
    counted = start + _COUNT.size * len(header.chunks)
    if len(data) < counted + _SEGMENT.size:
        raise FormatError(f"a path's stream of {len(data)} bytes has no header")
    counts = [count for (count,) in _COUNT.iter_unpack(data[start:counted])]
    (segment,) = _SEGMENT.unpack_from(data, counted)
    height = _check_paths(len(data), segment, header.split, rows, columns)
    start = counted + _SEGMENT.size
    classes = (header.row_classes, header.column_classes)
    (of_rows, of_columns, *models), taken = tables.read_tables(
        data[start:],
        (header.row_classes, 2 * header.column_classes),
        2 * (sum(classes) - 1),
        header.symbols,
        header.total_bits,
    )
    lengths = [length for _, length in header.chunks]
    end = len(data) - chunks.joined_chunk_bytes(lengths)
    if end < start + taken:
        raise FormatError(f"chunks of {sum(lengths)} bytes in a path's stream of {len(data)} bytes")
    coder = entropy.open_coder(data[start + taken : end])
    row_class = entropy.pop(coder, height, of_rows).astype(np.uint8)
    column = entropy.pop(coder, rows * columns // height, of_columns).astype(np.uint8)
    classing = Classing(row_class, column >> 1)
    if sum(counts) > rows * columns:
        raise FormatError(f"chunks of {sum(counts)} indices for {rows * columns} codes")
    order, large = code_order(header.low, header.symbols), Chunks(data, end, lengths)
    chunked = {
        model: entropy.read_chunk(large, count, order)
        for (model, _), count in zip(header.chunks, counts, strict=True)
    }
    coded = [tables.model(each) if len(each) > 1 else None for each in models]
    indices = Indices(coder, coded, order, chunked)
    levels = Paths(classing, column & 1 == 0, states, segment).read(indices)
    indices.check_end()
    return from_view(levels, header.split, rows)


def _decode_independent(data: Data, rows: int, columns: int, states: int) -> Codes:
    """A stream that has all indices, whatever their quantizers."""
    if len(data) < _INDEPENDENT.size:
        raise FormatError(f"a path's stream of {len(data)} bytes has no header")
    _, segment, split = _INDEPENDENT.unpack_from(data)
    height = _check_paths(len(data), segment, split, rows, columns)
    indices = entropy.decode(data[_INDEPENDENT.size :], height, rows * columns // height)
    return from_view(walk(indices, states, segment), split, rows)


def _check_paths(size: int, segment: int, split: int, rows: int, columns: int) -> int:
    """The rows of a view whose segments fit it and a stream of `size` bytes."""
    if not LEAST_ROWS <= segment <= MOST_ROWS:
        raise FormatError(f"segments of {segment} rows, allowed are {LEAST_ROWS} to {MOST_ROWS}")
    if split and columns % split:
        raise FormatError(f"{columns} columns cannot be split into {split} parts")
    height = split or rows
    if min(segment, height) > STEPS_PER_BYTE * size:
        raise FormatError(
            f"a path of {min(segment, height)} steps in {size} bytes, allowed are {STEPS_PER_BYTE} per byte"
        )
    return height


def _prepare(codes: Codes, states: int, split: int) -> _Source:
    levels = to_view(codes, split).astype(np.int32)
    segment = max(segment_rows(len(levels)), LEAST_ROWS)
    indices, quantizer = indices_of(levels, states, segment)
    low, order, symbols = to_symbols(indices)
    quiet = quiet_columns(levels)
    planned = shortest(_plans(symbols, quantizer, len(order), quiet))
    is_independent = False
    # Zeros are a path too.
    if _pooled_bits(*planned[:2]) <= (1 + _NEAR) * planned[2] and not levels[:, quiet].any():
        alone = best_plan(symbols, len(order), 0)
        is_independent = alone[2] <= (1 + _MARGIN) * planned[2]
        planned = alone if is_independent else planned
    return _Source(segment, low, order, symbols, quantizer, quiet, *planned, is_independent)


def _pooled_bits(plan: Plan, total_bits: int) -> float:
    """About the bits of a plan with one table for both quantizers."""
    of_rows, of_columns, counts = plan.counts
    pooled = counts.reshape(-1, 2, counts.shape[1]).sum(1)
    return Plan(0, plan.classing, [of_rows, of_columns, pooled]).bits(total_bits)


def _plans(symbols: Symbols, quantizer: NDArray[np.uint8], size: int, quiet: Flags) -> Iterator[Plan]:
    """One class, and classes of rows and columns; each has one table per quantizer."""
    joint = symbols + quantizer * np.int32(size)
    both = fit_both(sample(symbols, size), class_width(symbols.size))
    for classing in (one_class(*symbols.shape), both):
        counts = class_counts(joint, classing, 2 * size).reshape(-1, size)
        width = 2 * (int(classing.columns.max()) + 1)
        of_columns = np.bincount(2 * classing.columns + ~quiet, minlength=width)
        of_columns[-1] = max(of_columns[-1], 1)  # a table ends with a symbol that has a frequency
        yield Plan(0, classing, [np.bincount(classing.rows)[None], of_columns[None], counts])


def _blocks(source: _Source, models: NDArray[np.uint8], count: int) -> list[Symbols]:
    """The symbols of each model in the order in which paths ask for them."""
    visited = np.argsort(np.arange(len(models)) % source.segment, kind="stable")
    parts: list[list[Symbols]] = [[] for _ in range(count)]
    height = max(1, _SLAB // models.shape[1])
    for top in range(0, len(visited), height):
        rows = visited[top : top + height]
        picked, sizes = by_model(models[rows])
        found = source.symbols[rows].ravel()[picked]
        for model, own in enumerate(np.split(found, np.cumsum(sizes)[:-1])):
            parts[model].append(own)
    empty = source.symbols[:0].ravel()
    return [np.concatenate([empty, *own]) for own in parts]
