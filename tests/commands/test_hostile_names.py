"""A tensor and a folder with hostile names, through every command that prints names or paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import nn

import factorpack as fp
from factorpack.commands import compare
from factorpack.comparison.grid import Point
from tests.commands.running import MODEL, ok, run
from tests.helpers import seeded
from tests.test_printable import HOSTILE, SHOWN

FOLDER = "a[/bold]\x1b[2J\n\u202e:bomb:"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint, a packed file, and a checkpoint that lacks one of the tensors, at hostile paths."""
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    state = {f"{HOSTILE}.weight": seeded(16, 32), f"{HOSTILE}.bias": seeded(16)}
    save_file(state, folder / "net.safetensors")
    save_file({f"{HOSTILE}.bias": seeded(16)}, folder / "other.safetensors")
    fp.save(fp.compress(state, fp.Scalar(4), progress=False), folder / "small.safetensors")
    return folder


COMMANDS = {
    "compress": (0, "net -o OUT --method scalar"),
    "compress to a budget": (0, "net -o OUT --ratio 2"),
    "compress by a family's recipe": (0, "net -o OUT"),
    "compress onto itself": (2, "net -o net"),
    "plan": (0, "net"),
    "inspect": (0, "small"),
    "inspect nothing": (2, "gone"),
    "inspect a plain file": (2, "net"),
    "decode": (0, "small -o OUT"),
    "verify": (0, "small --against net"),
    "verify against another": (1, "small --against other"),
    "report": (0, "small -o PAGE --original net"),
    "report on a report": (2, "small -o PAGE --curves gone"),
    "eval": (2, f"small --model {MODEL} --data DIR"),
    "eval a text": (2, "DIR --perplexity gone"),
    "finetune": (2, f"net -o OUT --model {MODEL} --data DIR"),
    "bench": (2, f"small --model {MODEL} --shape 3,8,8 --batch 1 --rounds 1"),
    "export": (2, f"small --model {MODEL} -o OUT --image-size 8"),
    "inspect two files": (2, "small net"),
    "inspect with an unknown option": (2, "small --HOSTILE"),
    "HOSTILE": (2, "small"),
    "--HOSTILE": (2, "small"),
    "compare": (2, f"gone --model {MODEL} -o DIR"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_reaches_the_terminal(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, words = COMMANDS[command]
    paths = {name: folder / f"{name}.safetensors" for name in ("net", "other", "small", "gone")}
    paths |= {"OUT": folder / "out.safetensors", "PAGE": folder / "page.html", "DIR": folder}
    arguments = [paths.get(word, word) for word in words.split()]
    arguments = [str(each).replace("HOSTILE", HOSTILE) for each in (command.split()[0], *arguments)]
    assert run(monkeypatch, *arguments) == expected
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert all(letter.isprintable() or letter == "\n" for letter in text), text
        assert "\nok: 0 problems" not in text
    unfolded = "".join(letter for letter in printed.out + printed.err if letter not in "│\n ")
    assert ":bomb:" in unfolded or not unfolded


def test_a_name_cannot_fake_a_line_of_verify(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "verify", folder / "small.safetensors", "--against", folder / "net.safetensors")
    weight, bias, total = capsys.readouterr().out.splitlines()
    assert bias == f"{SHOWN}.bias  0.0000"
    assert weight.startswith(f"{SHOWN}.weight  0.")
    assert total.endswith("small.safetensors: 2 tensors, every checksum correct, 0 problems")


def test_names_in_json_are_escaped_and_exact(folder: Path) -> None:
    text = ok("inspect", folder / "small.safetensors", "--json")
    assert all(letter.isprintable() for letter in text.strip())
    names = [line["name"] for line in json.loads(text)["tensors"]]
    assert names == [f"{HOSTILE}.weight", f"{HOSTILE}.bias"]


def test_a_model_s_layers(capsys: pytest.CaptureFixture[str]) -> None:
    """Layers that run in another way are listed by name."""
    from factorpack.commands.console import print_line
    from factorpack.runtime.apply import Applied

    model = nn.ModuleDict({"[/bold]\x1b[2J": nn.Linear(32, 16)})
    packed = fp.compress(model, fp.Scalar(4), progress=False)
    applied: Applied = packed.apply(model, "packed")
    for layer in applied.layers:
        print_line(str(layer))
    assert r"[/bold]\x1b[2J" in capsys.readouterr().out


def test_warnings_of_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import warnings

    from factorpack import commands

    def warn(**_: object) -> None:
        warnings.simplefilter("always")
        warnings.warn(f"{HOSTILE} is made again", stacklevel=1)
        raise SystemExit(0)

    monkeypatch.setattr(commands, "app", warn)
    with pytest.raises(SystemExit):
        commands.main()
    assert capsys.readouterr().err == f"warning: {SHOWN} is made again\n"


def test_a_comparison_s_table() -> None:
    point = Point(
        "scalar", 4.0, settings=f"a|{HOSTILE}", file="x", file_bytes=3, file_ratio=4.0, weight_error=0.1
    )
    head, rule, line = compare.markdown([point]).splitlines()
    assert rf"a\|{SHOWN}" in line
    assert head.count("|") == rule.count("|") == line.count("|") - 1
