"""Codes that are a path through a trellis <-> bytes: indices, with models by class and by quantizer.

A row's quantizers are known once the rows above it are read. So a message goes row by row, beginning with
the first row of every segment. docs/format.md gives the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import constriction
import numpy as np
from numpy.typing import NDArray

from factorpack.errors import FormatError
from factorpack.format import entropy
from factorpack.format import frequency_tables as tables
from factorpack.format.classes import Classing, class_counts, fit_both, one_class, sample
from factorpack.format.stream_header import Header, read_header, write_header
from factorpack.format.stream_plan import Plan, class_width, shortest
from factorpack.format.symbols import Codes, Symbols, code_order, count_values, from_view, to_symbols, to_view
from factorpack.quantize.trellis import (
    Flags,
    Integers,
    Machine,
    indices_of,
    levels_of,
    machine,
    quiet_columns,
    segment_rows,
)

LEAST_ROWS, MOST_ROWS = 16, 1024
"""Rows of a segment: with more a reader takes many steps, with fewer each step takes much memory."""
STEPS_PER_BYTE = 16
"""Steps of a path that each byte of its stream allows: what a step costs does not depend on its length."""
_NARROW = 16
"""Entries of a step up to which they are read one by one."""
_SLAB = 1 << 18
"""Entries of a step that are sorted at a time."""
_SEGMENT = struct.Struct("<H")


def encode(codes: Codes, states: int, split: int = 0) -> bytes:
    """Entropy codes a matrix, (r, n), whose view of `split` rows is a path; raises an error where it is not."""
    levels = to_view(codes, split).astype(np.int32)
    segment = max(segment_rows(len(levels)), LEAST_ROWS)
    indices, quantizer = indices_of(levels, states, segment)
    low, order, symbols = to_symbols(indices)
    quiet = quiet_columns(levels)
    plan, total_bits, _ = _best(symbols, len(order), quantizer, quiet)
    frequencies = plan.tables(total_bits)
    coder = constriction.stream.stack.AnsCoder()
    models = _models(plan.classing, slice(None), quantizer)
    for row in reversed(range(min(segment, len(levels)))):
        picked, sizes = _by_model(models[row::segment])
        at = picked.size
        for model in reversed(range(len(sizes))):
            own = picked[at - sizes[model] : at]
            entropy.push(coder, symbols[row::segment].ravel()[own], frequencies[2][model])
            at -= sizes[model]
    entropy.push(coder, 2 * plan.classing.columns + ~quiet, frequencies[1][0])
    entropy.push(coder, plan.classing.rows, frequencies[0][0])
    header = Header(total_bits, low, len(order), frequencies[0].size, frequencies[1].size // 2, split)
    words: NDArray[np.uint32] = coder.get_compressed()
    return (
        write_header(header)
        + _SEGMENT.pack(segment)
        + tables.write_tables(frequencies[:2], frequencies[2], total_bits)
        + words.astype("<u4").tobytes()
    )


def estimated_bytes(codes: Codes, states: int, split: int = 0) -> int:
    """Length of `encode`'s stream, within 16 bytes, without encoding anything."""
    levels = to_view(codes, split).astype(np.int32)
    indices, quantizer = indices_of(levels, states, segment_rows(len(levels)))
    low, order, symbols = to_symbols(indices)
    _, total_bits, bits = _best(symbols, len(order), quantizer, quiet_columns(levels))
    header = Header(total_bits, low, len(order), 1, 1, split)
    return len(write_header(header)) + _SEGMENT.size + int(bits) // 8 + 4


def decode(data: bytes, rows: int, columns: int, states: int) -> NDArray[np.int32]:
    """The inverse of `encode`."""
    header, start = read_header(data)
    if header.chunks:
        raise FormatError("a path's stream has chunks, which cannot hold it")
    if len(data) < start + _SEGMENT.size:
        raise FormatError(f"a path's stream of {len(data)} bytes has no header")
    (segment,) = _SEGMENT.unpack_from(data, start)
    if not LEAST_ROWS <= segment <= MOST_ROWS:
        raise FormatError(f"segments of {segment} rows, allowed are {LEAST_ROWS} to {MOST_ROWS}")
    if header.split and columns % header.split:
        raise FormatError(f"{columns} columns cannot be split into {header.split} parts")
    height = header.split or rows
    if min(segment, height) > STEPS_PER_BYTE * len(data):
        raise FormatError(
            f"a path of {min(segment, height)} steps in {len(data)} bytes, "
            f"allowed are {STEPS_PER_BYTE} per byte"
        )
    start += _SEGMENT.size
    classes = (header.row_classes, header.column_classes)
    (of_rows, of_columns, *models), taken = tables.read_tables(
        data[start:],
        (header.row_classes, 2 * header.column_classes),
        2 * (sum(classes) - 1),
        header.symbols,
        header.total_bits,
    )
    coder = entropy.open_coder(data[start + taken :])
    row_class = entropy.pop(coder, height, of_rows).astype(np.uint8)
    column = entropy.pop(coder, rows * columns // height, of_columns).astype(np.uint8)
    paths = _Paths(
        Classing(row_class, column >> 1),
        column & 1 == 0,
        [tables.model(each) if len(each) > 1 else None for each in models],
        code_order(header.low, header.symbols),
        machine(states),
        segment,
    )
    is_narrow = -(-height // segment) * len(column) <= _NARROW
    levels = (_pop_narrow_paths if is_narrow else _pop_paths)(coder, paths)
    if not coder.is_empty():
        raise FormatError("an entropy-coded message is longer than its codes")
    return from_view(levels, header.split, rows)


@dataclass(frozen=True, slots=True, eq=False)
class _Paths:
    """What a stream says of its paths before their indices."""

    classing: Classing
    quiet: Flags
    models: list[Any]
    """constriction's, or None for a table of one symbol."""
    order: Codes
    machine: Machine
    segment: int


def _pop_paths(coder: entropy.Coder, paths: _Paths) -> NDArray[np.int32]:
    """Levels row by row, of all segments and columns at once."""
    classing, of, segment = paths.classing, paths.machine, paths.segment
    rows, columns = len(classing.rows), len(classing.columns)
    levels = np.empty((rows, columns), np.int32)
    state = of.start(paths.quiet, -(-rows // segment))
    for row in range(min(segment, rows)):
        here = state[: len(range(row, rows, segment))]
        quantizer = of.quantizer[here]
        of_entry = _models(classing, slice(row, None, segment), quantizer).ravel()
        indices = _pop_step(coder, of_entry, paths.models, paths.order).reshape(here.shape)
        for top in range(0, columns, _SLAB):
            own = (slice(None), slice(top, top + _SLAB))
            levels[row::segment][own] = levels_of(indices[own], quantizer[own])
            here[own] = of.step(here[own], indices[own])
    return levels


def _pop_step(coder: entropy.Coder, of_entry: NDArray[np.uint8], models: list[Any], order: Codes) -> Codes:
    """The indices of one step's entries. The message has them by model, and in place within a model."""
    if len(of_entry) > _SLAB:
        return _pop_wide_step(coder, of_entry, models, order)
    picked, sizes = _by_model(of_entry)
    parts = [
        np.zeros(size, np.int32) if model is None else coder.decode(model, size)
        for model, size in zip(models, sizes, strict=False)
        if size
    ]
    indices = np.empty(len(of_entry), order.dtype)
    indices[picked] = order[np.concatenate(parts)]
    return indices


def _pop_wide_step(
    coder: entropy.Coder, of_entry: NDArray[np.uint8], models: list[Any], order: Codes
) -> Codes:
    """`_pop_step` slab by slab: sorting takes eight bytes per entry, and looking up codes takes twelve."""
    sizes = count_values(of_entry, len(models))
    popped, at = np.empty(len(of_entry), order.dtype), 0
    for model, size in zip(models, sizes.tolist(), strict=True):
        for start in range(at, at + size, _SLAB):
            count = min(_SLAB, at + size - start)
            popped[start : start + count] = order[0] if model is None else order[coder.decode(model, count)]
        at += size
    indices, starts = np.empty_like(popped), np.cumsum(sizes) - sizes
    for top in range(0, len(of_entry), _SLAB):
        picked, counts = _by_model(of_entry[top : top + _SLAB])
        parts = [popped[start : start + count] for start, count in zip(starts, counts, strict=False)]
        indices[top : top + _SLAB][picked] = np.concatenate(parts)
        starts[: len(counts)] += counts
    return indices


def _pop_narrow_paths(coder: entropy.Coder, paths: _Paths) -> NDArray[np.int32]:
    """`_pop_paths` one index at a time: for a few entries per step, arrays take longer than numbers."""
    of, models, segment = paths.machine, paths.models, paths.segment
    quantizers, after, codes = of.quantizer.tolist(), of.after.tolist(), paths.order.tolist()
    of_rows, of_columns = paths.classing.rows.tolist(), paths.classing.columns.tolist()
    rows, columns = len(of_rows), len(of_columns)
    levels = np.empty((rows, columns), np.int32)
    state = of.start(paths.quiet, -(-rows // segment)).tolist()
    for first in range(min(segment, rows)):
        entries = [
            (2 * (of_rows[row] + of_columns[column]) + quantizers[state[part][column]], part, column)
            for part, row in enumerate(range(first, rows, segment))
            for column in range(columns)
        ]
        for model, part, column in sorted(entries):
            index = codes[0 if models[model] is None else coder.decode(models[model])]
            sign = (index > 0) - (index < 0)
            levels[first + part * segment, column] = 2 * index - quantizers[state[part][column]] * sign
            state[part][column] = after[state[part][column]][index & 1]
    return levels


def _models(classing: Classing, rows: slice, quantizer: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The model of every entry of some rows: twice its class, plus its quantizer."""
    models: NDArray[np.uint8] = classing.rows[rows, None].astype(np.uint8) + classing.columns.astype(np.uint8)
    models += models
    models += quantizer
    return models


def _by_model(models: NDArray[np.uint8]) -> tuple[Integers, list[int]]:
    """Positions of a row's entries sorted by model, and how many each model has."""
    return np.argsort(models.ravel(), kind="stable"), np.bincount(models.ravel()).tolist()


def _best(symbols: Symbols, size: int, quantizer: Integers, quiet: Flags) -> tuple[Plan, int, float]:
    """The shortest plan found, its total, and its bits without the header."""
    joint = symbols + quantizer * np.int32(size)
    return shortest(_plans(symbols, joint, size, quiet))


def _plans(symbols: Symbols, joint: Integers, size: int, quiet: Flags) -> Iterator[Plan]:
    """One class, and classes of rows and columns; each has one table per quantizer."""
    both = fit_both(sample(symbols, size), class_width(symbols.size))
    for classing in (one_class(*symbols.shape), both):
        counts = class_counts(joint, classing, 2 * size).reshape(-1, size)
        width = 2 * (int(classing.columns.max()) + 1)
        of_columns = np.bincount(2 * classing.columns + ~quiet, minlength=width)
        of_columns[-1] = max(of_columns[-1], 1)  # a table ends with a symbol that has a frequency
        yield Plan(0, classing, [np.bincount(classing.rows)[None], of_columns[None], counts])
