"""Streams of codes that are a path through a trellis: what is written is read, by two readers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factorpack.errors import FormatError
from factorpack.format import trellis_stream as trellis
from factorpack.format.container import Reader
from factorpack.quantize.trellis import MEMORY, levels_of, machine, segment_rows
from factorpack.record import Encoded
from tests.format import reference
from tests.helpers import assert_same_encoded, write_packed


def path(indices: np.ndarray, quiet: np.ndarray, states: int) -> np.ndarray:
    """Levels of (rows, columns) indices."""
    of, segment = machine(states), segment_rows(len(indices))
    quantizer = np.zeros(indices.shape, np.int64)
    state = of.start(quiet, -(-len(indices) // segment))
    for row in range(segment):
        here = state[: len(indices[row::segment])]
        quantizer[row::segment] = of.quantizer[here]
        here[:] = of.after[here, indices[row::segment] & 1]
    return levels_of(indices, quantizer)


def folded(view: np.ndarray, rows: int) -> np.ndarray:
    """The matrix of `rows` rows whose view, channels first, this is."""
    return np.ascontiguousarray(view.reshape(-1, rows).T)


@given(
    seed=st.integers(0, 1 << 20),
    states=st.sampled_from(sorted(MEMORY)),
    rows=st.integers(1, 40),
    columns=st.integers(1, 12),
    scale=st.sampled_from([0.1, 1.0, 30.0, 4000.0]),
    tile=st.sampled_from([0, 1, 3]),
)
def test_decode_inverts_encode(
    seed: int, states: int, rows: int, columns: int, scale: float, tile: int
) -> None:
    generator = np.random.default_rng(seed)
    columns *= max(tile, 1)
    loud = scale * generator.exponential(size=(rows, 1)) * generator.exponential(size=(1, columns))
    indices = np.rint(loud * generator.normal(size=(rows, columns))).clip(-8000, 8000).astype(np.int64)
    levels = path(indices, generator.random(columns) < 0.4, states).astype(np.int16)
    codes, split = (folded(levels, tile), rows) if tile else (levels, 0)
    stream = trellis.encode(codes, states, split)
    assert (trellis.decode(stream, *codes.shape, states) == codes).all()
    assert reference.path_decode(stream, *codes.shape, states) == codes.tolist()
    assert trellis.encode(codes.copy(), states, split) == stream
    assert abs(trellis.estimated_bytes(codes, states, split) - len(stream)) <= 16


@pytest.mark.parametrize("states", MEMORY)
@pytest.mark.parametrize("rows", [127, 128, 129, 300])
def test_segments_that_are_and_are_not_full(states: int, rows: int) -> None:
    generator = np.random.default_rng(rows)
    levels = path(generator.integers(-4, 5, (rows, 9)), np.arange(9) % 4 == 0, states)
    stream = trellis.encode(levels, states)
    assert (trellis.decode(stream, rows, 9, states) == levels).all()
    assert reference.path_decode(stream, rows, 9, states) == levels.tolist()


def gaussian_path(rows: int, columns: int, step: float, quiet: bool) -> np.ndarray:
    generator = np.random.default_rng(0)
    loud = generator.choice([0.5, 1.0, 4.0], columns)
    indices = np.rint(loud / step * generator.normal(size=(rows, columns))).astype(np.int64)
    return path(indices, (np.arange(columns) % 5 == 0) & quiet, 8).astype(np.int16)


@pytest.mark.parametrize(
    ("step", "quiet", "kind"), [(0.2, False, "independent"), (0.2, True, "chunked"), (2.0, False, "chunked")]
)
def test_large_streams_have_chunks_and_no_models_by_quantizer_where_these_do_not_pay(
    step: float, quiet: bool, kind: str
) -> None:
    levels = gaussian_path(150, 200, step, quiet)
    stream = trellis.encode(levels, 8)
    assert (stream[0] == 0) == (kind == "independent")
    assert (stream[0 if stream[0] else 7] >= 128) == (kind == "chunked" or step < 1)
    assert (trellis.decode(stream, 150, 200, 8) == levels).all()
    assert reference.path_decode(stream, 150, 200, 8) == levels.tolist()
    assert abs(trellis.estimated_bytes(levels, 8) / len(stream) - 1) < 0.01


@pytest.mark.parametrize("value", [0, 2, -128])
def test_one_level_everywhere(value: int) -> None:
    codes = np.full((20, 30), value, np.int8)
    assert (trellis.decode(trellis.encode(codes, 4), 20, 30, 4) == codes).all()


def encoded_of(levels: np.ndarray, states: int) -> Encoded:
    parts = {
        "codes": torch.from_numpy(levels.astype(np.int8)),
        "scale": torch.tensor([[0.5]], dtype=torch.float16),
    }
    return Encoded("scalar", levels.shape, torch.float32, parts, {"codes": 6}, trellis=states)


@pytest.mark.parametrize("states", MEMORY)
def test_a_file_keeps_the_path(states: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    encoded = encoded_of(path(generator.integers(-4, 5, (50, 20)), np.zeros(20, np.bool_), states), states)
    write_packed(tmp_path / "file", {"w": encoded})
    reader = Reader(tmp_path / "file")
    assert_same_encoded(reader["w"], encoded)
    assert reader.rows["w"].parts["codes"].codec == "trellis"
    document, tensors = reference.read_packed((tmp_path / "file").read_bytes())
    assert document["tensors"][0]["trellis"] == states
    assert tensors["w"]["codes"] == encoded.parts["codes"].tolist()


def test_codes_that_are_no_path_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not a path through a trellis of 8 states"):
        write_packed(tmp_path / "file", {"w": encoded_of(np.ones((4, 4), np.int64), 8)})
    assert not list(tmp_path.iterdir())
