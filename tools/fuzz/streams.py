"""Streams that no writer of ours would make and every reader must take: odd classes, tables, views and chunks.

Written from docs/format.md with a coder of plain numbers. Only the tables and chunks are written by the package.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import numpy as np

from factorpack.format import chunks
from factorpack.format import frequency_tables as tables
from tests.format.reference import FLOATS, NEXT, model_starts

_WORD = (1 << 32) - 1
Table = list[int]
"""Where each symbol's share of 2^24 starts, and the end of the last."""


class Sequence:
    """Symbols in the order in which a reader takes them, each with its table."""

    def __init__(self) -> None:
        self._pairs: list[tuple[int, Table]] = []

    def add(self, symbol: int, table: Table) -> None:
        if len(table) > 2:
            self._pairs.append((symbol, table))

    def message(self) -> bytes:
        state, words = 0, []
        for symbol, starts in reversed(self._pairs):
            share = starts[symbol + 1] - starts[symbol]
            if state >= share << 40:
                words.append(state & _WORD)
                state >>= 32
            state = (state // share << 24) + starts[symbol] + state % share
        while state:
            words.append(state & _WORD)
            state >>= 32
        return struct.pack(f"<{len(words)}I", *words)


class Tables:
    """Random tables of 2^t each, and the models' in one array as the package writes them."""

    def __init__(
        self, rng: random.Random, classes: tuple[int, int], models: int, symbols: int, bits: int
    ) -> None:
        self._rng, self._bits = rng, bits
        self.classes = [np.array([self._frequencies(size)]) for size in classes]
        self.models = np.zeros((models, symbols), np.int64)
        for model in range(models):
            used = rng.choice((1, symbols, rng.randint(1, symbols)))
            self.models[model, :used] = self._frequencies(used)

    def _frequencies(self, size: int) -> list[int]:
        """The last one is not 0, or a reader could not know that it is there."""
        total = 1 << self._bits
        if self._rng.random() < 0.3:  # as uneven as can be
            return [total - (size > 1), *[0] * (size - 2), *[1] * (size > 1)][:size]
        cuts = sorted(self._rng.randrange(total) for _ in range(size - 1))
        found = [high - low for low, high in zip([0, *cuts], [*cuts, total], strict=True)]
        if not found[-1]:
            largest = found.index(max(found))
            found[largest], found[-1] = found[largest] - 1, 1
        return found

    def of_class(self, axis: int) -> Table:
        return self._starts(self.classes[axis][0])

    def of_model(self, model: int) -> Table:
        return self._starts(self.models[model][: int(tables.used(self.models)[model])])

    def _starts(self, frequencies: np.ndarray) -> Table:  # type: ignore[type-arg]
        return model_starts([int(each) for each in frequencies], self._bits)

    def written(self) -> bytes:
        return tables.write_tables(self.classes, self.models, self._bits)


def codes_stream(rng: random.Random, rows: int, columns: int, low: int, high: int) -> bytes:
    """An `ans` stream of codes from `low` to `high`."""
    split, height, width = _view(rng, rows, columns)
    counts = rng.choice((1, 1, 2, 5, 32)), rng.choice((1, 1, 2, 5, 32))
    bits, models = rng.randint(8, 16), sum(counts) - 1
    own = Tables(rng, counts, models, high - low + 1, bits)
    sequence = Sequence()
    of_rows = _drawn(rng, sequence, own.of_class(0), height)
    of_columns = _drawn(rng, sequence, own.of_class(1), width)
    chunked: dict[int, bytes] = {}
    for model in range(models):
        entries = sum(of_columns.count(model - each) for each in of_rows)
        if entries and rng.random() < 0.2:
            kind = np.uint8 if high - low < 256 else np.uint16
            block = np.array([rng.randint(0, high - low) for _ in range(entries)], kind)
            chunked[model] = chunks._compress_run(block)
            own.models[model] = np.eye(1, high - low + 1, dtype=np.int64) << bits
        _drawn(rng, sequence, own.of_model(model), entries)
    head = _head(bits, low, high - low, counts, split, bool(chunked))
    if chunked:
        head += struct.pack("<Q", sum(1 << model for model in chunked))
        head += b"".join(struct.pack("<I", len(chunk)) for chunk in chunked.values())
    return head + own.written() + sequence.message() + chunks.join_chunks(list(chunked.values()))


def floats_stream(rng: random.Random, count: int, kind: str) -> bytes:
    """A `floats` stream; mantissas may have zeros at their end, and the highest exponent may be unused."""
    exponent_bits, mantissa_bits = FLOATS[kind]
    used, highest = rng.randint(0, mantissa_bits), rng.randrange(1 << exponent_bits)
    low, high = -rng.randint(0, min(highest, 40) + 1), rng.randint(0, min(highest, 40))
    found = bytes([used, highest]) + codes_stream(rng, 1, count, low, high)
    for width in (min(16, used), used - min(16, used)):
        size = count * width
        found += (rng.getrandbits(size) if size else 0).to_bytes((size + 7) // 8, "little")
    return found


def path_stream(rng: random.Random, rows: int, columns: int, states: int, most: int) -> bytes:
    """A `trellis` stream of indices from `-most` to `most`."""
    split, height, width = _view(rng, rows, columns)
    counts = rng.choice((1, 1, 2, 5)), rng.choice((1, 1, 2, 5))
    bits, segment = rng.randint(8, 16), rng.choice((16, 17, 64, 1024))
    own = Tables(rng, (counts[0], 2 * counts[1]), 2 * (sum(counts) - 1), 2 * most + 1, bits)
    sequence = Sequence()
    of_rows = _drawn(rng, sequence, own.of_class(0), height)
    of_columns = _drawn(rng, sequence, own.of_class(1), width)
    order = sorted(range(-most, most + 1), key=lambda code: (abs(code), code))
    models = [own.of_model(model) for model in range(len(own.models))]
    state = {(top, column): 0 for top in range(0, height, segment) for column in range(width)}
    for place in range(min(segment, height)):
        entries = []
        for row in range(place, height, segment):
            for column, kind in enumerate(of_columns):
                odd = kind & (state[row - place, column] * 2 // states)
                entries.append((2 * (of_rows[row] + kind // 2) + odd, row, column))
        for model, row, column in sorted(entries, key=lambda entry: entry[0]):
            (symbol,) = _drawn(rng, sequence, models[model], 1)
            state[row - place, column] = NEXT[states][state[row - place, column]][order[symbol] & 1]
    head = _head(bits, -most, 2 * most, counts, split, False) + struct.pack("<H", segment)
    return head + own.written() + sequence.message()


def _view(rng: random.Random, rows: int, columns: int) -> tuple[int, int, int]:
    """The split of a view, its height and its width."""
    split = rng.choice([0, *(s for s in range(1, columns + 1) if columns % s == 0)])
    height = split or rows
    return split, height, rows * columns // height


def _drawn(rng: random.Random, sequence: Sequence, table: Table, count: int) -> list[int]:
    """Random symbols, the first of them more often."""
    last = len(table) - 2
    draw: Callable[[], int] = rng.choice((lambda: rng.randint(0, last), lambda: min(_few(rng), last)))
    found = [draw() for _ in range(count)]
    for symbol in found:
        sequence.add(symbol, table)
    return found


def _few(rng: random.Random) -> int:
    return int(rng.expovariate(1.0))


def _head(bits: int, low: int, size: int, counts: tuple[int, int], split: int, is_chunked: bool) -> bytes:
    is_wide = low < -128 or low > 127 or size > 255
    flags = bits | is_wide << 5 | (split > 0) << 6 | is_chunked << 7
    fields = (flags, low, size, counts[0] - 1, counts[1] - 1)
    return struct.pack("<BhHBB" if is_wide else "<BbBBB", *fields) + (
        struct.pack("<I", split) if split else b""
    )
