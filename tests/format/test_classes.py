from __future__ import annotations

import numpy as np
import pytest

from factorpack.format import entropy
from factorpack.format.classes import _SAMPLE, _sample, fit_both, sample


def only_outside_the_sample() -> np.ndarray:
    """Symbols whose large ones lie in columns that fitting does not look at first."""
    count = 3 * _SAMPLE
    symbols = np.zeros((8, count), np.uint8)
    unseen = np.setdiff1d(np.arange(count), _sample(count))
    symbols[:, unseen[: count // 20]] = 20
    return symbols


@pytest.mark.parametrize("step", [0.25, 0.5])
def test_a_class_of_columns_that_the_sample_misses(step: float) -> None:
    symbols = only_outside_the_sample()
    found = fit_both(sample(symbols, 21), step)
    assert found.rows.shape == (8,)
    assert found.columns.shape == (symbols.shape[1],)


def test_codes_of_such_columns_come_back() -> None:
    codes = only_outside_the_sample().astype(np.int8)
    assert np.array_equal(entropy.decode(entropy.encode(codes), *codes.shape), codes)
