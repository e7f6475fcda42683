from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from factorpack.format.blocks import places, to_blocks, to_matrix
from factorpack.format.classes import Classing
from factorpack.format.symbols import code_order, codes_of, count_values, to_symbols

SHAPES = hnp.array_shapes(min_dims=2, max_dims=2, max_side=20)


@given(st.sampled_from([np.int8, np.int16, np.int32]), st.data())
def test_symbols_are_positions_in_the_order_of_codes(held: type[np.signedinteger], data: st.DataObject):
    limits = np.iinfo(np.int16 if held is np.int32 else held)
    ends = st.sampled_from([limits.min, -129, -128, -1, 0, 1, 127, 128, limits.max])
    drawn = st.integers(limits.min, limits.max) | ends.filter(lambda end: limits.min <= end <= limits.max)
    codes = data.draw(hnp.arrays(held, SHAPES, elements=drawn))
    low, order, symbols = to_symbols(codes)
    assert low == codes.min()
    assert len(order) == int(codes.max()) - low + 1
    assert symbols.dtype == (np.uint8 if len(order) <= 256 else np.uint16)
    assert (codes_of(symbols, order).reshape(codes.shape) == codes).all()


@pytest.mark.parametrize("held", [np.int8, np.int16])
def test_every_code_of_a_type_has_its_symbol(held: type[np.signedinteger]):
    limits = np.iinfo(held)
    codes = np.arange(limits.min, limits.max + 1).astype(held)[None]
    _, order, symbols = to_symbols(codes)
    assert (order[symbols] == codes).all()
    assert sorted(symbols[0].tolist()) == list(range(len(order)))


@given(hnp.arrays(np.uint16, SHAPES, elements=st.integers(0, 9)), st.data())
def test_blocks_hold_their_places(symbols: np.ndarray, data: st.DataObject):
    rows, columns = (
        data.draw(hnp.arrays(np.int64, length, elements=st.integers(0, 3))) for length in symbols.shape
    )
    classing = Classing(rows, columns)
    ordered = symbols[np.argsort(rows, kind="stable")][:, np.argsort(columns, kind="stable")]
    found = to_blocks(symbols, classing)
    assert len(found) == classing.models
    for block, own in zip(found, places(classing, classing.models), strict=True):
        assert block.tolist() == [symbol for place in own for symbol in ordered[place].ravel().tolist()]
    assert (to_matrix(ordered.astype(np.int16), classing) == symbols).all()


@given(
    hnp.arrays(
        st.sampled_from([np.uint8, np.uint16, np.int32, np.int64]), SHAPES, elements=st.integers(0, 99)
    )
)
def test_values_are_counted(values: np.ndarray):
    assert count_values(values, 100).tolist() == np.bincount(values.ravel(), minlength=100).tolist()


@pytest.mark.parametrize("low", [-128, -127, -3, -1, 0])
@pytest.mark.parametrize("high", [0, 1, 2, 4, 126, 127])
def test_narrow_codes_are_those_that_a_table_gives(low: int, high: int):
    order = code_order(low, high - low + 1)
    symbols = np.tile(np.arange(len(order)).astype(np.uint8), 2000)
    assert np.array_equal(codes_of(symbols.copy(), order), order.take(symbols))
