"""About how many bytes codes will take once entropy coded, counted where the codes are.

As in the coder, format/classes.py, the class of an entry is its row's plus its column's: mean magnitudes on a
scale of octaves, and for many codes then the classes that code rows and columns shortest. A model costs what
its counts say. Most weights come out within a percent of their stream, and no code leaves its device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from factorpack.format.classes import MAX_CLASSES
from factorpack.format.stream_plan import MANY_CODES, class_width
from factorpack.quantize.trellis import periodic_taps, segment_rows
from factorpack.solve.evenly import spread_evenly

SAMPLED = 1 << 22
"""Codes that are counted: of more, evenly spaced columns, and rows where there are very many."""
MOST_ROWS = 8192
ROUNDS = 4
FAINTEST = 2.0**-5
"""Mean magnitudes far below this are one class."""
FEW_SYMBOLS = 24
"""Symbols that classes distinguish."""
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
    all_codes = max(rows, codes.shape[1]) * codes.shape[2]
    columns = spread_evenly(codes.shape[2], SAMPLED // min(codes.shape[1], MOST_ROWS), codes.device)
    codes = codes if len(columns) == codes.shape[2] else codes[:, :, columns]
    quantizers = path_quantizers(codes, states) if states else None
    if quantizers is not None:  # index k of quantizer q is the level 2k - q sign(k)
        codes = ((codes.abs() + quantizers) / 2).floor_() * codes.sign()
    if codes.shape[1] > MOST_ROWS:
        some = spread_evenly(codes.shape[1], MOST_ROWS, codes.device)
        codes, quantizers = codes[:, some], None if quantizers is None else quantizers[:, some]
    share = all_codes / codes[0].numel()
    symbols, bits_beyond = _symbols(codes, magnitude := codes.abs())
    many = all_codes >= MANY_CODES  # rounds that refine the classes pay as well
    row_class, column_class = (_classes(magnitude.mean(axis), 1 / class_width(all_codes)) for axis in (2, 1))
    if many:
        row_class, column_class = _refined(_binned(symbols), row_class, column_class)
    models = row_class[:, :, None] + column_class[:, None, :]
    counts = _count(models if quantizers is None else 2 * models + quantizers, symbols)
    classes = _class_bits(row_class, column_class)
    together = counts.sum(1, keepdim=True) if not states else counts.unflatten(1, (-1, 2)).sum(1)
    bits = _model_bits(torch.cat([counts, together], 1), share)
    by_class, without = bits.split([counts.shape[1], together.shape[1]], 1)
    shortest = torch.minimum(by_class.sum(1) + classes * share, without.sum(1))
    if states:  # models that ignore the quantizer
        independent = counts.unflatten(1, (-1, 2)).sum(2)
        shortest = torch.minimum(shortest, _model_bits(independent, share).sum(1) + classes * share)
    return (shortest + bits_beyond * share) / 8 + HEADER_BYTES


def _classes(means: Tensor, per_octave: float) -> Tensor:
    """Classes, from 0 up, of (batch, n) mean magnitudes."""
    scale = per_octave * torch.log2(means + FAINTEST)
    return (scale - scale.amin(1, keepdim=True)).round_().clamp_(0, MAX_CLASSES - 1).to(torch.int32)


def _binned(symbols: Tensor) -> Tensor:
    """Symbols as classes see them: large ones fall into four bins per octave."""
    if int(symbols.max()) <= FEW_SYMBOLS:
        return symbols
    octaves = torch.log2(symbols.clamp_min(FEW_SYMBOLS) / FEW_SYMBOLS)
    return torch.where(symbols <= FEW_SYMBOLS, symbols, FEW_SYMBOLS + (4 * octaves).to(torch.int32))


def _refined(bins: Tensor, row_class: Tensor, column_class: Tensor) -> tuple[Tensor, Tensor]:
    """Columns, then rows, take the class that codes them shortest, a few times."""
    size = int(bins.max()) + 1
    for _ in range(ROUNDS):
        column_class = _reassigned(bins.transpose(1, 2), column_class, row_class, size)
        row_class = _reassigned(bins, row_class, column_class, size)
    return row_class, column_class


def _reassigned(bins: Tensor, own: Tensor, other: Tensor, size: int) -> Tensor:
    """The class of each row of (batch, u, v) that codes it shortest, its own cost included."""
    batch, rows, _ = bins.shape
    classes, others = int(own.max()) + 1, int(other.max()) + 1
    cells = other[:, None, :] * size + bins
    cells += torch.arange(batch * rows, device=bins.device).reshape(batch, rows, 1) * (others * size)
    counted = torch.bincount(cells.flatten(), minlength=batch * rows * others * size)
    counts = counted.reshape(batch, rows, others * size).float()  # of each row, by class of columns and bin
    member = torch.nn.functional.one_hot(own.long(), classes).float()
    by_class = (member.transpose(1, 2) @ counts).reshape(batch, classes * others, size)
    place = torch.arange(classes, device=bins.device)[:, None] + torch.arange(others, device=bins.device)
    model = by_class.new_zeros(batch, classes + others - 1, size).index_add_(1, place.flatten(), by_class)
    lengths = _code_lengths(model)[:, place].flatten(2)  # (batch, classes, others * size)
    share = member.sum(1) + 0.5
    price = (share.sum(1, keepdim=True) / share).log2()
    return (counts @ lengths.transpose(1, 2) + price[:, None]).argmin(2).to(torch.int32)


def _code_lengths(counts: Tensor) -> Tensor:
    """Bits per bin in each model, (batch, models, bins); neighbours and the total smooth what saw few codes."""
    smooth = counts + 0.02 * (counts.sum(1, keepdim=True) + 0.5) / (counts.sum((1, 2), keepdim=True) + 1)
    smooth[:, 1:] += 0.02 * counts[:, :-1]
    smooth[:, :-1] += 0.02 * counts[:, 1:]
    return torch.log2(smooth.sum(2, keepdim=True) / smooth)


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
    """Which quantizer each level of paths down the rows of (batch, rows, columns) uses.

    As `quantizers_of` of quantize/trellis.py: an index's parity is that of half its level, rounded up.
    """
    rows = levels.shape[1]
    segment = segment_rows(rows)
    period, backs = periodic_taps(states)
    sizes = levels.abs().to(torch.int32)
    loud = (sizes & 1).amax(1, keepdim=True)  # a quiet column has no odd level
    parities = (sizes + 1 >> 1 & 1).to(torch.uint8)
    height = -(-segment // period) * period
    parities = torch.nn.functional.pad(parities, (0, 0, 0, -rows % segment)).unflatten(1, (-1, segment))
    sums = torch.zeros(*parities.shape[:2], height, levels.shape[2], dtype=torch.uint8, device=levels.device)
    for back in backs:
        sums[:, :, back:segment] += parities[:, :, : max(segment - back, 0)]
    sums = sums.unflatten(2, (-1, period)).cumsum(2, dtype=torch.uint8).flatten(2, 3)
    found: Tensor = (sums[:, :, :segment].flatten(1, 2)[:, :rows] & 1).to(torch.int32) * loud
    return found


def _count(models: Tensor, symbols: Tensor) -> Tensor:
    """How often each model meets each symbol: (batch, models, symbols)."""
    batch, (last_model, last_symbol) = len(models), torch.stack([models.max(), symbols.max()]).tolist()
    height, width = last_model + 1, last_symbol + 1
    height += height % 2  # a trellis has two models per class
    first = torch.arange(batch, device=models.device, dtype=torch.int32)[:, None, None] * height
    cells = (models + first) * width + symbols
    return torch.bincount(cells.flatten(), minlength=batch * height * width).reshape(batch, height, width)


def _class_bits(rows: Tensor, columns: Tensor) -> Tensor:
    """Bits that name the classes of (batch, n) rows and (batch, m) columns: (batch,)."""
    counts = [torch.nn.functional.one_hot(each.long(), MAX_CLASSES).sum(1) for each in (rows, columns)]
    return _entropy(torch.stack(counts)).sum(0)


def _model_bits(counts: Tensor, share: float) -> Tensor:
    """Bits of messages and tables of (..., symbols): (...); `share` times as many codes as counted."""
    seen = counts.double() * share
    tables = (seen.clamp_min(1.0).log2() / 2 + SYMBOL_BITS) * (counts > 0)
    return _entropy(counts) * share + tables.sum(-1)


def _entropy(counts: Tensor) -> Tensor:
    """Bits of a message with these counts, (..., symbols), under its own model."""
    seen = counts.double()
    total = seen.sum(-1, keepdim=True).clamp_min_(1.0)
    return (seen * (total / seen.clamp_min(1.0)).log2()).sum(-1)
