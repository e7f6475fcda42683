"""Groups of channels that merge and freeze."""

from __future__ import annotations

from factorpack.comparison.permute.ties import Axis, Ties


def test_tied_dimensions_have_one_group() -> None:
    ties = Ties()
    one, other, third = (ties.fresh(6) for _ in range(3))
    ties.tie(one, other)
    ties.tie(other, third)
    assert ties.resolve(one) == ties.resolve(other) == ties.resolve(third)
    assert ties.size(ties.resolve(one)) == 6


def test_the_longer_run_decides() -> None:
    ties = Ties()
    flat, image, channels = ties.fresh(24), ties.fresh(6), ties.fresh(3)
    ties.tie(flat, image.times(4))
    assert ties.resolve(flat) == Axis(image.group, 4)
    ties.tie(channels.times(2), image)
    assert ties.resolve(flat) == Axis(channels.group, 8)
    assert ties.resolve(image) == Axis(channels.group, 2)
    assert not ties.frozen(flat)


def test_runs_that_do_not_fit_freeze_both() -> None:
    ties = Ties()
    one, other = ties.fresh(4), ties.fresh(6)
    ties.tie(one.times(3), other.times(2))
    assert ties.frozen(one) == ties.frozen(other) == "runs of 2 and 3 elements do not align"


def test_what_is_tied_to_the_frozen_is_frozen_whichever_comes_first() -> None:
    ties = Ties()
    early, late, still = ties.fresh(4), ties.fresh(4), ties.fresh(4, "a reason")
    ties.tie(early, still)
    assert ties.frozen(early) == "a reason"
    ties.tie(still, late)
    ties.freeze(late, "another")
    assert ties.frozen(late) == "a reason"
