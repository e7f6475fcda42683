"""What each way of coding is worth, in bits a weight at equal squared error, and how far the Gaussian bound is.

Weights alone, no data: every weight as the planner poses it, all with the same step relative to their
spread. Bits are of streams as the format writes them, tables and classes included, unless "ideal" is said;
without chunks, which are longer for the sake of speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.data import checkpoint
from benchmarks.studies.trellis import (
    REACH,
    Prices,
    check_against_brute_force,
    levels,
    quantized,
    read,
    trellis,
    write,
)
from factorpack.budget.candidates import step_at_unit_slope
from factorpack.format import entropy
from factorpack.format.classes import class_counts, fit_classes
from factorpack.format.frequency_tables import message_bits, normalized
from factorpack.format.streams import coded_bytes, split_of
from factorpack.methods import SecondOrder
from factorpack.methods.second_order import as_encoded
from factorpack.quantize.uniform import storable
from factorpack.record import Encoded
from factorpack.solve.code_length import CLASSES, HIGH_RATE, fit_lengths
from factorpack.solve.layer_problem import Problem
from factorpack.weight import Weight as Given

OCTAVES = (-0.5, -0.25, 0.0, 0.25, 0.5)
"""Steps of a curve, about the one given."""
RDO_PRICES = (0.06, HIGH_RATE, 0.2)
PLAIN = f"rdo {HIGH_RATE:.3f}"
"""What the planner does."""
TRELLIS_PRICES = (0.07, 0.085, 0.1, HIGH_RATE, 0.13)
"""What a bit is worth in squares of twice the fine step, the distance of two indices of a quantizer."""
TRELLIS_STEP = 0.57
"""The fine step beside a plain one of equal error: half, and the granular gain back."""
ROUNDS = 3
MOSTLY_ZERO = 0.88
"""A class of so many zeros keeps that of the odd quantizer."""
AT_ONCE = 1 << 21
"""Numbers in one trellis search."""
RATIOS = np.array([0.5, 0.75, 1.0, 1.33, 2.0])
"""Edges between neighbourhoods quiet and loud, beside what their classes expect."""

Matrix = NDArray[np.integer]
Point = tuple[float, float]
"""Bytes, and squared error in units of the weight's variance, summed."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    given: Given
    tile: int
    problem: Problem
    spread: float

    @property
    def unit(self) -> NDArray[np.float32]:
        """Latents of unit variance, (out, K)."""
        found: NDArray[np.float32] = (self.problem.latent[0] / self.spread).numpy()
        return found

    def encoded(self, codes: NDArray[Any], step: float) -> Encoded:
        scale = storable(torch.tensor([[step * self.spread]]))
        matrix = torch.from_numpy(codes.astype(np.float32))[None]
        return as_encoded(matrix, scale, self.problem.basis, self.given)


@patch.object(entropy, "_DEARER", 0.0)
def run(model: str, bits: float, step: float, states: list[int]) -> dict[str, Any]:
    """Curves about a step, in spreads; ways are compared at the error where rounding by rate takes `bits`."""
    brute_force = {str(count): check_against_brute_force(count) for count in states}
    weights = weights_of(model)
    _check_bytes(weights[0])
    numbers = sum(weight.unit.size for weight in weights)
    steps = [step * 2.0**octave for octave in OCTAVES]
    curves: dict[str, list[Point]] = {}
    for name, way in _scalar_ways().items():
        curves[name] = _summed([[way(weight, at) for at in steps] for weight in weights])
    plain = curves[PLAIN]
    curves |= _context_curves(weights, steps[1:-1], plain[1:-1])
    prices, seconds = {}, {}
    fine = [TRELLIS_STEP * at for at in steps]
    for count in states:
        prices[str(count)] = price = _trellis_price(weights, fine, count)
        started = time.perf_counter()
        found = [_trellis_points(weight, fine, count, price) for weight in weights]
        seconds[str(count)] = round((time.perf_counter() - started) / len(steps), 1)
        curves[f"tcq {count}"] = _summed([[point for point, _ in each] for each in found])
        curves[f"tcq {count}, one model for both quantizers"] = _summed(
            [[(single, point[1]) for point, single in each] for each in found]
        )
    error = 2.0 ** _at([log2(e) for _, e in plain], [8 * b / numbers for b, _ in plain], bits)
    table = {
        name: _at([8 * b / numbers for b, _ in curve], [log2(e) for _, e in curve], log2(error))
        for name, curve in curves.items()
    }
    bounds = _bounds(weights, error / numbers)
    if model == "gaussian":
        _check_theory(table, bounds["one Gaussian a tensor"], bits)
    largest = max(weights, key=lambda weight: weight.unit.size)
    best = min((f"rdo {price:.3f}" for price in RDO_PRICES), key=lambda name: table[name])
    return {
        "weights": numbers,
        "relative_error": error / numbers,
        "bits_a_weight": table,
        "bounds_bits_a_weight": bounds,
        "best_rdo": best,
        "above_class_bound_bits": {name: at - bounds["Gaussian classes"] for name, at in table.items()},
        "gain_percent": _gains(table, best, states),
        "trellis_price": prices,
        "trellis_encode_s": seconds,
        "trellis_round_trip": {
            str(count): _round_trip(largest, TRELLIS_STEP * step, count, prices[str(count)])
            for count in states
        },
        "brute_force_gap": brute_force,
        "curves": {
            name: [{"bits": 8 * b / numbers, "error": e / numbers} for b, e in curve]
            for name, curve in curves.items()
        },
    }


def weights_of(model: str) -> list[Weight]:
    if model == "gaussian":
        sample = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
        tensors: dict[str, Tensor] = {"sample": sample}
    else:
        tensors = {name: each for name, each in load_file(checkpoint(model)).items() if each.dim() > 1}
    found = []
    for each in tensors.values():
        kernel = each[0, 0].numel() if each.dim() > 2 else 1
        tile = kernel if kernel**2 * 8 <= each.numel() else 1  # as the planner has it
        given, method = Given(each), SecondOrder(step=1.0, tile=tile)
        found.append(Weight(given, tile, method.problem(given), step_at_unit_slope(given, method)))
    return found


def _scalar_ways() -> dict[str, Callable[[Weight, float], Point]]:
    ways: dict[str, Callable[[Weight, float], Point]] = {
        "nearest, ideal, one model a tensor": _ideal,
        "nearest": lambda weight, at: _stream(weight, at, np.rint(weight.unit / np.float32(at))),
    }
    for price in RDO_PRICES:
        ways[f"rdo {price:.3f}"] = lambda weight, at, price=price: _stream(  # type: ignore[misc]
            weight, at, _rounded(weight, at, price)
        )
    return ways


def _ideal(weight: Weight, step: float) -> Point:
    codes = np.rint(weight.unit / np.float32(step))
    counts = np.unique(codes, return_counts=True)[1]
    bits = float((counts * np.log2(counts.sum() / counts)).sum())
    return bits / 8 + _fixed_bytes(weight.encoded(codes, step)), _error(weight, codes * step)


def _stream(weight: Weight, step: float, codes: NDArray[Any]) -> Point:
    return coded_bytes(weight.encoded(codes, step)), _error(weight, codes * step)


def _rounded(weight: Weight, step: float, price: float) -> NDArray[np.float32]:
    codes, _ = weight.problem.round(torch.tensor([step * weight.spread]), price)
    found: NDArray[np.float32] = codes[0, 0].numpy()
    return found


def _error(weight: Weight, values: NDArray[Any]) -> float:
    return float(np.square(weight.unit - values, dtype=np.float64).sum())


def _fixed_bytes(encoded: Encoded) -> int:
    """Basis and scales."""
    return sum(
        part.numel() * part.dtype.itemsize
        for name, part in encoded.parts.items()
        if name not in ("codes", "latent")
    )


# Contexts


CONTEXTS = ("rdo + magnitude contexts", "rdo + sign contexts", "rdo + both contexts", "rdo, adaptive alone")


def _context_curves(weights: list[Weight], steps: list[float], plain: list[Point]) -> dict[str, list[Point]]:
    saved = {name: np.zeros(len(steps)) for name in CONTEXTS}
    for weight in weights:
        for number, at in enumerate(steps):
            for name, bits in _context_savings(weight, _rounded(weight, at, HIGH_RATE)).items():
                saved[name][number] += bits
    return {
        name: [(b - float(s) / 8, e) for (b, e), s in zip(plain, bits, strict=True)]
        for name, bits in saved.items()
    }


def _context_savings(weight: Weight, codes: NDArray[np.float32]) -> dict[str, float]:
    """Bits that contexts of neighbours take off the stream, their counts starting at the tables sent.

    The last is a coder with no tables and no classes at all: magnitudes expected from the row and the
    column so far, counts that start at a geometric law.
    """
    encoded = weight.encoded(codes, 1.0)
    name = "latent" if "latent" in encoded.parts else "codes"
    split, tile = split_of(encoded, name), weight.tile
    matrix = encoded.parts[name].numpy()
    low, order, symbols = entropy.numbered(matrix)
    plan, total_bits, bits = entropy._best(symbols, len(order), split)
    model = plan.classing.rows[:, None] + plan.classing.columns
    if tile > 1:  # back from the view, (s, n/s * k), or from the tiles, (k, n), to channels
        model = (model if plan.split else model.T).reshape(codes.shape)
    whole = codes.astype(np.int64)
    number = np.empty(len(order), np.int64)
    number[order.astype(np.int64) - low] = np.arange(len(order))
    symbol = number[whole - low]
    tables = np.maximum(plan.tables(total_bits)[2], 2.0**-8)
    law = tables / tables.sum(1, keepdims=True)
    now = float(-np.log2(law[model, symbol]).sum())
    loud, signs = _neighbours(whole, model, tile)
    saved = {}
    for label, context, count in (
        (CONTEXTS[0], loud, len(RATIOS) + 1),
        (CONTEXTS[1], signs, 9),
        (CONTEXTS[2], loud * 9 + signs, 9 * (len(RATIOS) + 1)),
    ):
        cell = model * count + context
        saved[label] = now - _adaptive_bits(cell, symbol, np.repeat(law, count, 0), 64.0)
    cell = _expected(np.abs(whole))
    laws = _geometric(2.0 ** (np.arange(int(cell.max()) + 1) / 3 - 5), order)
    saved[CONTEXTS[3]] = bits - _adaptive_bits(cell, symbol, laws, 8.0)
    return saved


def _neighbours(codes: Matrix, model: Matrix, tile: int) -> tuple[Matrix, Matrix]:
    """How loud those coded before are beside what their classes expect, and the signs of the nearest two."""
    size = np.abs(codes)
    total = np.bincount(model.ravel(), size.ravel()) / np.maximum(np.bincount(model.ravel()), 1)
    relative = size / np.maximum(total, 0.02)[model]
    places = [(1, 0, 1.0), (2, 0, 0.5), (0, tile, 1.0), (0, 2 * tile, 0.5)]
    places += [(0, 1, 1.0), (0, 2, 0.5)] if tile > 1 else [(1, 1, 0.5)]
    above = sum(weight * _moved(relative, down, right, 1.0) for down, right, weight in places)
    loud = np.digitize(above / sum(weight for _, _, weight in places), RATIOS)
    signs = 3 * (np.sign(_moved(codes, 1, 0, 0)) + 1) + np.sign(_moved(codes, 0, tile, 0)) + 1
    return loud, signs.astype(np.int64)


def _moved(matrix: NDArray[Any], down: int, right: int, fill: float) -> NDArray[Any]:
    rows, columns = matrix.shape
    found = np.full_like(matrix, fill)
    found[down:, right:] = matrix[: max(rows - down, 0), : max(columns - right, 0)]
    return found


def _expected(size: Matrix) -> Matrix:
    """The magnitude that row and column foretell, from what lies before in both, in thirds of an octave."""
    above = np.cumsum(size, 0) - size
    mean = max(float(size.mean()), 0.01)
    column = (above + 2 * mean) / (np.arange(len(size))[:, None] + 2)
    before, foretold = np.cumsum(size, 1) - size, np.cumsum(column, 1) - column
    scale = (before + 4 * mean) / (foretold + 4 * mean)
    level: Matrix = np.rint(3 * (np.log2(column * scale) + 5)).clip(0, 40).astype(np.int64)
    return level


def _geometric(mean: NDArray[np.float64], order: Matrix) -> NDArray[np.float64]:
    """The two-sided law with each mean magnitude, (laws, symbols)."""
    decay = (np.sqrt(1 + mean**2) - 1) / mean
    law: NDArray[np.float64] = decay[:, None] ** np.abs(order.astype(np.float64)) + 1e-9
    return law / law.sum(1, keepdims=True)


def _adaptive_bits(cell: Matrix, symbol: Matrix, law: NDArray[np.float64], weight: float) -> float:
    """Bits of symbols coded with counts a cell that start at `weight` times its law: no order matters."""
    cells, size = law.shape
    counts = np.bincount((cell * size + symbol).ravel(), minlength=cells * size).reshape(cells, size)
    start, seen = torch.from_numpy(weight * law), torch.from_numpy(counts.astype(np.float64))
    each = torch.lgamma(start + seen) - torch.lgamma(start)
    whole = torch.lgamma(weight + seen.sum(1)) - torch.lgamma(torch.tensor(weight, dtype=torch.float64))
    return float((whole.sum() - each.sum()) / np.log(2))


# The trellis


def _trellis_price(weights: list[Weight], steps: list[float], states: int) -> float:
    """The price that does best on one weight of middling size."""
    small = [weight for weight in weights if weight.unit.size <= 300_000] or weights
    weight = max(small, key=lambda each: each.unit.size)
    middle = len(steps) // 2
    curves = {
        price: [point for point, _ in _trellis_points(weight, steps, states, price)]
        for price in TRELLIS_PRICES
    }
    error = log2(curves[TRELLIS_PRICES[len(TRELLIS_PRICES) // 2]][middle][1])
    return min(curves, key=lambda price: _at([b for b, _ in curves[price]], _logs(curves[price]), error))


def _trellis_points(
    weight: Weight, steps: list[float], states: int, price: float
) -> list[tuple[Point, float]]:
    """Bytes and error at some fine steps, and bytes where both quantizers share their models."""
    many = max(1, AT_ONCE // weight.unit.size)
    found = []
    for start in range(0, len(steps), many):
        some = steps[start : start + many]
        for step, (indices, quantizer) in zip(some, _trellis_codes(weight, some, states, price), strict=True):
            error = _error(weight, levels(indices, quantizer) * step)
            single = float(coded_bytes(weight.encoded(indices, step)))
            found.append(((_dependent_bytes(weight, indices, quantizer, step), error), single))
    return found


def _trellis_codes(
    weight: Weight, steps: list[float], states: int, price: float
) -> list[tuple[Matrix, Matrix]]:
    """Indices and quantizers, (out, K), at some steps: one search, the steps side by side."""
    machine = trellis(states)
    count, width = len(steps), weight.unit.shape[1]
    coarse = torch.from_numpy(np.stack([weight.unit / np.float32(2 * step) for step in steps]))
    lengths = fit_lengths(coarse, price)
    classes = (lengths.row_class[:, :, None] + lengths.column_class[:, None, :]).clamp(0, CLASSES - 1)
    offset = torch.arange(count)[:, None, None] * CLASSES
    model = (classes + offset).movedim(0, 1).flatten(1).numpy()  # (out, steps * K)
    values = (2 * coarse).movedim(0, 1).flatten(1).numpy()
    bits = _first_lengths(lengths.table[:, :, -REACH - 1 :].numpy().reshape(-1, REACH + 1))
    for _ in range(ROUNDS):
        indices, quantizer = quantized(values, Prices(bits, model, 4 * price), machine)
        bits = _lengths(indices, quantizer, model, len(bits))
    return [
        (indices[:, at : at + width], quantizer[:, at : at + width]) for at in range(0, count * width, width)
    ]


def _first_lengths(plain: NDArray[np.float32]) -> NDArray[np.float32]:
    """Bits by model and quantizer to begin with, (models, 2, REACH + 1), from plain rounding's at the coarse step.

    Q1 does best without its zero, but where nearly all is zero: searches that begin with a cheap one there
    need tens of rounds to give it up.
    """
    between = np.concatenate([np.full((len(plain), 1), 8.0), (plain[:, 1:] + plain[:, :-1]) / 2], 1)
    between[:, 1:] += np.log2(2 * np.exp2(-between[:, 1:]).sum(1, keepdims=True))
    is_quiet = plain[:, :1] < -log2(MOSTLY_ZERO)
    return np.stack([plain, np.where(is_quiet, plain, between)], 1).astype(np.float32)


def _lengths(indices: Matrix, quantizer: Matrix, model: Matrix, models: int) -> NDArray[np.float32]:
    """Bits of magnitudes and signs by model and quantizer; thin models lean on a geometric law."""
    size = np.minimum(np.abs(indices), REACH)
    cell = (model * 2 + quantizer) * (REACH + 1) + size
    counts = np.bincount(cell.ravel(), minlength=models * 2 * (REACH + 1)).reshape(models, 2, REACH + 1)
    spots = np.arange(REACH + 1)
    total = counts.sum(2, keepdims=True)
    mean = ((counts * spots).sum(2, keepdims=True) + 0.05) / (total + 1.0)
    decay = (np.sqrt(1 + mean**2) - 1) / mean
    law = decay**spots * (1 - decay) / (1 + decay) * np.where(spots > 0, 2, 1)
    share = np.maximum((counts + 8 * law) / (total + 8), 2.0**-24)
    return (np.where(spots > 0, 1.0, 0.0) - np.log2(share)).astype(np.float32)


def _dependent_bytes(weight: Weight, indices: Matrix, quantizer: Matrix, step: float) -> float:
    """Bytes of the stream that the format would hold with a table more for each class, one a quantizer."""
    encoded = weight.encoded(indices, step)
    name = "latent" if "latent" in encoded.parts else "codes"
    _, order, symbols = entropy.numbered(encoded.parts[name].numpy())
    size = len(order)
    tile = weight.tile
    folded = quantizer.reshape(-1, tile).T if tile > 1 else quantizer
    joint = symbols.astype(np.uint16) + folded.astype(np.uint16) * np.uint16(size)
    least = float("inf")
    for plan in entropy._plans(symbols, size, split_of(encoded, name)):
        counts = class_counts(entropy.viewed(joint, plan.split), plan.classing, 2 * size)
        split = entropy.Plan(plan.split, plan.classing, [*plan.counts[:2], counts.reshape(-1, size)])
        least = min([least, *(split.bits(total) for total in entropy.TOTALS if split.fits(total))])
    return _fixed_bytes(encoded) + least / 8 + 15  # header and the last word


def _check_bytes(weight: Weight) -> None:
    """With one quantizer, bytes are what the format counts, and the sizes of tables that are not used."""
    codes = np.rint(2 * weight.unit).astype(np.int64)
    ours, theirs = _dependent_bytes(weight, codes, np.zeros_like(codes), 0.5), _stream(weight, 0.5, codes)[0]
    assert abs(ours - theirs) < 64, f"{ours} bytes with a quantizer's tables apart, {theirs} in the format"


def _round_trip(weight: Weight, step: float, states: int, price: float) -> dict[str, float]:
    """A real message of the trellis's indices, written and read back, beside a plain one of the format."""
    ((indices, quantizer),) = _trellis_codes(weight, [step], states, price)
    _, order, symbols = entropy.numbered(indices.astype(np.int16))
    classing = fit_classes(symbols, 0.5)
    model = 2 * (classing.rows[:, None] + classing.columns) + quantizer
    size = len(order)
    joint = symbols.astype(np.int64) + quantizer.astype(np.int64) * size
    counts = class_counts(joint, classing, 2 * size).reshape(-1, size)
    frequencies = normalized(counts, 14)
    words = write(symbols, model, frequencies)
    started = time.perf_counter()
    back = read(words, classing.rows, classing.columns, frequencies, order, trellis(states))
    dependent = time.perf_counter() - started
    assert (back == indices).all()
    expected = message_bits(counts, frequencies, 14).sum() / 8
    assert abs(4 * len(words) - expected) < 16, f"{4 * len(words)} bytes written, {expected} expected"
    plain = _rounded(weight, step / TRELLIS_STEP, HIGH_RATE).astype(np.int16)
    data = entropy.encode(plain)
    started = time.perf_counter()
    entropy.decode(data, *plain.shape)
    return {
        "codes": indices.size,
        "message_bytes": 4 * len(words),
        "estimated_bytes": expected,
        "decode_ns_a_code": 1e9 * dependent / indices.size,
        "plain_decode_ns_a_code": 1e9 * (time.perf_counter() - started) / indices.size,
    }


# Bounds and tables


def _bounds(weights: list[Weight], error: float) -> dict[str, float]:
    """Rate of Gaussians at a mean squared error: one a tensor, and one a class of rows and columns."""
    shares, variances = [], []
    for weight in weights:
        unit = torch.from_numpy(weight.unit)[None]
        fitted = fit_lengths(unit, rounds=0)
        classes = (fitted.row_class[0, :, None] + fitted.column_class[0]).clamp(0, CLASSES - 1).flatten()
        count = torch.bincount(classes, minlength=CLASSES).double()
        energy = torch.bincount(classes, unit.flatten().double().square(), minlength=CLASSES)
        shares.append(count[count > 0])
        variances.append((energy[count > 0] / count[count > 0]).clamp_min(1e-12))
    share, variance = torch.cat(shares).numpy(), torch.cat(variances).numpy()
    low, high = 0.0, float(variance.max())
    for _ in range(100):
        level = (low + high) / 2
        is_low = (share * np.minimum(level, variance)).sum() < error * share.sum()
        low, high = (level, high) if is_low else (low, level)
    rate = (share * np.maximum(0.5 * np.log2(variance / level), 0)).sum() / share.sum()
    return {"one Gaussian a tensor": 0.5 * log2(1 / error), "Gaussian classes": float(rate)}


def _gains(table: dict[str, float], best: str, states: list[int]) -> dict[str, float]:
    """Percent of bits saved at equal error, each way over what precedes it."""
    pairs = {
        "two-way classes over one model a tensor": ("nearest", "nearest, ideal, one model a tensor"),
        "rounding by rate over nearest": (PLAIN, "nearest"),
        "the best price over the fixed one": (best, PLAIN),
        **{f"{name} over rdo": (name, PLAIN) for name in CONTEXTS},
        **{f"tcq {count} over the best rdo": (f"tcq {count}", best) for count in states},
    }
    pairs |= {
        f"tcq {more} over tcq {fewer}": (f"tcq {more}", f"tcq {fewer}") for fewer, more in pairwise(states)
    }
    return {name: 100 * (1 - table[way] / table[before]) for name, (way, before) in pairs.items()}


def _check_theory(table: dict[str, float], bound: float, bits: float) -> None:
    """At high rate plain rounding is log2(2 pi e / 12) / 2 bits above the bound, and 8 states win 0.8 to 1.1 dB."""
    if bits < 4:
        return
    space = 0.5 * log2(2 * np.pi * np.e / 12)
    above = table["nearest"] - bound
    assert abs(above - space) < 0.01, f"{above} bits above the bound, theory says {space}"
    won = 20 * np.log10(2.0) * (table["nearest"] - table["tcq 8"])
    assert 0.8 < won < 1.15, f"8 states win {won} dB"


def _summed(curves: list[list[Point]]) -> list[Point]:
    return [(sum(b for b, _ in at), sum(e for _, e in at)) for at in zip(*curves, strict=True)]


def _logs(curve: list[Point]) -> list[float]:
    return [log2(error) for _, error in curve]


def _at(values: list[float], grid: list[float], place: float) -> float:
    """Values interpolated between the two neighbours of a place; outside the curve is an error."""
    order = np.argsort(grid)
    if not min(grid) <= place <= max(grid):
        raise ValueError(f"{place:.3f} outside a curve from {min(grid):.3f} to {max(grid):.3f}")
    return float(np.interp(place, np.array(grid)[order], np.array(values)[order]))
