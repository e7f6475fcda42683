"""Trellis-coded (dependent) quantization, as in VVC and NNC: two quantizers, and a state that says which is next.

Q0 holds the even multiples of the step, Q1 the odd ones and zero. Index k of quantizer q is the level
2k - q sign(k); its parity drives the state machine, so a decoder knows the quantizer of every element and a
code is half as dense as the levels that a path can reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import constriction
import numpy as np
from numpy.typing import NDArray

from factorpack.format import frequency_tables as tables_format
from factorpack.quantize.trellis import machine as machine_of

REACH = 64
"""Indices beyond it are priced like it, with two bits more for each doubling."""
_AT_ONCE = 1 << 16
"""Elements whose branches are priced at once: they stay in the cache."""

Floats = NDArray[np.float32]
Ints = NDArray[np.integer]
Words = NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Trellis:
    """A state's quantizer, (S,), and the state after each parity, (S, 2)."""

    quantizer: Ints
    after: Ints

    def arrivals(self) -> tuple[Ints, Ints]:
        """The two states before each state, and the subset, 2 q + parity, that leads here: (2, S) each."""
        before: list[list[tuple[int, int]]] = [[] for _ in self.after]
        for state, parity in product(range(len(self.after)), (0, 1)):
            before[self.after[state, parity]].append((state, 2 * int(self.quantizer[state]) + parity))
        table = np.array(before)  # (S, 2, 2)
        return table[:, :, 0].T.copy(), table[:, :, 1].T.copy()


def trellis(states: int) -> Trellis:
    """The file format's own machine, without the state in which quiet columns stay."""
    found = machine_of(states)
    return Trellis(found.quantizer[:-1].astype(np.int64), found.after[:-1].astype(np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """What indices cost: bits by model, quantizer and magnitude, (models, 2, REACH + 1), and the price of a bit."""

    bits: Floats
    model: Ints
    """The model of each element, (rows, columns)."""
    price: float
    """In squared steps."""

    def part(self, rows: slice) -> Prices:
        return Prices(self.bits, self.model[rows], self.price)


def quantized(values: Floats, prices: Prices, machine: Trellis) -> tuple[Ints, Ints]:
    """Indices of the least (v - level)^2 + price * bits along every column, and their quantizers.

    `values` (rows, columns) are in units of the step; columns begin in state 0 and do not know of each other.
    """
    rows, columns = values.shape
    source, subset = machine.arrivals()
    totals = np.full((len(machine.after), columns), np.inf, np.float32)
    totals[0] = 0
    choice = np.empty((rows, *totals.shape), np.bool_)
    height = max(1, _AT_ONCE // columns)
    for top in range(0, rows, height):
        part = slice(top, top + height)
        costs = np.stack(
            [_cheapest(np.abs(values[part]), q, p, prices.part(part))[1] for q, p in product((0, 1), (0, 1))],
            1,
        )
        for row, cost in enumerate(costs, top):
            first = totals[source[0]] + cost[subset[0]]
            second = totals[source[1]] + cost[subset[1]]
            np.less(second, first, out=choice[row])
            totals = np.minimum(first, second)
    taken = _traced(choice, totals.argmin(0), source, subset)
    quantizer, parity = taken >> 1, taken & 1
    found = np.empty((rows, columns), np.int64)
    for top in range(0, rows, height):
        part = slice(top, top + height)
        size = np.abs(values[part])
        found[part] = _cheapest(size, quantizer[part], parity[part], prices.part(part))[0]
    return np.where(values < 0, -found, found), quantizer


def quantizers(indices: Ints, machine: Trellis) -> Ints:
    """The quantizer of every index, as a decoder finds it: row after row, all columns at once."""
    state = np.zeros(indices.shape[1], np.int64)
    found = np.empty(indices.shape, np.int8)
    flat, quantizer = machine.after.ravel(), machine.quantizer.astype(np.int8)
    for row, parity in enumerate(indices & 1):
        found[row] = quantizer[state]
        state = flat[2 * state + parity]
    return found


def levels(indices: Ints, quantizer: Ints) -> Ints:
    return 2 * indices - quantizer * np.sign(indices)


def write(symbols: Ints, model: Ints, tables: Ints) -> Words:
    """The message of symbols (rows, columns), each under its own model, as `read` takes it."""
    coder = constriction.stream.stack.AnsCoder()
    models = [frequency_model(each) for each in tables]
    for row in range(len(symbols) - 1, -1, -1):
        order = np.argsort(model[row], kind="stable")
        sizes = np.bincount(model[row], minlength=len(models))
        parts = np.split(symbols[row, order].astype(np.int32), np.cumsum(sizes)[:-1])
        for part, each in zip(reversed(parts), reversed(models), strict=True):
            if part.size and each is not None:
                coder.encode_reverse(part, each)
    words: Words = coder.get_compressed()
    return words


def read(
    words: Words, row_class: Ints, column_class: Ints, tables: Ints, order: Ints, machine: Trellis
) -> Ints:
    """Indices (rows, columns): a row's quantizers are known once the row before is read.

    An index has the model of its classes and its quantizer; `order` is the index of each symbol.
    """
    coder = constriction.stream.stack.AnsCoder(words)
    models = [frequency_model(each) for each in tables]
    found = np.empty((len(row_class), len(column_class)), order.dtype)
    state = np.zeros(len(column_class), np.int64)
    flat, columns = machine.after.ravel(), 2 * column_class
    for row, own in enumerate(2 * row_class):
        model = (own + columns + machine.quantizer[state]).astype(np.uint8)
        places = np.argsort(model, kind="stable")
        sizes = np.bincount(model).tolist()
        parts = [
            np.zeros(size, np.int32) if each is None else coder.decode(each, size)
            for size, each in zip(sizes, models, strict=False)
            if size
        ]
        found[row, places] = order[np.concatenate(parts)]
        state = flat[2 * state + (found[row] & 1)]
    return found


def frequency_model(frequencies: Ints) -> Any:
    """None where one symbol is all there is: it takes no bits."""
    size = int(tables_format.used(frequencies[None])[0])
    return tables_format.model(frequencies[:size]) if size > 1 else None


def _cheapest(size: Floats, q: Ints | int, parity: Ints | int, prices: Prices) -> tuple[Ints, Floats]:
    """The nearest index with a parity, or the next one inward: its magnitude and its cost."""
    best, least = None, None
    near = np.maximum(np.rint((size + (q - 2 * parity)) / 4), 0).astype(np.int64)
    offset = (prices.model * 2 + q) * (REACH + 1)
    for steps in (near, np.maximum(near - 1, 0)):
        index = parity + 2 * steps
        level = 2 * index - q * (index > 0)
        bits = prices.bits.ravel().take(offset + np.minimum(index, REACH))
        far = index > REACH
        if far.any():
            bits[far] += 2 * np.log2(index[far] / REACH)
        cost = np.square(size - level, dtype=np.float32) + np.float32(prices.price) * bits
        if best is None or least is None:
            best, least = index, cost
        else:
            best, least = np.where(cost < least, index, best), np.minimum(cost, least)
    assert best is not None
    assert least is not None
    return best, least


def _traced(choice: NDArray[np.bool_], state: Ints, source: Ints, subset: Ints) -> Ints:
    """From the cheapest last states back to the first: the subset taken at each element."""
    taken = np.empty((len(choice), len(state)), np.int8)
    column = np.arange(len(state))
    for row in range(len(choice) - 1, -1, -1):
        way = choice[row, state, column].astype(np.int64)
        taken[row] = subset[way, state]
        state = source[way, state]
    return taken


def check_against_brute_force(states: int, length: int = 6, columns: int = 12, reach: int = 3) -> float:
    """The largest difference between the path found and the best of all paths, in squared steps; it must be none."""
    machine = trellis(states)
    generator = np.random.default_rng(states)
    values = generator.normal(0, 1.8, (length, columns)).astype(np.float32)
    lengths = np.stack([0.6 + 1.3 * np.arange(REACH + 1), 0.9 + 1.1 * np.arange(REACH + 1)])
    prices = Prices(lengths[None].astype(np.float32), np.zeros(values.shape, np.int64), 0.4)
    indices, quantizer = quantized(values, prices, machine)
    assert (quantizers(indices, machine) == quantizer).all()

    def cost(path: Ints, column: Floats) -> NDArray[np.float64]:  # (length, paths), (length, 1)
        q = quantizers(path, machine)
        return np.asarray(
            (np.square(column - levels(path, q)) + prices.price * lengths[q, np.abs(path)]).sum(0)
        )

    every = np.array(list(product(range(-reach, reach + 1), repeat=length))).T
    gaps = [
        cost(indices[:, [c]], values[:, [c]])[0] - cost(every, values[:, [c]]).min() for c in range(columns)
    ]
    assert max(np.abs(gaps)) < 1e-4, f"{states} states: a path is worse than the best one by {max(gaps)}"
    return float(max(np.abs(gaps)))
