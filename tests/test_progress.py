"""One bar for a whole job: its fraction, its time left, and who sees it."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import factorpack as fp
from factorpack.budget.phases import phases_of
from factorpack.progress import Job, Progress, ProgressUpdate, say_seconds
from tests.helpers import seeded


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("factorpack.progress.time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def work(job: Job, phase: str, seconds: float, clock: Clock, units: int = 10) -> None:
    with Progress(phase, units, job) as bar:
        for number in range(units):
            clock.now += seconds / units
            bar.advance(f"{phase} {number}", 1)


def test_phases_share_one_bar_and_the_time_left_is_right_where_shares_are(clock: Clock) -> None:
    seen: list[ProgressUpdate] = []
    with Job([("planning", 2.0), ("compressing", 6.0), ("saving", 2.0)], seen.append) as job:
        for phase, seconds in (("planning", 20), ("compressing", 60), ("saving", 20)):
            work(job, phase, seconds, clock)
    fractions = [update.fraction for update in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1], seen[-1].phase) == (0.0, 1.0, "done")
    for update in seen:
        if update.fraction >= 0.05:
            assert update.seconds_left == pytest.approx(100 - update.seconds)
        else:
            assert update.seconds_left is None


@pytest.mark.parametrize("slower", [0.5, 2.0])
def test_shares_that_are_wrong_by_two_make_a_time_left_within_two(clock: Clock, slower: float) -> None:
    """As for a net whose codes take twice as long as they usually do, against its planning."""
    seen: list[ProgressUpdate] = []
    with Job([("planning", 40.0), ("compressing", 60.0)], seen.append) as job:
        work(job, "planning", 40, clock)
        work(job, "compressing", 60 * slower, clock)
    for update in seen[:-2]:
        if update.seconds_left is not None:
            assert 0.5 <= update.seconds_left / (40 + 60 * slower - update.seconds) <= 2.0


def test_what_does_not_come_is_left_out_and_what_comes_again_is_added(clock: Clock) -> None:
    seen: list[ProgressUpdate] = []
    with Job([("measuring", 10.0), ("planning", 30.0), ("compressing", 60.0)], seen.append) as job:
        work(job, "compressing", 60, clock, units=20)
        assert seen[-1].fraction == 1.0
        work(job, "compressing", 15, clock, units=5)  # a quarter of the work, once more
        assert seen[-1].fraction == 1.0
        begun = next(update for update in reversed(seen) if update.phase_fraction == 0)
        assert begun.fraction == pytest.approx(60 / 75)
        work(job, "surprise", 5, clock)
        assert 0 <= seen[-1].fraction <= 1


def test_compress_calls_a_function_with_its_phases() -> None:
    seen: list[ProgressUpdate] = []
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8))
    batches = [seeded(16, 32), seeded(16, 32, seed=1)]
    fp.compress(model, ratio=6, calibration=batches, progress=seen.append)
    phases = list(dict.fromkeys(update.phase for update in seen))
    known = [name for name, _ in phases_of(1, True, False)]
    assert phases == [*(name for name in known if name != "saving"), "done"]
    assert {update.item for update in seen} >= {"0.weight", "2.weight"}
    assert all(0 <= update.fraction <= 1 for update in seen)


def test_an_exception_of_the_function_ends_the_work() -> None:
    def stop(update: ProgressUpdate) -> None:
        if update.phase == "compressing":
            raise TimeoutError("enough")

    with pytest.raises(TimeoutError, match="enough"):
        fp.compress(nn.Linear(32, 32), ratio=4, progress=stop)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_shown_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    for stream, shown in ((io.StringIO(), True), (None, True), (terminal, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress("working", 2, shown) as bar:
            bar.advance("a", 1)
            assert bar._job._display is None
    assert not terminal.getvalue()


class Notebook:
    """What a notebook's kernel has: a shell of its own class, and cells that can be changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
        shell = type("Shell", (type("ZMQInteractiveShell", (), {}),), {})()
        ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
        display.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)
        monkeypatch.setattr(sys, "stderr", io.StringIO())

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        self.update(content, raw=True)
        return self

    def update(self, content: dict[str, str], raw: bool) -> None:
        assert raw
        self.lines.append(content["text/plain"])


def test_a_notebook_has_one_line(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    notebook = Notebook(monkeypatch)
    with Progress("working", 4) as bar:
        for name in ("a", "b\x1b[2J", "c"):
            clock.now += 30
            bar.advance(name, 1)
    assert notebook.lines == [
        "starting",
        "working  25%  1 min 30 s left  a",
        "working  50%  1 min left  b\\x1b[2J",
        "working  75%  30 s left  c",
        "done in 1 min 30 s",
    ]


def test_a_kernel_without_a_notebook_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(monkeypatch)
    sys.modules["IPython"].get_ipython = lambda: None  # type: ignore[attr-defined]
    with Progress("working", 1) as bar:
        bar.advance("a", 1)
    assert not notebook.lines


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1 min"), (754, "12 min"), (3600, "1 h 0 min"), (-3, "0 s")],
)
def test_seconds_as_people_say_them(seconds: float, text: str) -> None:
    assert say_seconds(seconds) == text


def test_the_estimated_loss_is_that_of_the_curves() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8))
    batches = [seeded(32, 32)]
    found = [fp.compress(model, ratio=ratio, calibration=batches, progress=False) for ratio in (4, 8)]
    losses = [packed.estimated_loss for packed in found]
    assert losses[0] is not None
    assert losses[1] is not None
    assert 0 < losses[0] < losses[1]
    assert fp.compress(model, ratio=4, progress=False).estimated_loss is None
