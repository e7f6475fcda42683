"""The state machine of dependent quantization: every path has one reading, and what is none is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factorpack.errors import FormatError
from factorpack.quantize.trellis import (
    LONGEST,
    MEMORY,
    indices_of,
    levels_of,
    machine,
    quiet_columns,
    segment_rows,
)

each_machine = pytest.mark.parametrize("states", MEMORY)


def path(indices: np.ndarray, quiet: np.ndarray, states: int, segment: int) -> np.ndarray:
    """Levels of indices, number by number, as the format's document says."""
    of = machine(states)
    levels = np.zeros(indices.shape, np.int32)
    for column in range(indices.shape[1]):
        for row, index in enumerate(indices[:, column].tolist()):
            if row % segment == 0:
                state = 0
            q = 0 if quiet[column] else int(of.quantizer[state])
            levels[row, column] = 2 * index - q * ((index > 0) - (index < 0))
            state = int(of.after[state, index % 2])
    return levels


def test_four_states_are_those_of_video_coding() -> None:
    assert machine(4).after[:4].tolist() == [[0, 2], [2, 0], [1, 3], [3, 1]]
    assert machine(4).quantizer.tolist() == [0, 0, 1, 1, 0]


@each_machine
def test_the_two_ways_out_of_a_state_and_the_two_into_it(states: int) -> None:
    """Ungerboeck's rules: both ways into a state come by different subsets of one quantizer's levels."""
    of = machine(states)
    for state in range(states):
        assert len(set(of.after[state].tolist())) == 2
        sources = [s for s in range(states) if state in of.after[s]]
        assert len(sources) == 2
        subsets = {(int(of.quantizer[s]), of.after[s].tolist().index(state)) for s in sources}
        assert len(subsets) == 2
    assert of.after[states].tolist() == [states, states]


@given(st.integers(0, 10_000), st.sampled_from(sorted(MEMORY)), st.integers(1, 9), st.integers(1, 30))
def test_indices_come_back_from_levels(seed: int, states: int, segment: int, rows: int) -> None:
    generator = np.random.default_rng(seed)
    indices = generator.integers(-3, 4, (rows, 5))
    levels = path(indices, generator.random(5) < 0.3, states, segment)
    found, quantizer = indices_of(levels, states, segment)
    assert (levels_of(found, quantizer) == levels).all()
    loud = ~quiet_columns(levels)
    assert (found[:, loud] == indices[:, loud]).all()


@each_machine
def test_levels_that_are_no_path(states: int) -> None:
    with pytest.raises(FormatError, match=f"not a path through a trellis of {states} states"):
        indices_of(np.array([[1], [0]]), states, 16)  # every segment begins with an even level
    with pytest.raises(FormatError, match="not a path"):
        indices_of(np.array([[0], [0], [0], [1]]), states, 16)


def test_the_widest_levels_of_a_narrow_type() -> None:
    levels = np.array([[2], [125], [-127]], np.int8)
    assert (levels_of(*indices_of(levels, 4, 16)) == levels).all()


@given(st.integers(1, 5000))
def test_segments_are_equal_and_short(rows: int) -> None:
    segment = segment_rows(rows)
    assert 1 <= segment <= min(rows, LONGEST)
    assert -(-rows // segment) == -(-rows // LONGEST)
