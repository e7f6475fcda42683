from __future__ import annotations

from functools import partial

import constriction
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from factorpack.errors import FormatError
from factorpack.format import chunks, entropy
from factorpack.format import frequency_tables as tables
from factorpack.format.blocks import places
from factorpack.format.classes import Classing, class_counts
from factorpack.format.stream_header import Header, read_header, write_header
from factorpack.format.symbols import code_order, from_view, to_view
from tests.format import reference

SHAPES = hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=24)
HELD = {np.int8: 127, np.int16: 32767}


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    """Codes of any range and shape: even, skewed, all the same, rows and columns that differ in width."""
    shape = draw(SHAPES)
    held = draw(st.sampled_from(list(HELD)))
    low = draw(st.integers(-HELD[held] - 1, HELD[held]))
    high = draw(st.integers(low, min(low + draw(st.sampled_from([3, 300, 1 << 16])), HELD[held])))
    codes = draw(hnp.arrays(held, shape, elements=st.integers(low, high)))
    quiet = draw(hnp.arrays(np.bool_, (shape[0], 1))) | draw(hnp.arrays(np.bool_, (1, shape[1])))
    return np.where(quiet, held(low), codes).astype(held)


def scaled(rows: int = 64, columns: int = 200, seed: int = 5) -> np.ndarray:
    """Rows and columns of scales that differ, for which one model is not enough."""
    generator = np.random.default_rng(seed)
    width = 2.0 ** generator.uniform(-2, 2, (rows, 1)) * 2.0 ** generator.uniform(-2, 2, (1, columns))
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
    "the whole wide range": np.arange(-32768, 32768).astype(np.int16).reshape(64, 1024),
    "the two ends": np.where(np.eye(40) > 0, 127, -128).astype(np.int8),
    "the two wide ends": np.where(np.eye(40) > 0, 32767, -32768).astype(np.int16),
    "one rare symbol": np.where(np.arange(40_000).reshape(4, -1) == 17, 1, 0).astype(np.int8),
    "no zero among them": np.arange(1000).reshape(20, 50).astype(np.int16) % 7 + 300,
    "many classes": scaled(),
    "many classes, few rows": scaled(4, 3000),
    "an outlier": np.where(np.arange(12_800).reshape(64, 200) == 7, 9999, scaled()).astype(np.int16),
}


@pytest.mark.parametrize("codes", EDGES.values(), ids=EDGES)
def test_edges_come_back(codes: np.ndarray):
    found = entropy.decode(entropy.encode(codes), *codes.shape)
    assert (found == codes).all()


@pytest.mark.parametrize("codes", [each for each in EDGES.values() if each.size < 20_000])
def test_the_reference_decoder_agrees_on_edges(codes: np.ndarray):
    assert reference.ans_decode(entropy.encode(codes), *codes.shape) == codes.tolist()


@given(matrices(), st.data())
def test_decode_inverts_encode(codes: np.ndarray, data: st.DataObject):
    columns = codes.shape[1]
    split = data.draw(st.sampled_from([0, *(s for s in range(1, columns + 1) if columns % s == 0)]))
    stream = entropy.encode(codes, split)
    assert (entropy.decode(stream, *codes.shape) == codes).all()
    assert reference.ans_decode(stream, *codes.shape) == codes.tolist()
    assert entropy.encode(codes.copy(), split) == stream
    assert abs(entropy.estimated_bytes(codes, split) - len(stream)) <= 16


@given(matrices(), st.data())
def test_decode_inverts_encode_where_every_block_is_a_chunk(codes: np.ndarray, data: st.DataObject):
    columns = codes.shape[1]
    split = data.draw(st.sampled_from([0, *(s for s in range(1, columns + 1) if columns % s == 0)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "FEWEST", 1)
        patch.setattr(entropy, "_CHUNK_MARGIN", float("inf"))
        stream = entropy.encode(codes, split)
    has_chunks = bool(read_header(stream)[0].chunks)
    assert has_chunks == (len(np.unique(codes)) > 1)
    assert (entropy.decode(stream, *codes.shape) == codes).all()
    assert reference.ans_decode(stream, *codes.shape) == codes.tolist()


@given(hnp.array_shapes(min_dims=3, max_dims=3, max_side=9))
def test_the_split_view_and_back(shape: tuple[int, int, int]):
    """(k, n) is read as (k, s, n/s), permuted to (s, n/s, k)."""
    matrix = np.arange(np.prod(shape)).astype(np.uint16).reshape(shape[0], -1)
    view = to_view(matrix, shape[1])
    assert (view == matrix.reshape(shape).transpose(1, 2, 0).reshape(shape[1], -1)).all()
    assert (from_view(view, shape[1], shape[0]) == matrix).all()


@given(st.integers(-32768, 32767), st.integers(1, 65536))
def test_symbols_are_codes_by_size(low: int, size: int):
    size = min(size, 32768 - low)
    assert code_order(low, size).tolist() == sorted(range(low, low + size), key=lambda c: (abs(c), c))


def model(frequencies: np.ndarray, lazy: bool) -> object:
    return constriction.stream.model.Categorical(frequencies.astype(np.float64), perfect=False, lazy=lazy)


@given(matrices())
def test_both_kinds_of_model_write_and_read_the_same_bytes(codes: np.ndarray):
    """constriction's lazy and eager models differ in speed alone."""
    written = []
    for lazy in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, "model", partial(model, lazy=lazy))
            written.append(entropy.encode(codes))
            assert (entropy.decode(written[0], *codes.shape) == codes).all()
    assert written[0] == written[1] == entropy.encode(codes)


def plain_classes(data: bytes) -> tuple[int, int]:
    return data[3] + 1, data[4] + 1


def test_rows_and_columns_of_many_scales_get_classes():
    codes = scaled(128, 800)
    data = entropy.encode(codes)
    rows, columns = plain_classes(data)
    assert rows > 3
    assert columns > 3
    quiet = np.sort(codes.ravel()).reshape(codes.shape)  # the same codes, rows alone differ
    assert plain_classes(entropy.encode(quiet))[1] == 1
    even = np.random.default_rng(0).permutation(codes.ravel()).reshape(codes.shape)
    assert plain_classes(entropy.encode(even)) == (1, 1)
    assert len(data) < 0.9 * len(entropy.encode(even))


def test_a_split_is_used_where_it_pays():
    """A latent of (9, 32 * 40) whose scale goes with the output channel."""
    matrix = scaled(32, 40 * 9).reshape(-1, 9).T
    assert len(entropy.encode(matrix, 32)) < 0.95 * len(entropy.encode(matrix))
    assert entropy.encode(matrix, 32)[0] & 64
    random = np.random.default_rng(0).permutation(matrix.ravel()).reshape(matrix.shape)
    assert not entropy.encode(random, 32)[0] & 64


def large(deviation: float, size: int = 200_000) -> np.ndarray:
    drawn = np.random.default_rng(1).normal(size=(8, size // 8)) * deviation
    return np.rint(drawn).clip(-128, 127).astype(np.int8)


def test_large_blocks_are_chunks_where_they_are_hardly_longer(monkeypatch: pytest.MonkeyPatch):
    codes = large(1.5)
    with_chunks = entropy.encode(codes)
    assert read_header(with_chunks)[0].chunks
    monkeypatch.setattr(entropy, "_CHUNK_MARGIN", 0.0)
    without = entropy.encode(codes)
    assert not read_header(without)[0].chunks
    assert len(without) < len(with_chunks) <= 1.005 * len(without)
    assert (entropy.decode(with_chunks, *codes.shape) == codes).all()
    assert (entropy.decode(without, *codes.shape) == codes).all()


@pytest.mark.parametrize("codes", [large(1.5, 1600), large(0.15)], ids=["a small block", "nearly all zeros"])
def test_what_a_chunk_would_make_longer_stays_in_the_message(codes: np.ndarray):
    assert not read_header(entropy.encode(codes))[0].chunks


def test_a_block_beyond_one_chunk_is_several(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "_MOST", 30_000)
    codes = large(1.5)
    stream = entropy.encode(codes)
    assert (entropy.decode(stream, *codes.shape) == codes).all()
    monkeypatch.setattr(chunks, "_MOST", 40_000)
    with pytest.raises(FormatError, match="chunk"):
        entropy.decode(stream, *codes.shape)


def test_a_block_of_more_than_2_24_codes_comes_back():
    codes = np.resize(large(1.5), (8, (1 << 21) + 5))
    stream = entropy.encode(codes)
    assert read_header(stream)[0].chunks
    assert (entropy.decode(stream, *codes.shape) == codes).all()


def test_wide_codes_come_back_from_chunks():
    codes = np.rint(np.random.default_rng(1).normal(size=(8, 40_000)) * 300).astype(np.int16)
    stream = entropy.encode(codes)
    assert read_header(stream)[0].chunks
    assert (entropy.decode(stream, *codes.shape) == codes).all()


def assert_estimated(codes: np.ndarray, split: int = 0) -> None:
    length = len(entropy.encode(codes, split))
    above = 0.005 if int(codes.max()) - int(codes.min()) < 256 else 0.07  # chunks save tables of hundreds
    assert -16 - 0.005 * length <= entropy.estimated_bytes(codes, split) - length <= 16 + above * length


@pytest.mark.parametrize("codes", EDGES.values(), ids=EDGES)
def test_the_estimate_is_close(codes: np.ndarray):
    for split in (0, codes.shape[1]):
        assert_estimated(codes, split)


@pytest.mark.parametrize("deviation", [0.2, 0.5, 1.5, 10])
def test_the_estimate_counts_chunks(deviation: float):
    assert_estimated(np.concatenate([large(deviation), large(deviation / 4)]))


def test_the_message_is_as_short_as_its_models_allow(monkeypatch: pytest.MonkeyPatch):
    """Within two words of the empirical entropy under one model, rounding of frequencies included."""
    monkeypatch.setattr(entropy, "_CHUNK_MARGIN", 0.0)
    codes = np.random.default_rng(0).normal(size=(40, 1000)).astype(np.int8)
    share = np.unique(codes, return_counts=True)[1] / codes.size
    ideal = -codes.size * (share * np.log2(share)).sum()
    assert ideal <= 8 * len(entropy.encode(codes)) <= 1.001 * ideal + 8 * (5 + 10 + 8)


@given(st.integers(1, 32), st.integers(1, 32), st.data())
def test_any_number_of_classes_can_be_read(rows: int, columns: int, data: st.DataObject):
    """The writer chooses; a reader takes what the header says."""
    header = Header(8, -1, 2, rows, columns, 0)
    even = np.full((1, 2), 128)
    spread = [tables.normalized(np.ones((1, each), np.int64), 8) for each in (rows, columns)]
    classing = Classing(
        data.draw(hnp.arrays(np.int64, 5, elements=st.integers(0, rows - 1))),
        data.draw(hnp.arrays(np.int64, 7, elements=st.integers(0, columns - 1))),
    )
    models = np.repeat(even, rows + columns - 1, 0)
    symbols = data.draw(hnp.arrays(np.uint8, (5, 7), elements=st.integers(0, 1)))
    ordered = symbols[np.argsort(classing.rows, kind="stable")][
        :, np.argsort(classing.columns, kind="stable")
    ]
    coder = constriction.stream.stack.AnsCoder()
    for own in reversed(places(classing, len(models))):
        pieces = [ordered[place].ravel() for place in own]
        entropy.push(coder, np.concatenate([*pieces, ordered[:0].ravel()]), even[0])
    entropy.push(coder, classing.columns, spread[1][0])
    entropy.push(coder, classing.rows, spread[0][0])
    stream = write_header(header) + tables.write_tables(spread, models, 8)
    stream += coder.get_compressed().astype("<u4").tobytes()
    expected = [[(0, -1)[symbol] for symbol in row] for row in symbols.tolist()]
    assert entropy.decode(stream, 5, 7).tolist() == expected
    assert reference.ans_decode(stream, 5, 7) == expected


@given(hnp.arrays(np.uint8, SHAPES, elements=st.integers(0, 9)), st.data())
def test_counts_by_class(symbols: np.ndarray, data: st.DataObject):
    rows = data.draw(hnp.arrays(np.int64, len(symbols), elements=st.integers(0, 3)))
    columns = data.draw(hnp.arrays(np.int64, symbols.shape[1], elements=st.integers(0, 3)))
    found = class_counts(symbols, Classing(rows, columns), 10)
    expected = np.zeros_like(found)
    for (i, j), symbol in np.ndenumerate(symbols):
        expected[rows[i] + columns[j], symbol] += 1
    assert (found == expected).all()
