"""`factorpack report` as a person meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import factorpack as fp
from factorpack.budget.curves import Curve, save_curves
from factorpack.commands.report import comparison_facts
from tests.commands.running import run
from tests.helpers import flipped, seeded

STATE = {"body.weight": seeded(64, 32, 3, 3), "body.bias": seeded(64), "fc.weight": seeded(10, 64)}
POINT = {
    "method": "planned",
    "asked_ratio": 10.0,
    "settings": "ratio 10",
    "file": "planned-10.packed.safetensors",
    "file_bytes": 1000,
    "file_ratio": 10.5,
    "weight_error": 0.01,
    "compress_s": 1.0,
    "measured": {"top1": 0.69, "top5": 0.88},
    "trained": {},
}


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    save_file(STATE, tmp_path / "net.safetensors")
    path = tmp_path / "net.packed.safetensors"
    fp.save(fp.compress(STATE, fp.QSPCA(8, 3, tile=64)), path)
    return path


def written(folder: Path, *points: dict[str, Any], original: object = None) -> Path:
    path = folder / "compare.json"
    path.write_text(json.dumps({"original": original or {"top1": 0.7}, "points": points}))
    return path


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text()
    start = text.index('type="application/json">') + len('type="application/json">')
    document: dict[str, Any] = json.loads(text[start : text.index("</script>", start)])
    return document


def test_everything_together(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, curves = tmp_path / "report.html", tmp_path / "curves.json"
    save_curves(curves, {"body.weight": Curve([1, 2], [900, 9], [0.1, 1.0], 18432, 9, 1.0)}, "mark")
    given = ("--original", tmp_path / "net.safetensors", "--curves", curves)
    compare = ("--compare", written(tmp_path, POINT))
    assert run(monkeypatch, "report", packed, "-o", page, *given, *compare, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == str(page)
    assert (said["bytes"], said["tensors"], said["problems"]) == (page.stat().st_size, 3, {})
    found = data_of(page)
    assert found["error"] == pytest.approx(said["weight_error"], rel=1e-5)
    assert [curve["name"] for curve in found["curves"]] == ["body.weight"]
    assert found["comparisons"][0]["points"][0] == {
        "method": "planned to a budget",
        "bytes": 1000,
        "ratio": 10.5,
        "value": 0.69,
        "settings": "ratio 10",
    }
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_page_that_is_there_is_replaced_by_force_only(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    page.write_text("mine")
    assert run(monkeypatch, "report", packed, "-o", page) == 2
    assert "--force" in capsys.readouterr().err
    assert page.read_text() == "mine"
    assert run(monkeypatch, "report", packed, "-o", page, "--force") == 0
    assert "a page on 3 tensors of net.packed.safetensors" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")


def test_what_it_reads_is_never_written_over(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = packed.read_bytes()
    assert run(monkeypatch, "report", packed, "-o", packed, "--force") == 2
    assert "choose another file" in capsys.readouterr().err
    assert packed.read_bytes() == before


def test_the_original_may_be_what_a_callable_makes(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made_here.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.body, self.fc = torch.nn.Conv2d(32, 64, 3), torch.nn.Linear(64, 10, bias=False)\n"
    )
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "report.html"
    assert run(monkeypatch, "report", packed, "-o", page, "--original", "made_here:Net", "--json") == 0
    assert json.loads(capsys.readouterr().out)["weight_error"] > 1  # its weights are random
    assert run(monkeypatch, "report", packed, "-o", page, "--original", "gone.safetensors", "--force") == 2
    assert "there is no file" in capsys.readouterr().err


class TestComparison:
    def test_points_without_a_file_are_left_out(self, tmp_path: Path) -> None:
        absent = {**POINT, "file": None, "file_bytes": 0, "measured": {}}
        found = comparison_facts(written(tmp_path, POINT, absent))
        assert (len(found.points), found.measure, found.original) == (1, "top-1", 0.7)
        assert found.original_bytes == 10_500
        assert found.title == tmp_path.name

    def test_weight_error_where_no_accuracy_was_measured(self, tmp_path: Path) -> None:
        found = comparison_facts(written(tmp_path, {**POINT, "measured": {}}, original={"unused": 1.0}))
        assert (found.measure, found.original, found.points[0].value) == ("weight error", None, 0.01)

    def test_a_method_of_another_version_keeps_its_name(self, tmp_path: Path) -> None:
        (point,) = comparison_facts(written(tmp_path, {**POINT, "method": "of tomorrow"})).points
        assert point.method == "of tomorrow"

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            "{}",
            '{"original": {}, "points": 3}',
            '{"original": {"top1": "high"}, "points": []}',
            json.dumps({"original": {}, "points": [{**POINT, "colour": "red"}]}),
            json.dumps({"original": {}, "points": [{**POINT, "file_bytes": "many"}]}),
            json.dumps({"original": {}, "points": [{**POINT, "measured": {"top1": float("nan")}}]}),
            json.dumps({"original": {}, "points": [{**POINT, "method": ["x"]}]}),
            "[" * 100_000,
        ],
    )
    def test_another_file_is_refused(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "compare.json"
        path.write_text(text)
        with pytest.raises(fp.PlanError, match="holds no comparison"):
            comparison_facts(path)

    def test_nothing_to_show(self, tmp_path: Path) -> None:
        with pytest.raises(fp.PlanError, match="nothing to show"):
            comparison_facts(written(tmp_path, {**POINT, "file": None}))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: None, "there is no file"),
        (lambda path: path.write_text("{}"), "holds no curves"),
        (lambda path: save_curves(path, {}, ""), "another model"),
        (
            lambda path: (save_curves(path, {}, ""), path.write_bytes(flipped(path.read_bytes(), 801))),
            "checksum",
        ),
    ],
)
def test_curves_that_are_none(
    make: Callable[[Path], object],
    words: str,
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path / "curves.json")
    given = ("--curves", tmp_path / "curves.json")
    assert run(monkeypatch, "report", packed, "-o", tmp_path / "report.html", *given) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
