"""Command lines.

Every command gets arguments at random, and files that are whole, damaged, of another kind or not there. It
may end with the exit codes 0, 1 and 2 and with no other exception than that; it may write where it stands,
and nothing outside; and it may not take long.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import torch
import typer
from safetensors.torch import save_file

import factorpack as fp
from factorpack import commands as cli
from factorpack.methods import METHODS
from tools.fuzz.damages import DAMAGES
from tools.fuzz.loop import Judge, Result, Target

CASE_SECONDS = 60.0
ALLOWED = (0, 1, 2)
DAMAGED = 4
TRAINS = "demo"
"""A minute of work whatever it is given: it gets arguments that do not fit alone."""
MODELS = (
    *["tools.fuzz.cli:Net"] * 6,
    "torch.nn:Identity",
    "torch.nn:Linear",
    "os:getcwd",
    "nowhere:none",
    "json",
    ":",
    "..:a",
)
LIKELY: dict[str, Sequence[str]] = {
    "source": ("net.safetensors", "net.pt", "packed.safetensors"),
    "file": ("packed.safetensors", "net.safetensors"),
    "recipe": ("recipe.toml", "wrong.toml", "broken.toml", "none", "resnet", "absent"),
    "output": ("out", "out.safetensors", "new/out", "images", ".", "net.safetensors"),
    "model": MODELS,
    "method": sorted(METHODS),
    "settings": (
        "step=0.3",
        "bits=4",
        "tile=9",
        "qp=-20",
        "rank=none",
        "solver.steps=3",
        "=",
        "bits=",
        "a=b",
    ),
    "data": ("images", "images/val", "broken", "net.pt", "absent"),
    "calibration": ("images", "images/val", "broken", "net.pt", "absent"),
}
"""What parameters of these names are mostly given; else they get any file, as the others do."""


class Net(torch.nn.Module):
    """The model that net.safetensors holds the weights of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 8, 3, bias=False)
        self.fc = torch.nn.Linear(8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.fc(self.conv1(images).mean((2, 3)))
        return answer


SLOW = {"epochs": ("-1", "0", "1"), "workers": ("-1", "0", "1", "1000000"), "checkpoint_every": ("0", "1")}
"""Numbers that would keep the machine busy, as they should: they get small ones, and refusable ones."""
TEXTS = ("", "-", "none", "auto", "resnet", "0", "-1", "1e9", "nan", "\x1b[31m", "re:(", "*", "é", "a" * 300)


def pristine(folder: Path) -> None:
    """The files that cases find: small, and of every kind the commands read."""
    from PIL import Image  # the other fuzzers run where it is not installed

    state = {
        "conv1.weight": torch.linspace(-1, 1, 8 * 27).reshape(8, 3, 3, 3),
        "fc.weight": torch.linspace(-1, 1, 80).reshape(10, 8),
        "fc.bias": torch.ones(10),
    }
    save_file(state, folder / "net.safetensors")
    torch.save(state, folder / "net.pt")
    fp.save(fp.compress(state, progress=False), folder / "packed.safetensors")
    save_file({"w": torch.tensor([[float("nan"), 1.0], [2.0, 3.0]])}, folder / "nan.safetensors")
    save_file({"empty": torch.ones(0, 3)}, folder / "empty.safetensors")
    (folder / "nothing.safetensors").write_bytes(b"")
    (folder / "text.pt").write_text("no checkpoint")
    (folder / "recipe.toml").write_text('exclude = ["fc.*"]\n[default]\nmethod = "scalar"\nbits = 4\n')
    (folder / "wrong.toml").write_text('[default]\nmethod = "scalar"\nbits = "four"\n')
    (folder / "broken.toml").write_text("x = [")
    sharded = folder / "folder"
    sharded.mkdir()
    index = {"weight_map": {"w": "../net.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    images = folder / "images"
    for part in ("train/a", "val/a", "val/b"):
        (images / part).mkdir(parents=True)
        Image.effect_noise((40, 40), 60).convert("RGB").save(images / part / "noise.png")
    broken = folder / "broken"
    shutil.copytree(images, broken)
    (broken / "val" / "a" / "noise.png").write_bytes(b"\x89PNG no image")
    whole = (folder / "packed.safetensors").read_bytes()
    rng = random.Random(0)
    for number in range(DAMAGED):
        damage = rng.choice(sorted(DAMAGES))
        (folder / f"damaged{number}.safetensors").write_bytes(DAMAGES[damage](whole, rng))


@dataclass(frozen=True, slots=True)
class Parameter:
    """What a command can be given, as its function's signature says it."""

    name: str
    flags: tuple[str, ...]
    """None for an argument that stands for itself."""
    required: bool
    kind: str


def parameters(command: Callable[..., None]) -> list[Parameter]:
    hints = get_type_hints(command, include_extras=True)
    found = []
    for name, stated in inspect.signature(command).parameters.items():
        kind, info = get_args(hints[name])[:2]
        usual = (f"--{name.replace('_', '-')}",)
        # In an annotation the first name of an option stands where its default would.
        names = tuple(each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str))
        flags = () if isinstance(info, typer.models.ArgumentInfo) else names or usual
        found.append(Parameter(name, flags, stated.default is inspect.Parameter.empty, str(kind)))
    return found


PARAMETERS = {name: parameters(command.load()) for name, command in cli.COMMANDS.items()}


def arguments(rng: random.Random, files: list[str]) -> list[str]:
    """A command and what it is given."""
    name = rng.choice(sorted(PARAMETERS))
    given = [name]
    for parameter in PARAMETERS[name]:
        if rng.random() < (0.95 if parameter.required or not parameter.flags else 0.05):
            given += [rng.choice(parameter.flags)] if parameter.flags else []
            given += [] if "bool" in parameter.kind else [_value(parameter, rng, files)]
    if rng.random() < 0.05 or name == TRAINS:
        given.append(rng.choice(("--help", "--nonsense")))
    if rng.random() < 0.05:
        rng.shuffle(given)
    return given


def _value(parameter: Parameter, rng: random.Random, files: list[str]) -> str:
    """Mostly something of the right kind."""
    if rng.random() < 0.04:
        return rng.choice(TEXTS)
    if parameter.name in SLOW:
        return rng.choice(SLOW[parameter.name])
    if "int" in parameter.kind:
        return str(rng.choice((-1, 0, 1, 2, 3, 4, 8, 16, 10**6, 10**30)))
    if "float" in parameter.kind:
        return rng.choice(("-1", "0", "0.5", "1", "2", "3.5", "1e-9", "1e30", "inf", "nan"))
    anything = (*files, "absent")
    return rng.choice(LIKELY.get(parameter.name, anything) if rng.random() < 0.7 else anything)


@contextlib.contextmanager
def _standing_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run(given: list[str]) -> object:
    """The exit code of `factorpack GIVEN`; whatever else it raises is raised."""
    before = sys.argv
    sys.argv = ["factorpack", *given]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            cli.main()
    except SystemExit as exit_:
        assert "Traceback" not in said.getvalue(), "a traceback was printed"
        return exit_.code or 0
    finally:
        sys.argv = before
    return 0


def _listing(folder: Path) -> dict[str, int]:
    """Everything under a folder but what stands in `inside`, with its time of change."""
    return {
        str(path): path.stat().st_mtime_ns
        for path in sorted(folder.rglob("*"))
        if "inside" not in path.relative_to(folder).parts
    }


def prepare(home: Path) -> Judge:
    inside = home / "inside"
    (home / "pristine").mkdir()
    pristine(home / "pristine")
    outside = _listing(home)
    files = sorted(path.name for path in (home / "pristine").iterdir())

    def judge(rng: random.Random) -> Result:
        shutil.copytree(home / "pristine", inside)
        given = arguments(rng, files)
        try:
            with _standing_in(inside):
                code = run(given)
        except Exception as error:
            error.args = (f"{error} of {given}",)
            raise
        finally:
            shutil.rmtree(inside)
            after = _listing(home)
            assert after == outside, f"{given} wrote outside its folder"
        assert code in ALLOWED, f"{given} ends with the code {code!r}"
        return f"exit {code}", 0

    return judge


TARGET = Target(prepare, seconds=CASE_SECONDS, is_measured=False)
