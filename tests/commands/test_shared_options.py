"""`--quiet`, `--json`, `--threads` and exit codes, alike for every command."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import factorpack as fp
from factorpack import commands
from factorpack.commands import compress_request
from factorpack.commands.console import _width
from factorpack.commands.shared_options import THREAD_VARIABLES, limited_threads
from factorpack.format import encode_workers
from tests.commands.running import invoke, ok, run
from tests.helpers import seeded

WORK = {
    "compress": "NET -o OUT --ratio 4",
    "compress by a method": "NET -o OUT --method scalar",
    "plan": "NET --ratio 4",
    "methods": "",
    "recipes": "",
    "recipes resnet": "",
    "inspect": "SMALL",
    "decode": "SMALL -o OUT",
    "verify": "SMALL --against NET",
    "export": "SMALL --safetensors OUT",
    "report": "SMALL -o PAGE",
}
"""Commands that need neither a model nor data."""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """The packed file has a weight that FP16 makes zero, and the checkpoint a prefix: there is a note to print."""
    state = {"module.a.weight": seeded(32, 32), "module.a.bias": seeded(32) * 1e-20}
    torch.save({"state_dict": state, "optimizer": {"lr": torch.ones(1)}}, tmp_path / "net.pt")
    fp.compress(tmp_path / "net.pt", fp.Scalar(4), to=tmp_path / "small.safetensors", progress=False)
    named = {"NET": "net.pt", "SMALL": "small.safetensors", "OUT": "out.safetensors", "PAGE": "page.html"}
    return {word: str(tmp_path / name) for word, name in named.items()}


def words(name: str, files: dict[str, str]) -> list[str]:
    command = name.split(" by ")[0].split()
    return [*command, *(files.get(word, word) for word in WORK[name].split())]


@pytest.mark.parametrize("name", WORK)
def test_quiet_prints_nothing_and_json_one_object(
    name: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given = words(name, files)
    assert run(monkeypatch, *given, "--quiet") == 0
    assert capfd.readouterr() == ("", "")
    Path(files["PAGE"]).unlink(missing_ok=True)
    assert run(monkeypatch, *given, "--json") == 0
    out = capfd.readouterr().out
    assert isinstance(json.loads(out), dict)
    assert out.count("\n") == 1
    Path(files["PAGE"]).unlink(missing_ok=True)
    assert run(monkeypatch, *given, "--threads", 1) == 0
    said = capfd.readouterr()
    assert said.out
    assert not any(ord(letter) < 32 and letter != "\n" for letter in said.out + said.err)


def test_every_command_has_them() -> None:
    for name in commands.COMMANDS:
        options = {option for parameter in commands.command_line(name).params for option in parameter.opts}
        assert {"--quiet", "-q", "--threads", "--json"} <= options, name


def test_threads_are_limited_while_a_command_runs(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads(), {name: os.environ.get(name) for name in THREAD_VARIABLES}
    seen: list[object] = []
    real = compress_request.compress

    def watch(*given: object, **named: object) -> object:
        seen.extend([torch.get_num_threads(), *(os.environ[name] for name in THREAD_VARIABLES)])
        return real(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(compress_request, "compress", watch)
    ok("compress", files["NET"], "-o", files["OUT"], "--ratio", 4, "--threads", 3)
    assert seen == [3, "3", "3", "3"]
    assert before == (torch.get_num_threads(), {name: os.environ.get(name) for name in THREAD_VARIABLES})


def test_encode_workers_have_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def refuse(command: list[str], **_: object) -> None:
        started.append(command)
        raise OSError

    monkeypatch.setattr(encode_workers.subprocess, "Popen", refuse)
    with limited_threads(3):
        assert encode_workers._start() is None
    assert started[0][3] == "3"


FAILURES = {
    "unknown method": ("compress NET -o OUT --method foo", 2, "PlanError", {"found": "foo"}),
    "no budget that small": ("compress NET -o OUT --max-bytes 10", 2, "PlanError", {"found": 10}),
    "not there": ("inspect gone", 2, "FormatError", {}),
    "no such option": ("inspect SMALL --foo", 2, "UsageError", {}),
    "not a number": ("compress NET -o OUT --ratio x", 2, "UsageError", {}),
    "no such command": ("foo", 2, "UsageError", {}),
}


@pytest.mark.parametrize("name", FAILURES)
def test_json_errors_are_one_object(
    name: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line, code, kind, fields = FAILURES[name]
    given = [files.get(word, word) for word in line.split()]
    assert run(monkeypatch, *given, "--json") == code
    said = capsys.readouterr()
    error = json.loads(said.out)["error"]
    assert error["type"] == kind
    assert error["message"]
    assert error.items() >= fields.items()
    assert said.err  # people still read it
    assert run(monkeypatch, *given, "--quiet" if kind != "UsageError" else "--json") == code
    assert capsys.readouterr().err


def test_an_error_names_its_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a.weight": torch.full((32, 32), float("nan"))}, tmp_path / "nan.safetensors")
    given = ("compress", tmp_path / "nan.safetensors", "-o", tmp_path / "out.safetensors", "--ratio", 4)
    assert run(monkeypatch, *given, "--json") == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["type"], error["tensor"]) == ("WeightError", "a.weight")
    assert error["notes"] == ["while compressing tensor 'a.weight'"]


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_ends_a_command_with_130_and_says_what_is_kept(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("factorpack.budget.sequential.SequentialCoder.measure", interrupt)
    given = ("compress", files["NET"], "-o", files["OUT"], "--ratio", 4)
    assert run(monkeypatch, *given) == 130
    said = capsys.readouterr().err.splitlines()
    assert said[-2:] == [
        f"what is finished is in {files['OUT']}.parts: the same command resumes from there",
        "interrupted",
    ]
    monkeypatch.undo()
    assert "resuming from what" in ok(*given)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate")])
def test_running_out_of_memory_is_a_sentence(
    error: Exception,
    files: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(compress_request, "compress", fail)
    assert run(monkeypatch, "compress", files["NET"], "-o", files["OUT"], "--ratio", 4) == 2
    assert "error: memory ran out: use fewer" in capsys.readouterr().err


def test_an_error_of_ours_keeps_its_traceback(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(compress_request, "compress", fail)
    monkeypatch.setattr(
        sys, "argv", ["factorpack", "compress", files["NET"], "-o", files["OUT"], "--ratio", "4"]
    )
    with pytest.raises(RuntimeError, match="a bug"):
        commands.main()


NAMES = ("层.weight", "é\\b.weight", "C:\\models\\a.weight")
"""Letters that Windows' usual encoding lacks, and what looks like a path there."""


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_names_are_printed_in_any_encoding(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, small = tmp_path / "naïve 层.safetensors", tmp_path / "C:\\klein 层.safetensors"
    save_file({name: seeded(16, 16) for name in NAMES}, source)
    for given in (
        ["compress", source, "-o", small, "--ratio", 2],
        ["inspect", small],
        ["verify", small, "--against", source],
        ["inspect", small, "--json"],
        ["recipes", "resnet"],
        ["compress", "--help"],
        ["inspect", tmp_path / "层"],
    ):
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2))
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        assert run(monkeypatch, *given) in (0, 2)
        for stream in (out, err):
            stream.flush()
    assert set(fp.load(small)) == set(NAMES)
    if encoding == "cp1252":
        assert b"\\u5c42" in err.buffer.getvalue()  # type: ignore[attr-defined]


def test_what_is_read_and_written_is_in_utf8() -> None:
    """The locale's encoding, which is another one on Windows, is never used."""
    home = Path(fp.__file__).parent
    found = [
        f"{file.name}:{number}"
        for file in home.rglob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if (".read_text(" in line or ".write_text(" in line) and "encoding=" not in line
    ]
    assert not found


def test_without_standard_output(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As under pythonw, or after `>&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    assert _width() == 180
    assert run(monkeypatch, "inspect", files["SMALL"]) == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_completion_has_a_script_and_knows_the_commands(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_FACTORPACK_COMPLETE", f"source_{shell}")
    assert run(monkeypatch) == 0
    assert "factorpack" in capsys.readouterr().out
    if shell == "bash":
        monkeypatch.setenv("_FACTORPACK_COMPLETE", "complete_bash")
        for line, expected in (("factorpack insp", "inspect"), ("factorpack inspect --q", "--quiet")):
            monkeypatch.setenv("COMP_WORDS", line)
            monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
            assert run(monkeypatch) == 0
            assert capsys.readouterr().out.split() == [expected]
    monkeypatch.delenv("_FACTORPACK_COMPLETE")
    assert "--install-completion" in invoke("--help").output
