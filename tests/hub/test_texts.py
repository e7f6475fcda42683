"""Tokens of texts, and perplexity where it has a closed form."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.errors import PlanError, SourceError
from factorpack.hub.texts import evenly_spaced, line_batches, perplexity, token_batches, windows
from tests.commands.running import printed, run
from tests.hub.conftest import bert, save_llama, save_tokenizer


class Letters:
    """A tokenizer of letters, as those of transformers are called."""

    def __call__(self, text: Any, **settings: Any) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": [ord(letter) - 97 for letter in text if letter.isalpha()]}
        rows = [self(line)["input_ids"][: settings["max_length"]] for line in text]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    path = tmp_path / "letters.txt"
    path.write_text("abcabc\n\nabca\n")
    return path


class Unsure(nn.Module):
    """Says after each letter which comes next in abc, as sure of it as it is told."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.logit = math.log(share / ((1 - share) / 2))

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=nn.functional.one_hot((input_ids + 1) % 3, 3) * self.logit)


def test_windows_do_not_overlap_and_nothing_is_lost(letters: Path) -> None:
    found = windows(letters, Letters(), 4)
    assert [window.tolist() for window in found] == [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0]]
    assert [len(window) for window in windows(letters, Letters(), 3)] == [
        3,
        3,
        3,
    ]  # a lone last token has no past


@pytest.mark.parametrize("share", [1 / 3, 0.5, 0.9])
def test_perplexity_in_closed_form(letters: Path, share: float) -> None:
    """The text is abcabcabca throughout: each next letter has the share, and its inverse is the perplexity."""
    found = perplexity(Unsure(share), windows(letters, Letters(), 4), progress=False)
    assert found.tokens == 3 + 3 + 1
    assert found.perplexity == pytest.approx(1 / share, rel=1e-6)
    assert found.nats == pytest.approx(-math.log(share), rel=1e-6)


def test_perplexity_wants_logits(letters: Path) -> None:
    with pytest.raises(SourceError, match="returns no logits per token"):
        perplexity(Silent(), windows(letters, Letters(), 4), progress=False)


class Silent(nn.Module):
    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=input_ids)


def test_batches_of_windows_and_of_lines(letters: Path) -> None:
    assert token_batches(letters, Letters(), 4, 8)[0]["input_ids"].shape == (2, 4)
    assert token_batches(letters, Letters(), 4, 1)[0]["input_ids"].tolist() == [[0, 1, 2, 0]]
    (lines,) = line_batches(letters, Letters(), 5, 8)
    assert lines["attention_mask"].sum(1).tolist() == [5, 4]


def test_texts_that_are_none(tmp_path: Path, letters: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(SourceError, match="0 tokens"):
        windows(tmp_path / "empty", Letters(), 4)
    with pytest.raises(SourceError, match="has only empty lines"):
        line_batches(tmp_path / "empty", Letters(), 4, 4)
    for name in ("bytes", "gone"):
        with pytest.raises(SourceError, match="cannot be read as text"):
            windows(tmp_path / name, Letters(), 4)
    with pytest.raises(SourceError, match="windows of 1 tokens"):
        windows(letters, Letters(), 1)


def test_some_of_many() -> None:
    assert evenly_spaced([1, 2, 3], 5) == [1, 2, 3]
    assert evenly_spaced(list(range(10)), 5) == [0, 2, 4, 6, 8]


def test_a_language_model_on_the_command_line(
    transformers: Any,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = save_llama(transformers, tmp_path / "llama", tied=True, layers=1)
    small = tmp_path / "small"
    options = ("--ratio", 4, "--calibration", text, "--length", 16, "--samples", 8, "--json")
    assert run(monkeypatch, "compress", folder, "-o", small, *options) == 0
    made = printed(capsys)
    assert made["file_ratio"] >= 4
    found = []
    for each in (folder, small):
        assert run(monkeypatch, "eval", each, "--perplexity", text, "--length", 16, "--json") == 0
        found.append(printed(capsys))
    assert [one["tokens"] for one in found] == [30 * 15] * 2
    assert found[1]["perplexity"] == pytest.approx(found[0]["perplexity"], rel=0.05)
    assert found[1]["perplexity"] != found[0]["perplexity"]
    assert run(monkeypatch, "compress", folder, "-o", small, *options) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_killed_folder_goes_on(
    transformers: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_llama(transformers, tmp_path / "llama", tied=True, layers=1)
    how = ("--ratio", 4, "--calibration", text, "--length", 16, "--samples", 8)

    def fail(*_arguments: object) -> None:
        raise PlanError("as if it were killed")

    with monkeypatch.context() as patched:
        patched.setattr("factorpack.budget.goals.meet_size", fail)
        assert run(monkeypatch, "compress", folder, "-o", tmp_path / "small", *how) == 2
    assert (tmp_path / "small.packed.safetensors.parts").is_dir()
    with monkeypatch.context() as patched:
        patched.setattr("factorpack.budget.measured_curves.plan_together", None)  # planning again would fail
        assert run(monkeypatch, "compress", folder, "-o", tmp_path / "small", *how) == 0
    assert {path.name for path in tmp_path.iterdir()} == {text.name, "llama", "small"}


def test_a_folder_without_calibration_streams(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(monkeypatch, "compress", folder, "-o", tmp_path / "small-v1.5", "--method", "scalar", "--json")
        == 0
    )
    assert (tmp_path / "small-v1.5" / "README.md").is_file()
    assert run(monkeypatch, "compress", folder, "-o", tmp_path / "one.safetensors", "--method", "scalar") == 0
    assert fp.load(tmp_path / "one.safetensors").size().file_bytes == printed_bytes(capsys)


def printed_bytes(capsys: pytest.CaptureFixture[str]) -> int:
    bytes_: int = json.loads(capsys.readouterr().out.splitlines()[0])["file_bytes"]
    return bytes_


def test_an_encoder_reads_lines(
    transformers: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert(transformers).save_pretrained(tmp_path / "bert")  # type: ignore[operator]
    save_tokenizer(transformers, tmp_path / "bert")
    options = ("--ratio", 5, "--calibration", text, "--length", 16, "--samples", 4)
    assert run(monkeypatch, "compress", tmp_path / "bert", "-o", tmp_path / "small", *options) == 0
    assert type(fp.hub.from_pretrained(tmp_path / "small")).__name__ == "BertModel"


@pytest.mark.parametrize(
    "options",
    [(), ("--model", "a:b"), ("--perplexity", "a", "--data", "b"), ("--perplexity", "a", "--mode", "x")],
)
def test_what_eval_cannot_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
) -> None:
    assert run(monkeypatch, "eval", tmp_path, *options) == 2
    assert "--perplexity" in capsys.readouterr().err
