"""Codes <-> bytes by asymmetric numeral systems, with a fitted model for each class of rows and columns.

The class of an entry is its row's class plus its column's. Several classings are tried, and the shortest
stream is written. docs/format.md gives the layout.
"""

from __future__ import annotations

import math
from concurrent.futures import Executor
from typing import Any

import constriction
import numpy as np
from numpy.typing import NDArray

from factorpack.errors import FormatError
from factorpack.format import chunks
from factorpack.format import frequency_tables as tables
from factorpack.format.blocks import places, to_matrix
from factorpack.format.chunks import Chunks
from factorpack.format.classes import Classing
from factorpack.format.frequency_tables import Counts
from factorpack.format.stream_header import Header, read_header, write_header
from factorpack.format.stream_plan import Plan, best_plan
from factorpack.format.symbols import (
    Codes,
    Data,
    Symbols,
    code_order,
    codes_of,
    from_view,
    symbol_type,
    to_symbols,
)

_CHUNK_MARGIN = 0.005
"""The share by which chunks may lengthen a stream, for the sake of speed."""
_CHUNK_BYTES = 34
"""What one chunk adds to a stream, on average."""
_LEAST_CHUNK_BYTES = 12
"""What hardly any chunk stays below."""
_SLAB = 1 << 18
"""Symbols that are looked up at a time."""

Coder = Any
"""constriction's AnsCoder, which has no types."""


def encode(codes: Codes, split: int = 0, pool: Executor | None = None) -> bytes:
    """Entropy codes a matrix of at least one code, (r, n); `split` is the number of rows of its other view.

    A pool compresses the chunks of a large matrix at the same time.
    """
    low, order, symbols = to_symbols(codes)
    plan, total_bits, _ = best_plan(symbols, len(order), split)
    return write_plan(plan, total_bits, low, len(order), pool)


def write_plan(plan: Plan, total_bits: int, low: int, size: int, pool: Executor | None) -> bytes:
    """The stream of a plan for `size` symbols, whose codes begin at `low`."""
    classing, frequencies = plan.classing, plan.tables(total_bits)
    chunked = choose_chunks(plan.blocks, plan.coded_bytes(total_bits), pool)
    frequencies[2][list(chunked)] = no_symbol_but_the_first(size, total_bits)
    coder = constriction.stream.stack.AnsCoder()
    for block, of_model in zip(reversed(plan.blocks), reversed(frequencies[2]), strict=True):
        push(coder, block, of_model)
    push(coder, classing.columns, frequencies[1][0])
    push(coder, classing.rows, frequencies[0][0])
    lengths = tuple((model, len(chunk)) for model, chunk in chunked.items())
    header = Header(total_bits, low, size, frequencies[0].size, frequencies[1].size, plan.split, lengths)
    words: NDArray[np.uint32] = coder.get_compressed()
    written = tables.write_tables(frequencies[:2], frequencies[2], total_bits)
    return (
        write_header(header)
        + written
        + words.astype("<u4").tobytes()
        + chunks.join_chunks(list(chunked.values()))
    )


def no_symbol_but_the_first(size: int, total_bits: int) -> Counts:
    """The table of a model whose codes are in a chunk: it takes no bits."""
    return np.eye(1, size, dtype=np.int64) * (1 << total_bits)


def estimated_bytes(codes: Codes, split: int = 0) -> int:
    """Length of `encode`'s stream, within 16 bytes and half a percent, without encoding anything.

    Where chunks replace tables of hundreds of symbols, the stream is a few percent shorter than this.
    """
    low, order, symbols = to_symbols(codes)
    plan, total_bits, bits = best_plan(symbols, len(order), split)
    header = Header(total_bits, low, len(order), 1, 1, plan.split)
    # Half a word is lost at the end, on average.
    return len(write_header(header)) + int(bits / 8 + added_by_chunks(bits / 8, plan.counts[2])) + 4


def added_by_chunks(coded: float, counts: Counts) -> float:
    """About the bytes by which chunks lengthen a stream of `coded` bytes, given the counts of its models."""
    large = int((counts.sum(1) >= chunks.FEWEST).sum())
    return min(_CHUNK_MARGIN * coded, _CHUNK_BYTES * large)


def choose_chunks(
    blocks: list[Symbols],
    coded: NDArray[np.float64],
    pool: Executor | None,
    extra_bytes: int = chunks.LENGTH.size,
) -> dict[int, bytes]:
    """Chunks by model: blocks that grow least per code, as long as the stream stays within the margin.

    `coded` are the bytes of each block in the message, and a chunk takes `extra_bytes` in the header. Chunks
    that cannot all stay within the margin are not tried.
    """
    left = _CHUNK_MARGIN * float(coded.sum())
    large = [model for model, block in enumerate(blocks) if len(block) >= chunks.FEWEST]
    large.sort(key=lambda model: -len(blocks[model]))
    tried = [model for rank, model in enumerate(large, 1) if rank * _LEAST_CHUNK_BYTES <= left]
    made = chunks.compress_blocks([blocks[model] for model in tried], pool)
    found = {model: chunk for model, chunk in zip(tried, made, strict=True) if chunk}
    growth = {model: len(chunk) + extra_bytes - coded[model] for model, chunk in found.items()}
    kept = []
    for model in sorted(found, key=lambda model: growth[model] / len(blocks[model])):
        if growth[model] <= left:
            left -= growth[model]
            kept.append(model)
    return {model: found[model] for model in sorted(kept)}


def decode(data: Data, rows: int, columns: int) -> Codes:
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
    row_class = pop(coder, height, of_rows).astype(np.uint8)
    classing = Classing(row_class, pop(coder, rows * columns // height, of_columns).astype(np.uint8))
    codes = _pop_matrix(coder, Chunks(data, end, lengths), classing, models, header)
    if not coder.is_empty():
        raise FormatError("an entropy-coded message is longer than its codes")
    return from_view(codes, header.split, rows)


def open_coder(data: Data) -> Coder:
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
    if chunked and len(models) == 1:
        shape = len(classing.rows), len(classing.columns)
        return read_chunk(large, math.prod(shape), order).reshape(shape)
    ordered: Codes = np.empty((len(classing.rows), len(classing.columns)), order.dtype)
    for model, (own, frequencies) in enumerate(zip(places(classing, len(models)), models, strict=True)):
        counts = [ordered[place].size for place in own]
        if not own and model not in chunked:
            continue
        if model in chunked:
            codes, at = read_chunk(large, sum(counts), order), 0
        else:
            codes, at = _pop_codes(coder, sum(counts), frequencies, order), 0
        for place, count in zip(own, counts, strict=True):
            ordered[place] = codes[at : at + count].reshape(ordered[place].shape)
            at += count
    return to_matrix(ordered, classing)


def read_chunk(large: Chunks, count: int, order: Codes) -> Codes:
    """The codes of the next chunk."""
    symbols = large.next(count, symbol_type(len(order)))
    if int(symbols.max(initial=0)) >= len(order):
        raise FormatError(f"a chunk has symbol {symbols.max()}, the last one is {len(order) - 1}")
    return codes_of(symbols, order)


def _pop_codes(coder: Coder, count: int, frequencies: Counts, order: Codes) -> Codes:
    """The next codes of a message, slab by slab: a symbol takes twelve bytes until its code is looked up."""
    if count <= _SLAB:
        return order.take(pop(coder, count, frequencies))
    if len(frequencies) == 1:
        return np.full(count, order[0])
    codes, model = np.empty(count, order.dtype), tables.model(frequencies)
    for start in range(0, count, _SLAB):
        own = codes[start : start + _SLAB]
        own[:] = order.take(coder.decode(model, len(own)))
    return codes


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
