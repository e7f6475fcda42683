"""A short run of `python -m tools.fuzz_recipes`."""

from __future__ import annotations

import pytest

from factorpack.planning import recipe
from tools import fuzz_recipes


def test_a_recipe_is_read_or_refused() -> None:
    outcome = fuzz_recipes.fuzz(150, 0)
    assert outcome.violations == []
    assert {"refused", "planned"} <= set(outcome.counts) <= {"refused", "planned", "read, and fits no model"}


def test_the_fuzzer_sees_another_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no use if it cannot fail."""
    monkeypatch.setattr(recipe, "KEYS", ("default", "layers"))
    monkeypatch.setattr(recipe, "_patterns", lambda document, key: document[key])
    assert any("KeyError" in line for line in fuzz_recipes.fuzz(20, 0).violations)
