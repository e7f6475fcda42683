"""The choice of "auto": the fastest, and memory for no more time than was allowed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from factorpack.runtime.choose import MARGIN, choose

TIMES = st.fixed_dictionaries(
    {"dense": st.floats(0.1, 10), "packed": st.floats(0.1, 10)}, optional={"factored": st.floats(0.1, 10)}
)
LAYERS = st.lists(st.tuples(TIMES, st.integers(1, 1000)), max_size=8)


def total(seconds: dict[int, dict[str, float]], chosen: dict[int, str]) -> float:
    return sum(seconds[layer][mode] for layer, mode in chosen.items())


@given(LAYERS, st.floats(0, 1))
def test_never_slower_than_dense_by_more_than_the_slack(
    layers: list[tuple[dict[str, float], int]], slack: float
) -> None:
    seconds = {place: times for place, (times, _) in enumerate(layers)}
    saved = {place: size for place, (_, size) in enumerate(layers)}
    fastest, chosen = choose(seconds, saved, 0.0), choose(seconds, saved, slack)
    dense = sum(times["dense"] for times in seconds.values())
    for times, mode in zip(seconds.values(), fastest.values(), strict=True):
        assert times[mode] == min(times.values()) or times[mode] * (1 - MARGIN) <= min(times.values())
    assert total(seconds, chosen) <= total(seconds, fastest) + slack * dense + 1e-9
    assert all(chosen[place] != "dense" for place in seconds if fastest[place] != "dense")


def test_time_goes_where_it_saves_most() -> None:
    seconds = {name: {"dense": 10.0, "packed": 11.0, "factored": 15.0} for name in ("small", "large")}
    assert choose(seconds, {"small": 1, "large": 2}, slack=0.05) == {"small": "dense", "large": "packed"}


def test_what_is_hardly_faster_stays_dense() -> None:
    seconds = {"hardly": {"dense": 10.0, "packed": 9.5}, "clearly": {"dense": 10.0, "packed": 8.0}}
    assert choose(seconds, dict.fromkeys(seconds, 1), slack=0.0) == {"hardly": "dense", "clearly": "packed"}
