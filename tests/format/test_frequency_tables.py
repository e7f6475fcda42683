from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from factorpack.errors import FormatError
from factorpack.format import frequency_tables as tables
from tests.format import reference

TOTALS = st.integers(tables.MIN_TOTAL_BITS, tables.MAX_TOTAL_BITS)


@st.composite
def counted(draw: st.DrawFn, rows: int | None = None) -> np.ndarray:
    """Counts of few to many symbols, most of them zero or small."""
    shape = (draw(st.integers(1, 5)) if rows is None else rows, draw(st.integers(1, 250)))
    likely = draw(st.sampled_from([0, 1, 1000]))
    elements = st.one_of(st.just(likely), st.integers(0, 1 << 40))
    return draw(hnp.arrays(np.int64, shape, elements=elements, fill=st.just(likely)))


@given(counted(), TOTALS)
def test_frequencies_sum_to_the_total(counts: np.ndarray, total_bits: int):
    frequencies = tables.normalized(counts, total_bits)
    assert (frequencies.sum(1) == 1 << total_bits).all()
    assert (frequencies >= 0).all()
    assert (frequencies[counts > 0] >= 1).all()


def test_more_symbols_than_the_total_are_refused():
    assert (tables.normalized(np.ones((1, 256), np.int64), 8) == 1).all()
    with pytest.raises(FormatError, match="257 symbols do not fit a table of 256"):
        tables.normalized(np.ones((1, 257), np.int64), 8)


@given(counted(1), counted(), TOTALS, st.binary(max_size=9))
def test_read_inverts_write(classes: np.ndarray, counts: np.ndarray, total_bits: int, more: bytes):
    classes[0, -1] += 1  # a table of classes is as long as the header says
    first, models = tables.normalized(classes, total_bits), tables.normalized(counts, total_bits)
    data = tables.write_tables([first], models, total_bits)
    sizes = tables.used(models)
    found, taken = tables.read_tables(data + more, [first.size], *models.shape, total_bits)
    assert taken == len(data)
    assert found[0].tolist() == first[0].tolist()
    assert [each.tolist() for each in found[1:]] == [
        row[:size].tolist() for row, size in zip(models, sizes, strict=True)
    ]
    bits = tables.table_bits(first, total_bits).sum() + tables.table_bits(models, total_bits).sum()
    head = -(-len(models) * tables.size_bits(models.shape[1]) // 8)
    assert len(data) == head + -(-bits // 8)
    starts, used = reference.read_tables(data[head:] + more, [first.size, *sizes.tolist()], total_bits)
    assert used == len(data) - head
    assert starts[0] == reference.model_starts(first[0].tolist(), total_bits)


@given(counted(), TOTALS)
def test_message_bits_are_those_of_the_shares(counts: np.ndarray, total_bits: int):
    counts = np.minimum(counts, 1 << 20)
    frequencies = tables.normalized(counts, total_bits)
    expected = 0.0
    for row, own, size in zip(counts, frequencies, tables.used(frequencies), strict=True):
        shares = np.diff(reference.model_starts(own[:size].tolist(), total_bits))
        expected += float((row[:size] * (24 - np.log2(shares))).sum())
    assert tables.message_bits(counts, frequencies, total_bits).sum() == pytest.approx(expected)


def test_a_table_takes_the_documented_bits():
    """f = 252, 3, 1 with t = 8: lengths 2 and 1 after 6, so v = 7 and 1, then the lower bit of 3."""
    data = tables.write_tables([], np.array([[252, 3, 1, 0]]), 8)
    assert data == bytes([2, 0b1000_0000, 0b0000_0110])
    found, taken = tables.read_tables(data, [], 1, 4, 8)
    assert ([each.tolist() for each in found], taken) == ([[252, 3, 1]], 3)


@given(st.binary(max_size=60), st.integers(1, 9), st.integers(1, 300), TOTALS)
def test_any_bytes_are_tables_or_refused(data: bytes, models: int, symbols: int, total_bits: int):
    try:
        found, taken = tables.read_tables(data, [3], models, symbols, total_bits)
    except FormatError:
        return
    assert taken <= len(data)
    assert all(int(each.sum()) == 1 << total_bits and int(each.min()) >= 0 for each in found)
    assert len(found) == models + 1
    assert all(1 <= len(each) <= symbols for each in found[1:])
