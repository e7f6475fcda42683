"""Recipes, checkpoints, folders, curves and states of training: short runs of `python -m tools.fuzz`."""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from pathlib import Path

import pytest

from factorpack.errors import SourceError
from factorpack.planning import recipe
from tools.fuzz import __main__ as program
from tools.fuzz import inputs, loop, recipes
from tools.fuzz.damages import change_some, places
from tools.fuzz.loop import Local, Outcome, Result, Target, fuzz, fuzz_in_pieces


def test_a_recipe_is_read_or_refused() -> None:
    outcome = fuzz(recipes.TARGET, 60, 0)
    assert outcome.violations == []
    assert {"refused", "planned"} <= set(outcome.counts) <= {"refused", "planned", "read, and fits no model"}


def test_the_fuzzer_sees_another_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no use if it cannot fail."""
    monkeypatch.setattr(recipe, "KEYS", ("default", "layers"))
    monkeypatch.setattr(recipe, "_patterns", lambda document, key: document[key])
    assert any("KeyError" in line for line in fuzz(recipes.TARGET, 20, 0).violations)


@pytest.mark.parametrize("target", [inputs.SOURCES, inputs.CURVES, inputs.CHECKPOINTS])
def test_other_inputs_are_read_or_refused(target: Target) -> None:
    outcome = fuzz(target, 30, 0)
    assert outcome.violations == []
    assert {key.rpartition(" ")[2] for key in outcome.counts} == {"read", "refused"}


def test_a_folder_is_opened_or_refused() -> None:
    pytest.importorskip("transformers", reason="opening models needs the hf extra")
    outcome = fuzz(inputs.FOLDERS, 6, 0)
    assert outcome.violations == []
    assert outcome.cases == 6


def test_changes_change_something() -> None:
    whole = {"a": [1, {"b": "c"}], "d": 2.0}
    found = []
    for seed in range(20):
        changed = json.loads(json.dumps(whole))
        change_some(changed, random.Random(seed))
        found.append(str(changed))
    assert len(set(found)) > 10
    assert len(list(places(whole))) == 5


def test_the_counts_are_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def prepare(_: Path):
        def judge(rng: random.Random) -> tuple[str, int]:
            if rng.random() < 0.5:
                raise KeyError("a")
            return "read", 0

        return judge

    monkeypatch.setitem(program.TARGETS, "curves", Target(prepare))
    monkeypatch.setattr(
        sys, "argv", ["", "--what", "curves", "--cases", "20", "--seed", "5", "--results", str(tmp_path)]
    )
    assert program.main() == 1
    document = json.loads((tmp_path / "curves.json").read_text())
    assert document["command"] == "python -m tools.fuzz --what curves --cases 20 --seed 5"
    assert sum(document["counts"].values()) == 20
    assert all("KeyError" in line and "test_fuzz.py" in line for line in document["violations"])


def prepare_coins(_: Path):
    def judge(rng: random.Random) -> Result:
        if rng.random() < 0.2:
            raise KeyError("a")
        return rng.choice("ab"), 0

    return judge


def test_a_long_run_tells_its_counts_after_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PIECE", 20)
    seen = [outcome.cases for outcome in fuzz_in_pieces(Target(prepare_coins), 50, 0, start=7)]
    assert seen == [20, 40, 50]


def test_a_run_that_is_stopped_leaves_its_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stopped(*_: object):
        yield Outcome(cases=2_000)
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "fuzz_in_pieces", stopped)
    monkeypatch.setattr(sys, "argv", ["", "--what", "curves", "--cases", "9999", "--results", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        program.main()
    assert json.loads((tmp_path / "curves.json").read_text())["cases"] == 2_000
    assert [path.name for path in tmp_path.iterdir()] == ["curves.json"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # these workers use no threads
def test_workers_judge_the_same_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PIECE", 20)
    monkeypatch.setattr(loop, "Local", partial(Local, start="fork"))
    coins = Target(prepare_coins)
    (*_, alone), (*_, together) = (fuzz_in_pieces(coins, 90, 0, start=7, workers=n) for n in (1, 2))
    assert together.cases == sum(together.counts.values()) == 90
    assert together.counts == alone.counts == fuzz(coins, 90, 0, start=7).counts
    assert sorted(together.violations) == sorted(alone.violations)
    assert len(set(alone.violations)) == alone.counts["violation"] > 0
    assert together.most_bytes_over is not None
    assert together.slowest_s > 0


def test_only_errors_of_ours_are_a_refusal() -> None:
    def fails(error: Exception):
        def work() -> None:
            raise error

        return work

    assert inputs.judged(fails(SourceError("a")), 7) == ("refused", 7)
    with pytest.raises(ValueError, match="b"):
        inputs.judged(fails(ValueError("b")), 7)
