"""What each way of coding is worth, in bits per weight at equal squared error, and how far the Gaussian bound is.

From the weights alone, without data: every weight as the planner prepares it, all with the same step relative
to their standard deviation. Bits are those of streams as the format writes them, tables and classes included,
unless "ideal" is said; without chunks, which are longer for the sake of speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from math import log2
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.formatting import format_source, format_table, load_result
from benchmarks.studies.codes.contexts import CONTEXTS, context_curves
from benchmarks.studies.codes.trellis import check_against_brute_force
from benchmarks.studies.codes.trellis_coded import TRELLIS_STEP, check_bytes, round_trip, trellis_points
from benchmarks.studies.codes.weights import (
    Point,
    Weight,
    fixed_bytes,
    rounded,
    squared_error,
    stream,
    weights_of,
)
from factorpack.format import entropy
from factorpack.solve.code_length import CLASSES, HIGH_RATE, fit_lengths

OCTAVES = (-0.5, -0.25, 0.0, 0.25, 0.5)
"""Steps of a curve, around the one given."""
RDO_PRICES = (0.06, HIGH_RATE, 0.2)
PLAIN = f"rdo {HIGH_RATE:.3f}"
"""What the planner does."""
TRELLIS_PRICES = (0.07, 0.085, 0.1, HIGH_RATE, 0.13)
"""What a bit is worth, in squares of twice the fine step: the distance between two indices of a quantizer."""


@patch.object(entropy, "_CHUNK_MARGIN", 0.0)
def run(model: str, bits: float, step: float, states: list[int]) -> dict[str, Any]:
    """Curves around a step, in standard deviations, compared at the error where rounding by rate takes `bits`."""
    brute_force = {str(count): check_against_brute_force(count) for count in states}
    weights = weights_of(model)
    check_bytes(weights[0])
    numbers = sum(weight.unit.size for weight in weights)
    steps = [step * 2.0**octave for octave in OCTAVES]
    curves: dict[str, list[Point]] = {}
    for name, way in _scalar_ways().items():
        curves[name] = _summed([[way(weight, at) for at in steps] for weight in weights])
    plain = curves[PLAIN]
    curves |= context_curves(weights, steps[1:-1], plain[1:-1])
    prices, seconds = {}, {}
    fine = [TRELLIS_STEP * at for at in steps]
    for count in states:
        prices[str(count)] = price = _trellis_price(weights, fine, count)
        started = time.perf_counter()
        found = [trellis_points(weight, fine, count, price) for weight in weights]
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
            str(count): round_trip(largest, TRELLIS_STEP * step, count, prices[str(count)])
            for count in states
        },
        "brute_force_gap": brute_force,
        "curves": {
            name: [{"bits": 8 * b / numbers, "error": e / numbers} for b, e in curve]
            for name, curve in curves.items()
        },
    }


def _scalar_ways() -> dict[str, Callable[[Weight, float], Point]]:
    ways: dict[str, Callable[[Weight, float], Point]] = {
        "nearest, ideal, one model a tensor": _ideal,
        "nearest": lambda weight, at: stream(weight, at, np.rint(weight.unit / np.float32(at))),
    }
    for price in RDO_PRICES:
        ways[f"rdo {price:.3f}"] = lambda weight, at, price=price: stream(  # type: ignore[misc]
            weight, at, rounded(weight, at, price)
        )
    return ways


def _ideal(weight: Weight, step: float) -> Point:
    codes = np.rint(weight.unit / np.float32(step))
    counts = np.unique(codes, return_counts=True)[1]
    bits = float((counts * np.log2(counts.sum() / counts)).sum())
    return bits / 8 + fixed_bytes(weight.encoded(codes, step)), squared_error(weight, codes * step)


def _trellis_price(weights: list[Weight], steps: list[float], states: int) -> float:
    """The price that does best on one weight of middling size."""
    small = [weight for weight in weights if weight.unit.size <= 300_000] or weights
    weight = max(small, key=lambda each: each.unit.size)
    middle = len(steps) // 2
    curves = {
        price: [point for point, _ in trellis_points(weight, steps, states, price)]
        for price in TRELLIS_PRICES
    }
    error = log2(curves[TRELLIS_PRICES[len(TRELLIS_PRICES) // 2]][middle][1])
    return min(curves, key=lambda price: _at([b for b, _ in curves[price]], _logs(curves[price]), error))


def _bounds(weights: list[Weight], error: float) -> dict[str, float]:
    """Rate of Gaussians at a mean squared error: one per tensor, and one per class of rows and columns."""
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


def tabulate() -> str:
    documents = {case: load_result("codes", case) for case in CASES}
    outcomes = [document["result"] for document in documents.values()]
    rows = [
        [words, *(f"{outcome['bits_a_weight'][key]:.3f}" for outcome in outcomes)]
        for key, words in WAYS.items()
    ]
    bounds = [outcome["bounds_bits_a_weight"]["Gaussian classes"] for outcome in outcomes]
    rows.append(["the Gaussian bound", *(f"{bound:.3f}" for bound in bounds)])
    table = format_table(["bits per weight at equal error", *CASES.values()], rows)
    return f"{table}\n{format_source(*documents.values())}"


CASES = {
    "resnet18-low": "ResNet18, low rate",
    "resnet18-middle": "ResNet18, middle",
    "mobilenet_v2-low": "MobileNetV2, low rate",
    "mobilenet_v2-middle": "MobileNetV2, middle",
    "gaussian-low": "Gaussian sample, low rate",
}
WAYS = {
    "nearest, ideal, one model a tensor": "nearest rounding, one ideal model per tensor",
    "nearest": "nearest rounding, the format's stream (two-way classes)",
    "rdo 0.116": "rounding by rate, the format's stream",
    "rdo + magnitude contexts": "... with contexts of neighbouring magnitudes",
    "rdo + sign contexts": "... with contexts of neighbouring signs",
    "tcq 4": "trellis-coded, 4 states",
    "tcq 8": "trellis-coded, 8 states",
}
TABLES = {"codes": tabulate}
