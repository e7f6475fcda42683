from __future__ import annotations

from functools import partial

import constriction
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from factorpack.format import entropy
from factorpack.format.bitpack import pack
from tests import reference

SHAPES = hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=24)


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    """Codes of any range and shape: even, skewed, all the same, rows that differ in width."""
    shape = draw(SHAPES)
    low = draw(st.integers(-128, 127))
    high = draw(st.integers(low, 127))
    codes = draw(hnp.arrays(np.int8, shape, elements=st.integers(low, high)))
    quiet = draw(hnp.arrays(np.bool_, (shape[0], 1)))
    return np.where(quiet, np.int8(low), codes).astype(np.int8)


def two_widths(rows: int = 64, columns: int = 200) -> np.ndarray:
    """Rows narrow and wide by turns, for which one model is not enough."""
    generator = np.random.default_rng(5)
    width = np.where(np.arange(rows) % 2, 0.4, 20.0)[:, None]
    return np.clip(np.rint(generator.normal(size=(rows, columns)) * width), -128, 127).astype(np.int8)


EDGES = {
    "one code": np.array([[5]], np.int8),
    "one lowest code": np.array([[-128]], np.int8),
    "one highest code": np.array([[127]], np.int8),
    "one row": np.arange(-50, 50, dtype=np.int8).reshape(1, 100),
    "one column": np.arange(-50, 50, dtype=np.int8).reshape(100, 1),
    "one symbol": np.full((30, 40), -3, np.int8),
    "one symbol, the highest": np.full((30, 40), 127, np.int8),
    "the whole range": np.arange(-128, 128).astype(np.int8).reshape(16, 16),
    "the two ends": np.where(np.eye(40) > 0, 127, -128).astype(np.int8),
    "one rare symbol": np.where(np.arange(40_000).reshape(4, -1) == 17, 1, 0).astype(np.int8),
    "many models": two_widths(),
}


@pytest.mark.parametrize("codes", EDGES.values(), ids=EDGES)
def test_edges_come_back(codes: np.ndarray):
    assert (entropy.decode(entropy.encode(codes), *codes.shape) == codes).all()


@pytest.mark.parametrize("codes", EDGES.values(), ids=EDGES)
def test_the_reference_decoder_agrees_on_edges(codes: np.ndarray):
    assert reference.ans_decode(entropy.encode(codes), *codes.shape) == codes.tolist()


@given(matrices())
def test_decode_inverts_encode(codes: np.ndarray):
    data = entropy.encode(codes)
    assert (entropy.decode(data, *codes.shape) == codes).all()
    assert entropy.encode(codes.copy()) == data


@given(matrices())
def test_the_reference_decoder_agrees(codes: np.ndarray):
    assert reference.ans_decode(entropy.encode(codes), *codes.shape) == codes.tolist()


def model(frequencies: np.ndarray, lazy: bool) -> object:
    padded = frequencies if len(frequencies) > 1 else np.array([entropy.TOTAL, 0])
    return constriction.stream.model.Categorical(padded.astype(np.float64), perfect=False, lazy=lazy)


@given(matrices())
def test_both_kinds_of_model_write_and_read_the_same_bytes(codes: np.ndarray):
    """constriction's lazy and eager models differ in speed alone."""
    written = []
    for lazy in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(entropy, "_model", partial(model, lazy=lazy))
            written.append(entropy.encode(codes))
            assert (entropy.decode(written[0], *codes.shape) == codes).all()
    assert written[0] == written[1] == entropy.encode(codes)


@given(hnp.arrays(np.int64, st.integers(1, 256), elements=st.integers(0, 1 << 40)))
def test_frequencies_sum_to_the_total(counts: np.ndarray):
    frequencies = entropy._normalize(counts)
    assert int(frequencies.sum()) == entropy.TOTAL
    assert (frequencies >= 0).all()
    assert (frequencies[counts > 0] >= 1).all()


def test_rows_of_two_widths_get_models_of_their_own():
    codes = two_widths()
    data = entropy.encode(codes)
    assert data[2] + 1 >= 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy, "MAX_GROUPS", 1)
        assert len(data) < len(entropy.encode(codes))


def test_the_message_is_as_short_as_its_models_allow():
    """Within two words of the cross-entropy: ANS loses nothing else."""
    codes = two_widths()
    histograms = entropy._histograms(codes.astype(np.int32) + 128, 256)
    grouping = entropy._group(histograms, 1)
    data = entropy.encode(np.clip(codes, -128, 127))
    assert (
        8 * len(data) <= entropy._message_bits(histograms, grouping) + entropy._side_bits(histograms, 1) + 64
    )


@pytest.mark.parametrize("groups", range(1, entropy.MAX_GROUPS + 1))
def test_any_number_of_models_can_be_read(groups: int):
    """The writer doubles; a reader takes what the header says. All weight lies on the first of two codes."""
    rows = groups
    width = entropy._index_width(groups)
    index = pack(np.arange(rows).astype(np.uint16), width) if width else b""
    data = bytes([0, 1, groups - 1]) + index + pack(np.zeros(groups, np.uint16), 13)
    assert (entropy.decode(data, rows, 3) == 0).all()
    assert reference.ans_decode(data, rows, 3) == [[0, 0, 0]] * rows
