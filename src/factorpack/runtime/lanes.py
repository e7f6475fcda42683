"""Codes in lanes: entropy-coded in memory so that thousands of threads can decode them.

A file's streams are read from front to back. Here each column of a matrix, or pair of columns, is in segments of
some hundred rows a lane with a small stream of its own. A thread per lane decodes down its column, so that
neighbouring threads write neighbouring codes, and a row's scale or class is the same for all of them.

A lane's stream is a string of bits (lane_models.py) in words of 32: a one marks the first bit, and the last bit is
the last of a word. 32 neighbouring lanes are a group, which has its words in the order in which they are taken: at
first three of each lane, then, before every few steps, one of each lane that has used one. So threads that run
side by side read neighbouring words. A group's patches are codes too rare for the tables: 32 bits for each, the row
within the segment (12), the column within the group (8) and the code (12).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from factorpack.errors import WeightError
from factorpack.runtime.lane_encode import GROUP, EncodedLanes, encode_reference, steps_between
from factorpack.runtime.lane_models import LIMIT, Models, choose_models, fit_pairs

LANE_BITS = {0: 3200, 1 << 22: 1300, 1 << 25: 3200, 1 << 27: 4000}
"""By least number of codes: bits of a lane, about. Short lanes make many, to be decoded at a time; but each takes
32 bits more than its codes. Small matrices are decoded fast enough anyway, and large ones have enough lanes."""
LONGEST_SEGMENT = 4096
"""Rows of a lane that a patch can count."""
LEAST_COLUMNS, LEAST_LANES = 64, 32
"""A narrower matrix, or a shorter one than a lane, is cut into other rows, of this many codes at least."""
LANE_BYTES = 4.2
"""What a lane takes beyond its codes, about."""
PAIR_MARGIN = {0: 1.0, 1 << 22: 1.015}
"""By least number of codes: what pairs may take beside single codes. They are decoded twice as fast."""
_RUNS, _RUN = 64, 4096
"""Runs of codes, whose entropy is about that of all, and the length of a run."""


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """Where everything is in the bytes of `pack_lanes`. Codes are `count` in rows of `columns`."""

    count: int
    columns: int
    segment: int
    """Rows of a lane; the last segment may have fewer."""
    table_bits: int
    raw_bits: int
    models: int
    low: int
    """The first symbol of the tables."""
    has_patches: bool
    is_pair: bool
    """Whether a symbol is two neighbouring codes of a row, so that a lane has two columns."""
    is_indirect: bool
    """Whether the tables have the number of every slot's symbol, in a byte, and not its entry."""
    states_at: int
    """Bytes before the lanes' first states, 16 bits each. Before them are all words."""
    groups_at: int
    """Bytes before two 32-bit integers per group: the words and the patches before its own; and two for all."""
    table_at: int
    patches_at: int
    classes_at: int
    """Bytes before the classes of rows and columns, four bits each. With one model there are none."""

    @property
    def rows(self) -> int:
        return -(-self.count // self.columns)

    @property
    def segments(self) -> int:
        return -(-self.rows // self.segment)

    @property
    def groups(self) -> int:
        """Groups of one segment."""
        return -(-self.lanes // GROUP)

    @property
    def lanes(self) -> int:
        """Lanes of one segment."""
        return self.columns // 2 if self.is_pair else self.columns

    @property
    def steps(self) -> int:
        """Steps between the times at which lanes may take a word."""
        return steps_between(self.table_bits, self.raw_bits)


def fits_lanes(low: int, high: int) -> bool:
    """Whether codes from `low` to `high` can be in lanes."""
    return low >= -LIMIT and high < LIMIT


def extent(codes: Tensor) -> tuple[int, int]:
    """The lowest and the highest of some codes."""
    low, high = torch.stack(torch.aminmax(codes)).tolist()
    return low, high


def pack_lanes(codes: Tensor, columns: int, unit: int = 1, free: bool = True) -> tuple[Tensor, LaneLayout]:
    """Codes in memory order, at least one, in rows of `columns` -> bytes, and where everything is in them.

    Where the rows are `free`, they may be cut otherwise, to have lanes of some length. `unit` neighbouring
    codes are of different kinds, like the codes of a tile. Codes on a GPU are encoded there, to the same bytes.
    """
    flat = codes.reshape(-1)
    low, high = extent(flat)
    if not fits_lanes(low, high):
        raise WeightError(f"codes {low} to {high}, lanes can have {-LIMIT} to {LIMIT - 1}")
    count = len(flat)
    wanted = _by_size(LANE_BITS, count) / max(_entropy(flat, low, high), 0.1)
    matrix = _in_rows(flat, columns)
    choice = choose_models(matrix, low, high)
    if free and (columns < LEAST_COLUMNS or len(matrix) < wanted):
        narrow = -(-max(round(count / wanted), min(count, LEAST_LANES)) // unit) * unit
        narrow_matrix = _in_rows(flat, narrow)
        narrow_choice = choose_models(narrow_matrix, low, high)
        if narrow_choice.size + LANE_BYTES * narrow < choice.size + LANE_BYTES * columns:
            columns, matrix, choice = narrow, narrow_matrix, narrow_choice
    paired = fit_pairs(matrix, _by_size(PAIR_MARGIN, count) * choice.size) if columns % 2 == 0 else None
    models = paired or choice.fit(matrix, low, high)
    segment = -(-len(matrix) // max(1, round(len(matrix) * (1 + models.is_pair) / wanted)))
    segment = min(segment, LONGEST_SEGMENT)
    return _joined(count, columns, segment, models, _encode(matrix, models, segment))


def _encode(matrix: Tensor, models: Models, segment: int) -> EncodedLanes:
    if not matrix.is_cuda:
        return encode_reference(matrix, models, segment)
    from factorpack.runtime.lane_encode_cuda import encode  # only where there is a GPU

    return encode(matrix, models, segment)


def _by_size(values: Mapping[int, float], codes: int) -> float:
    """The value for so many codes."""
    return values[max(size for size in values if size <= codes)]


def _in_rows(codes: Tensor, columns: int) -> Tensor:
    """As a matrix, the last row padded with zeros."""
    missing = -len(codes) % columns
    return (pad(codes, (0, missing)) if missing else codes).view(-1, columns)


def _entropy(codes: Tensor, low: int, high: int) -> float:
    """Bits per code, with one model, about."""
    some = codes
    if len(codes) > _RUNS * _RUN:  # runs: every n-th code could be of one kind
        starts = torch.from_numpy(np.linspace(0, len(codes) - _RUN, _RUNS).astype(np.int64))
        some = codes[(starts[:, None] + torch.arange(_RUN)).to(codes.device)].view(-1)
    counts = torch.bincount(some.int() - low, minlength=high - low + 1).cpu().numpy()
    share = counts[counts > 0] / len(some)
    return float(-(share * np.log2(share)).sum())


def _joined(
    count: int, columns: int, segment: int, models: Models, encoded: EncodedLanes
) -> tuple[Tensor, LaneLayout]:
    """All arrays in one, each beginning at a multiple of 16 bytes."""
    nothing = np.empty(0, np.uint8)
    classes = np.concatenate([models.rows, models.columns]) if len(models.frequencies) > 1 else nothing
    sections = [
        encoded.words,
        encoded.states,
        encoded.groups,
        torch.from_numpy(models.table()),
        encoded.patches,
        torch.from_numpy(_by_halves(classes)),
    ]
    starts = np.cumsum([0, *(-(-each.nbytes // 16) * 16 for each in sections)]).tolist()
    packed = torch.zeros(starts[-1], dtype=torch.uint8, device=encoded.words.device)
    for start, each in zip(starts, sections, strict=False):
        if each.nbytes:
            packed[start : start + each.nbytes] = each.view(torch.uint8)
    layout = LaneLayout(
        count,
        columns,
        segment,
        models.table_bits,
        models.raw_bits,
        len(models.frequencies),
        models.low,
        len(encoded.patches) > 0,
        models.is_pair,
        models.is_indirect,
        *starts[1:6],
    )
    return packed, layout


def _by_halves(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two numbers of four bits in each byte, the first in the lower half."""
    even = np.append(numbers, np.zeros(len(numbers) % 2, np.uint8)).reshape(-1, 2)
    return (even[:, 0] | even[:, 1] << 4).astype(np.uint8)
