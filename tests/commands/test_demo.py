"""The demo with tiny settings: every file it shows is there, and rounding is never larger than the budget."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import factorpack as fp
from factorpack.commands.demo import NO_FIGURE, Demo, _document, _draw, _show, demo, run_demo
from factorpack.digits import net

RATIOS = (8, 40)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    pytest.importorskip("sklearn", reason="the digits need the demo extra")
    folder = tmp_path_factory.mktemp("demo")
    return run_demo(folder, ratios=RATIOS, images=16, epochs=1, progress=False)


def test_every_point_is_a_file_within_its_budget(done: Demo) -> None:
    document = json.loads(json.dumps(_document(done)))
    assert [(row["method"], row["requested_ratio"]) for row in document["rows"]] == [
        (method, ratio) for method in ("planned", "scalar") for ratio in RATIOS
    ]
    written = [row for row in document["rows"] if row["file"]]
    assert len(written) == 3, "2 bits per weight are more than 1/40 of FP32"
    for row in written:
        path = done.folder / row["file"]
        assert row["file_bytes"] == path.stat().st_size
        assert row["file_ratio"] == fp.load(path).size().file_ratio >= row["requested_ratio"]
        assert 0 <= row["test_accuracy"] <= 1
    left = {path.name for path in done.folder.iterdir()}
    assert left - {"demo.png"} == {"digits.pt", *(row["file"] for row in written)}


def test_a_demo_that_is_stopped_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="the digits need the demo extra")
    scratch = tmp_path / ".demo.0123abcd.tmp"  # of one that was killed
    scratch.mkdir()

    def interrupted(_model: object, _ratios: object, folder: Path, **_settings: object) -> None:
        (Path(folder) / "planned-8.packed.safetensors").write_bytes(b"whole")
        raise KeyboardInterrupt

    monkeypatch.setitem(demo.__globals__, "train_net", lambda *_given, **_settings: net())
    monkeypatch.setitem(demo.__globals__, "compare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_figure_is_drawn(done: Demo) -> None:
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib")
    assert done.figure == done.folder / "demo.png"
    assert done.figure.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_one_sentence_says_so(
    done: Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(demo.__globals__, "find_spec", lambda _name: None)
    assert _draw(done.points, done.accuracy, done.folder / "none.png") is None
    _show(replace(done, figure=None))
    assert NO_FIGURE in capsys.readouterr().out


def test_what_a_person_is_shown(done: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    _show(done)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[0] == "FP32"
    assert lines[2].split()[0] == "8"
    assert lines[3].split()[0] == "40"
    assert lines[3].split()[-3:] == ["-", "-", "-"]
    assert any(line.startswith("  factorpack inspect") for line in lines)


def test_the_command_prints_one_json_object(
    done: Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(demo.__globals__, "run_demo", lambda *_given, **_settings: done)
    demo(done.folder, as_json=True)
    assert json.loads(capsys.readouterr().out)["test_accuracy"] == done.accuracy


def test_the_installed_program() -> None:
    """Asked for something that needs no torch."""
    program = Path(sys.executable).with_name("factorpack")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"factorpack {fp.__version__}\n"
    wrong = subprocess.run([program, "inspct"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "Did you mean 'inspect'?" in " ".join(wrong.stderr.split())
