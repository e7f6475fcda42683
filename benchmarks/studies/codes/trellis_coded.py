"""Trellis-coded weights: the search at many steps, and the bytes of a stream with one table per quantizer."""

from __future__ import annotations

import time
from math import log2

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.studies.codes.trellis import REACH, Prices, levels, quantized, read, trellis, write
from benchmarks.studies.codes.weights import (
    Matrix,
    Point,
    Weight,
    fixed_bytes,
    rounded,
    squared_error,
    stream,
)
from factorpack.format import entropy
from factorpack.format.classes import class_counts, fit_both, sample
from factorpack.format.frequency_tables import message_bits, normalized
from factorpack.format.stream_plan import Plan, plans
from factorpack.format.streams import coded_bytes, split_of
from factorpack.format.symbols import to_symbols, to_view
from factorpack.solve.code_length import CLASSES, HIGH_RATE, fit_lengths

TRELLIS_STEP = 0.57
"""The fine step relative to a plain one of equal error: half, plus the granular gain."""
ROUNDS = 3
MOSTLY_ZERO = 0.88
"""A class with this share of zeros keeps the zero of the odd quantizer."""
AT_ONCE = 1 << 21
"""Elements in one trellis search."""


def trellis_points(
    weight: Weight, steps: list[float], states: int, price: float
) -> list[tuple[Point, float]]:
    """Bytes and error at some fine steps, and bytes where both quantizers share their models."""
    many = max(1, AT_ONCE // weight.unit.size)
    found = []
    for start in range(0, len(steps), many):
        some = steps[start : start + many]
        for step, (indices, quantizer) in zip(some, _trellis_codes(weight, some, states, price), strict=True):
            error = squared_error(weight, levels(indices, quantizer) * step)
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
    """Bytes of the stream that the format would hold with two tables per class, one for each quantizer."""
    encoded = weight.encoded(indices, step)
    name = "latent" if "latent" in encoded.parts else "codes"
    _, order, symbols = to_symbols(encoded.parts[name].numpy())
    size = len(order)
    tile = weight.tile
    folded = quantizer.reshape(-1, tile).T if tile > 1 else quantizer
    joint = symbols.astype(np.uint16) + folded.astype(np.uint16) * np.uint16(size)
    least = float("inf")
    for plan in plans(symbols, size, split_of(encoded, name)):
        counts = class_counts(to_view(joint, plan.split), plan.classing, 2 * size)
        split = Plan(plan.split, plan.classing, [*plan.counts[:2], counts.reshape(-1, size)])
        least = min([least, *(split.bits(total) for total in (8, 10, 12, 14, 16))])
    return fixed_bytes(encoded) + least / 8 + 15  # header and the last word


def check_bytes(weight: Weight) -> None:
    """With one quantizer, the bytes are those that the format counts, plus the sizes of unused tables."""
    codes = np.rint(2 * weight.unit).astype(np.int64)
    ours, theirs = _dependent_bytes(weight, codes, np.zeros_like(codes), 0.5), stream(weight, 0.5, codes)[0]
    assert abs(ours - theirs) < 64, f"{ours} bytes with a quantizer's tables apart, {theirs} in the format"


def round_trip(weight: Weight, step: float, states: int, price: float) -> dict[str, float]:
    """A real message of the trellis's indices, written and read back, beside a plain message of the format."""
    ((indices, quantizer),) = _trellis_codes(weight, [step], states, price)
    _, order, symbols = to_symbols(indices.astype(np.int16))
    classing = fit_both(sample(symbols, len(order)), 0.5)
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
    plain = rounded(weight, step / TRELLIS_STEP, HIGH_RATE).astype(np.int16)
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
