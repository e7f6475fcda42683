"""What is imported where nothing was: the package is light and quiet, and a reader needs no compressor.

One new interpreter runs every case in a child, those that must not import torch before it does so itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Set
from pathlib import Path

import torch

import factorpack as fp

HEAVY = {"matplotlib", "triton", "transformers", "sklearn", "typer", "rich", "onnx", "onnxscript"}
COMPRESSOR = {
    "budget",
    "calibration",
    "comparison",
    "compression",
    "digits",
    "engine",
    "hub",
    "methods",
    "onnx",
    "passes",
    "per_tensor",
    "planning",
    "report",
    "solve",
    "source",
    "tune",
}

PROGRAM = """
import json, os, sys, traceback

def run(case):
    if "words" in case:
        from factorpack.commands import main
        sys.argv = ["factorpack", *case["words"]]
        try:
            main()
        except SystemExit as ended:
            assert not ended.code, ended.code
    else:
        exec(case["code"], {})
    sys.stdout.flush()
    rooms = {name.split(".")[1] for name in sys.modules if name.startswith("factorpack.")}
    assert rooms >= set(case["needed"]), rooms
    assert not rooms & set(case["unwanted_rooms"]), rooms & set(case["unwanted_rooms"])
    assert not set(case["unwanted"]) & set(sys.modules), set(case["unwanted"]) & set(sys.modules)

failed = {}
for name, case in json.load(sys.stdin).items():
    if "torch" not in case["unwanted"]:
        import torch  # once, not in every child
    child = os.fork()
    if not child:
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), 1)
        os.dup2(1, 2)
        try:
            run(case)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    said = [] if os.waitpid(child, 0)[1] == 0 else ["failed"]
    if said or case["quiet"]:
        failed[name] = said + open(name).read().splitlines()
print(json.dumps({name: said for name, said in failed.items() if said}))
"""

COMPRESS = "import torch, factorpack as fp\nfp.compress(torch.nn.Linear(8, 8), fp.Scalar(4)).state_dict()"
READ = """
import torch
import factorpack as fp

packed = fp.load("small.safetensors")
state = packed.state_dict()
model = torch.nn.Sequential(torch.nn.Linear(32, 24), torch.nn.Linear(24, 10))
packed.apply(model, "packed")
assert model(torch.ones(2, 32)).shape == (2, 10)
"""
DECODE = "import factorpack as fp\nfp.load('small.safetensors').state_dict()"
WEIGHT = """
import sys, torch
alone = len(sys.modules)
import factorpack as fp
fp.load, fp.save, fp.Packed
reading = len(sys.modules)
fp.compress, fp.plan, fp.methods
assert reading <= 1.1 * alone, (reading, alone)
assert len(sys.modules) <= 1.25 * alone, (len(sys.modules), alone)
"""
"""Modules are counted, because seconds depend on the machine: few beside torch's own."""
COMMANDS_USE = {"typer", "rich"}, {"report", "source"}


def case(
    unwanted: Set[str], rooms: Set[str] = COMPRESSOR, quiet: bool = False, **more: object
) -> dict[str, object]:
    lists = {"unwanted": sorted(unwanted), "unwanted_rooms": sorted(rooms)}
    return {"quiet": quiet, "needed": ["version"], **lists, **more}


def command(*words: str, unwanted: Set[str] = frozenset()) -> dict[str, object]:
    modules, rooms = COMMANDS_USE
    return case(HEAVY - modules | unwanted, COMPRESSOR - rooms | {"runtime"}, words=words)


CASES = {
    "import": case(HEAVY | {"torch"}, quiet=True, code="import factorpack"),
    "--help": command("--help", unwanted={"torch"}),
    "--version": command("--version", unwanted={"torch"}),
    "compress": case(HEAVY, set(), quiet=True, code=COMPRESS),
    "read": case(
        HEAVY, COMPRESSOR | {"commands"}, quiet=True, code=READ, needed=["packed", "format", "runtime"]
    ),
    "decode a file": case(HEAVY, COMPRESSOR | {"commands", "runtime"}, quiet=True, code=DECODE),
    "few modules": case(HEAVY, set(), quiet=True, code=WEIGHT),
    "inspect": command("inspect", "small.safetensors"),
    "decode": command("decode", "small.safetensors", "-o", "out.safetensors"),
    "verify": command("verify", "small.safetensors"),
}


def test_nothing_is_imported_that_is_not_needed(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 24), torch.nn.Linear(24, 10))
    fp.save(fp.compress(model, fp.Scalar(4), progress=False), tmp_path / "small.safetensors")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        cwd=tmp_path,
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}
    assert (tmp_path / "out.safetensors").exists()


def test_the_list_names_modules_that_exist() -> None:
    home = Path(fp.__file__).parent
    assert all((home / name).is_dir() or (home / f"{name}.py").is_file() for name in COMPRESSOR)
