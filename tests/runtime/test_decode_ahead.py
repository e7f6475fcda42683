from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from factorpack.record import Encoded
from factorpack.runtime.decode_ahead import DecodeAhead


class Weight:
    """Something to decode, which notes where that is done."""

    def __init__(self, name: str, elements: int = 10) -> None:
        self.name, self._elements = name, elements
        self.where: list[str] = []

    def elements(self) -> int:
        return self._elements

    def decoder(self) -> Callable[[], Encoded]:
        name, where = self.name, self.where

        def decode() -> Any:
            where.append(threading.current_thread().name)
            return name

        return decode


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def waiting(ahead: DecodeAhead) -> list[str]:
    return sorted(each.name for each in ahead._waiting)  # type: ignore[attr-defined]


def use(ahead: DecodeAhead, *weights: Weight) -> None:
    for weight in weights:
        assert ahead.take(weight) == weight.name  # type: ignore[comparison-overlap]


def test_the_second_time_what_follows_is_decoded_by_other_threads() -> None:
    ahead = DecodeAhead()
    a, b, c = weights = [Weight(name) for name in "abc"]
    use(ahead, *weights)
    assert waiting(ahead) == []
    use(ahead, a)
    assert waiting(ahead) == ["b", "c"]
    use(ahead, b)
    assert waiting(ahead) == ["a", "c"]
    use(ahead, c)
    assert waiting(ahead) == ["a", "b"]  # for the next round
    assert all(where.startswith("factorpack-decode") for each in (b, c) for where in each.where[1:])
    assert {each.where[0] for each in weights} == {threading.current_thread().name}


def test_another_order_drops_what_was_expected() -> None:
    ahead = DecodeAhead()
    a, b, c, d = (Weight(name) for name in "abcd")
    use(ahead, a, b, c, d, a)
    assert waiting(ahead) == ["b", "c"]
    use(ahead, d)
    assert waiting(ahead) == ["a"]  # and after it d itself


def test_codes_that_wait_take_no_more_than_the_largest_weight() -> None:
    torch.set_num_threads(8)
    ahead = DecodeAhead()
    weights = [Weight(str(number)) for number in range(8)]
    use(ahead, *weights, weights[0])
    assert len(waiting(ahead)) == 4
    ahead = DecodeAhead()
    weights[0]._elements = 15
    use(ahead, *weights, weights[0])
    assert len(waiting(ahead)) == 6


def test_one_thread_decodes_nothing_ahead() -> None:
    torch.set_num_threads(1)
    ahead = DecodeAhead()
    weights = [Weight(name) for name in "ab"]
    use(ahead, *weights, *weights)
    assert waiting(ahead) == []
    assert [len(each.where) for each in weights] == [2, 2]


def test_a_weight_that_is_gone_leaves_nothing() -> None:
    ahead = DecodeAhead()
    weights = [Weight(name) for name in "ab"]
    use(ahead, *weights, weights[0])
    assert waiting(ahead) == ["b"]
    weights.pop()
    gc.collect()
    assert waiting(ahead) == []
    use(ahead, weights[0])


def test_an_error_of_a_thread_is_raised_where_the_weight_is_used() -> None:
    ahead = DecodeAhead()
    a, b = Weight("a"), Weight("b")
    use(ahead, a, b)

    def fail() -> Encoded:
        raise ValueError("damaged")

    b.decoder = lambda: fail  # type: ignore[method-assign]
    use(ahead, a)
    with pytest.raises(ValueError, match="damaged"):
        ahead.take(b)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_starts_threads_of_its_own() -> None:
    from factorpack.runtime.decode_ahead import AHEAD

    weights = [Weight(name) for name in "ab"]
    use(AHEAD, *weights, *weights)
    assert AHEAD._pool is not None
    child = os.fork()
    if not child:
        try:
            assert AHEAD._pool is None
            torch.set_num_threads = lambda _: None  # type: ignore[assignment]
            use(AHEAD, *weights, *weights)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    AHEAD.forget()
