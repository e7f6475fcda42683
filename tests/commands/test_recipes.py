"""`factorpack recipes`."""

from __future__ import annotations

import json

import pytest

from factorpack.planning.families import FAMILIES, family_text
from tests.commands.running import run


def test_recipes_are_listed_and_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "recipes") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in FAMILIES)
    assert run(monkeypatch, "recipes", "vit") == 0
    assert capsys.readouterr().out == family_text("vit")
    assert run(monkeypatch, "recipes", "--json") == 0
    assert {each["name"] for each in json.loads(capsys.readouterr().out)["recipes"]} == set(FAMILIES)
    assert run(monkeypatch, "recipes", "vgg") == 2
    assert "unknown recipe 'vgg'" in capsys.readouterr().err
