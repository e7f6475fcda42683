"""About how many bytes codes will take once entropy coded, counted where the codes are.

The coder, format/entropy.py, moves rows and columns between classes until the stream is shortest. Here the
class of a row or column is its mean magnitude on a scale of half octaves, and a model costs what its counts
say: large weights come out within half a percent of their stream, and no code leaves its device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from factorpack.quantize.trellis import machine, segment_rows

SAMPLED = 1 << 22
"""Codes that are counted: of more, evenly spaced columns."""
MOST_CLASSES = 32
HALF_OCTAVES = 2.0
FAINTEST = 2.0**-5
"""Mean magnitudes far below this are one class."""
EXACT = 32
"""Magnitudes counted one by one; larger ones share bins, eight to an octave."""
BINS_PER_OCTAVE = 8
SYMBOL_BITS = 2.0
"""What a symbol adds to a table, beside half the logarithm of its count."""
HEADER_BYTES = 12


def estimate_bytes(codes: Tensor, states: int = 0, rows: int = 0) -> Tensor:
    """The length of the stream of each of (batch, rows, columns) codes: (batch,), in float64.

    With `states` the codes are paths through a trellis. `rows` is given where the codes are a sample of that
    many rows.
    """
    columns = spread_evenly(codes.shape[2], SAMPLED // codes.shape[1], codes.device)
    share = codes.shape[2] / len(columns) * max(rows, codes.shape[1]) / codes.shape[1]
    codes = codes if len(columns) == codes.shape[2] else codes[:, :, columns]
    quantizers = path_quantizers(codes, states) if states else None
    if quantizers is not None:  # index k of quantizer q is the level 2k - q sign(k)
        codes = ((codes.abs() + quantizers) / 2).floor_() * codes.sign()
    magnitude = codes.abs()
    row_class, column_class = _classes(magnitude.mean(2)), _classes(magnitude.mean(1))
    symbols, bits_beyond = _symbols(codes, magnitude)
    models = row_class[:, :, None] + column_class[:, None, :]
    counts = _count(models if quantizers is None else 2 * models + quantizers, symbols)
    classes = _class_bits(row_class) + _class_bits(column_class)
    together = counts.sum(1, keepdim=True) if not states else counts.unflatten(1, (-1, 2)).sum(1)
    shortest = torch.minimum(_model_bits(counts, share) + classes * share, _model_bits(together, share))
    return (shortest + bits_beyond * share) / 8 + HEADER_BYTES


def spread_evenly(count: int, most: int, device: torch.device) -> Tensor:
    """At most `most` positions of `count`, at least one: multiples of the golden ratio have no period."""
    if count <= max(most, 1):
        return torch.arange(count, device=device)
    golden = torch.arange(max(most, 1), dtype=torch.float64, device=device) * 0.6180339887498949
    return ((golden % 1.0) * count).long()


def _classes(means: Tensor) -> Tensor:
    """Classes, from 0 up, of (batch, n) mean magnitudes."""
    scale = HALF_OCTAVES * torch.log2(means + FAINTEST)
    return (scale - scale.amin(1, keepdim=True)).round_().clamp_(0, MOST_CLASSES - 1).to(torch.int32)


def _symbols(codes: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor | float]:
    """A symbol per code, and the bits, (batch,), that codes take within the bins of large magnitudes."""
    symbols = (2 * magnitude - (codes < 0).to(codes)).to(torch.int32)
    if int(symbols.max()) <= 2 * EXACT:
        return symbols, 0.0
    octaves = torch.log2(magnitude.clamp_min(EXACT) / EXACT)
    bins = 2 * EXACT + 1 + 2 * (BINS_PER_OCTAVE * octaves).floor() + (codes < 0).to(codes)
    large = magnitude > EXACT
    width = (magnitude * (2.0 ** (1 / BINS_PER_OCTAVE) - 1)).clamp_min(1.0)
    beyond = torch.where(large, width.log2(), 0.0).sum((1, 2), dtype=torch.float64)
    return torch.where(large, bins.to(torch.int32), symbols), beyond


def path_quantizers(levels: Tensor, states: int) -> Tensor:
    """Which quantizer each level of paths down the rows of (batch, rows, columns) uses."""
    of = machine(states)
    quantizer = torch.from_numpy(of.quantizer).to(levels.device, torch.int32)
    after = torch.from_numpy(of.after).to(levels.device, torch.int64).flatten()
    batch, rows, columns = levels.shape
    segment = segment_rows(rows)
    padded = torch.nn.functional.pad(levels.abs(), (0, 0, 0, -rows % segment)).unflatten(1, (-1, segment))
    quiet = ~(levels.to(torch.int32) & 1).bool().any(1)  # (batch, columns)
    state = (quiet.long() * states)[:, None].expand(batch, padded.shape[1], columns)
    found = torch.empty(padded.shape, dtype=torch.int32, device=levels.device)
    for row in range(segment):
        found[:, :, row] = taken = quantizer[state]
        index = ((padded[:, :, row] + taken) / 2).floor().long()
        state = after[2 * state + (index & 1)]
    return found.flatten(1, 2)[:, :rows]


def _count(models: Tensor, symbols: Tensor) -> Tensor:
    """How often each model meets each symbol: (batch, models, symbols)."""
    batch, height, width = len(models), int(models.max()) + 1, int(symbols.max()) + 1
    height += height % 2  # a trellis has two models per class
    first = torch.arange(batch, device=models.device, dtype=torch.int32)[:, None, None] * height
    cells = (models + first) * width + symbols
    return torch.bincount(cells.flatten(), minlength=batch * height * width).reshape(batch, height, width)


def _class_bits(classes: Tensor) -> Tensor:
    """Bits that name the classes of (batch, n) rows or columns: (batch,)."""
    return _entropy(torch.nn.functional.one_hot(classes.long(), MOST_CLASSES).sum(1))


def _model_bits(counts: Tensor, share: float) -> Tensor:
    """Bits of messages and tables of (batch, models, symbols): (batch,); `share` times as many codes as counted."""
    seen = counts.double() * share
    tables = torch.where(counts > 0, seen.clamp_min(1.0).log2() / 2 + SYMBOL_BITS, 0.0)
    return (_entropy(counts) * share + tables.sum(-1)).sum(-1)


def _entropy(counts: Tensor) -> Tensor:
    """Bits of a message with these counts, (..., symbols), under its own model."""
    seen = counts.double()
    total = seen.sum(-1, keepdim=True)
    return torch.where(counts > 0, seen * (total / seen.clamp_min(1.0)).log2(), 0.0).sum(-1)
