"""Examples run as they are, and what they print is what they promise."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.forking import Forked

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
pytestmark = pytest.mark.usefixtures("trained_once")
NUMBER = r"([\d.,]*\d)"


def printed(name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    return capfd.readouterr().out


def run_here(args: list[str], check: bool) -> None:
    assert Forked(args).wait() == 0
    assert check


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern.replace("#", NUMBER), text)
    assert found is not None, text
    return [float(each.replace(",", "")) for each in found.groups()]


def test_budget(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed("budget", capfd, monkeypatch)
    found, allowed = numbers("# of # bytes", text)
    assert 0.99 * allowed <= found <= allowed
    before, after = numbers("accuracy # -> #", text)
    assert after > before - 0.05
    assert "refused: 2000 bytes cannot be met" in text


def test_calibration(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed("calibration", capfd, monkeypatch)
    (fp32,) = numbers("FP32: #", text)
    blind_ratio, blind = numbers("weights alone: # times smaller, accuracy #", text)
    ratio, score = numbers("256 inputs: # times smaller, accuracy #", text)
    assert min(blind_ratio, ratio) >= 70
    assert blind + 0.02 < score
    assert score > fp32 - 0.02


def test_finetune(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="fine-tuning needs the train extra")
    monkeypatch.setattr("subprocess.Popen", Forked)
    monkeypatch.setattr("subprocess.run", run_here)
    text = printed("finetune", capfd, monkeypatch)
    assert re.findall("starts|killed|resumes|trained", text) == ["starts", "killed", "resumes", "trained"]
    ratio, score = numbers("trained: # times smaller, accuracy #", text)
    assert 40 <= ratio < 42
    assert score > 0.9


def test_compare(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed("compare", capfd, monkeypatch)
    (fp32,) = numbers("FP32: #", text)
    planned, ratio = numbers("planned: # at # times smaller", text)
    (rounded,) = numbers("scalar: #", text)
    assert ratio >= 16
    assert planned > fp32 - 0.02
    assert planned > rounded


def test_language_model(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="opening models needs the hf extra")
    text = printed("language_model", capfd, monkeypatch)
    (ratio,) = numbers("# times smaller: README.md config.json model.packed.safetensors", text)
    before, after = numbers("perplexity of unseen text: # -> #", text)
    assert ratio >= 8
    assert before > 1
    assert after < 1.1 * before


def test_run_packed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed("run_packed", capfd, monkeypatch)
    taken = {mode: numbers(rf"{mode}: # bytes", text)[0] for mode in ("FP32", "dense", "packed", "auto")}
    assert taken["packed"] < taken["FP32"] / 40
    assert taken["dense"] == taken["FP32"] >= taken["auto"]
    assert float(text.split("largest difference from the dense outputs: ")[1]) < 1e-5
    assert all(f"{name}.weight: " in text for name in (0, 2, 4))


def test_every_example_is_short_listed_and_run() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 60, path
        assert f"({path.name})" in listed
        assert f"test_{path.stem}" in globals(), path
