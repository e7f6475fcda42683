"""Kills commands at random moments and lets them go on: `python -m tools.kill_runs --kills 60`.

Each command runs undisturbed once. Then it is run again in an empty folder, ended at a random moment (by SIGKILL,
SIGTERM or SIGINT, alone or with its workers), started again, and so on until it ends by itself. After every kill
whatever stands under a final name must be whole. After SIGTERM and SIGINT the command has also removed its lock
and its temporary file. The end must be the undisturbed run's, byte for byte, with nothing left over. The exit
status says whether all of this held.

Commands run in children of this process, forked after its imports, so that kills hit the work.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import matplotlib.backends.backend_agg
import matplotlib.backends.backend_svg
import torch
from safetensors.torch import save_file

from benchmarks.measure import machine
from benchmarks.run import RESULTS
from factorpack.commands import app, command_line, engines, exit_on_sigterm
from factorpack.engine import Local
from factorpack.format.container import Reader
from tests.commands.test_compress_budget import wide_net
from tests.helpers import seeded
from tests.tune.small_net import build, write_images

MOST_IN_A_ROW = 12
"""Kills of one run before it is left alone: the next may be killed earlier and earlier."""
PATIENCE_S = 120.0
Ending = tuple[signal.Signals, bool]
"""A signal, and whether the workers get it too."""
ENDINGS: list[Ending] = [
    (number, group) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) for group in (True, False)
]


@dataclass(frozen=True)
class Command:
    """A command line for a folder of inputs and one of outputs, and what of its result must be the same."""

    arguments: Callable[[Path, Path], list[str]]
    content: Callable[[Path], bytes]


@dataclass
class Count:
    """What became of a command's runs."""

    kills: int = 0
    runs: int = 0
    whole_s: float = 0.0
    """An undisturbed run."""
    final_files_seen: int = 0
    """Files under a final name that stood there after a kill, each whole."""
    violations: list[str] = field(default_factory=list)


def inputs(folder: Path) -> None:
    """A checkpoint of many tensors, two small nets, and images."""
    folder.mkdir()
    many = {f"layer{n}.weight": seeded(96, 200 + n, seed=n) for n in range(10)}
    save_file(many | {f"layer{n}.bias": seeded(96, seed=n) for n in range(10)}, folder / "many.safetensors")
    save_file(build().state_dict(), folder / "small.safetensors")
    save_file(wide_net().state_dict(), folder / "wide.safetensors")
    (folder / "recipe.toml").write_text(
        '[default]\nmethod = "qspca"\nrank = 6\nlatent_bits = 4\ntile = 16\n[finetune]\nepochs = 3\n'
    )
    for split in ("train", "val"):
        write_images(folder / "data" / split, 6)


def _compress(how: list[str], given: Path, out: Path) -> list[str]:
    engine = ["--engine", "local", "--workers", "2"]
    return ["compress", str(given / "many.safetensors"), "-o", str(out / "packed.safetensors"), *how, *engine]


def _calibrated(how: list[str], given: Path, out: Path) -> list[str]:
    model = ["--model", "tests.commands.test_compress_budget:wide_net", "--image-size", "14"]
    data = ["--calibration", str(given / "data" / "train")]
    target = ["-o", str(out / "packed.safetensors")]
    return ["compress", str(given / "wide.safetensors"), *target, *how, *model, *data]


def _finetune(given: Path, out: Path) -> list[str]:
    reading = ["--data", str(given / "data"), "--image-size", "14", "--batch-size", "4", "--workers", "0"]
    how = ["--recipe", str(given / "recipe.toml"), "--model", "tests.tune.small_net:build"]
    state = ["--checkpoint-every", "2"]
    target = ["-o", str(out / "packed.safetensors")]
    return ["finetune", str(given / "small.safetensors"), *target, *how, *reading, *state]


def _compare(name: str, net: str, ratios: str, given: Path, out: Path) -> list[str]:
    model = [
        "--model",
        net,
        "--image-size",
        "14",
        "--workers",
        "0",
    ]
    grid = ["--methods", "planned,scalar,ttq", "--ratios", ratios]
    more = ["--data", str(given / "data"), "--engine", "local", "--engine-workers", "2"]
    return ["compare", str(given / f"{name}.safetensors"), "-o", str(out / "grid"), *model, *grid, *more]


def _point(path: Path) -> bytes:
    """A file as it is; of a point or a table everything but the seconds it took."""
    if path.suffix not in (".json", ".md"):
        return path.read_bytes() if path.suffix == ".safetensors" else b""
    if path.suffix == ".md":
        return b""
    document = json.loads(path.read_text())
    document.pop("checksum", None)
    for point in document.get("points", [document]):
        point.pop("compress_s")
    return json.dumps(document).encode()


COMMANDS = {
    "compress": Command(
        partial(_compress, ["--rank", "24", "--latent-bits", "4", "--set", "tile=32"]), Path.read_bytes
    ),
    "compress --ratio": Command(partial(_compress, ["--ratio", "12"]), Path.read_bytes),
    "compress --ratio --calibration": Command(partial(_calibrated, ["--ratio", "12"]), Path.read_bytes),
    "compress --max-loss": Command(partial(_calibrated, ["--max-loss", "0.01"]), Path.read_bytes),
    "finetune": Command(_finetune, Path.read_bytes),
    "compare": Command(
        partial(_compare, "wide", "tests.commands.test_compress_budget:wide_net", "4,8"), _point
    ),
    "compare a small net": Command(partial(_compare, "small", "tests.tune.small_net:build", "1.9"), _point),
}


ALL = [name for name in COMMANDS if name != "compare a small net"]  # which is "compare", for a short run


def started(arguments: list[str], log: Path) -> int:
    """A child that leads a group of its own and runs a command line; its process number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        exit_on_sigterm()
        app(arguments, standalone_mode=False)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def ended(child: int, within_s: float, ending: Ending = ENDINGS[0]) -> int | None:
    """The exit code of a child that ended in time; None of one that was killed."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    number, group = ending
    (os.killpg if group else os.kill)(child, number)
    os.waitpid(child, 0)
    _wait_for_group(child)
    return None


def _wait_for_group(group: int) -> None:
    """Workers are not our children: they are gone once the group is."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.002)


def finals(folder: Path) -> dict[str, Path]:
    """Files under names of their own: not hidden, not parts, not a run's state."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    hidden = [path for path in found if any(part.startswith(".") for part in path.relative_to(folder).parts)]
    state = [path for path in found if path.suffix in (".part", ".checkpoint", ".log")]
    return {str(path.relative_to(folder)): path for path in found if path not in (*hidden, *state)}


def expected_of(command: Command, given: Path, folder: Path, count: Count) -> dict[str, bytes]:
    """What an undisturbed run makes, and how long it takes once files are warm; two must agree."""
    made = []
    log = folder.with_suffix(".log")
    for each in (folder, folder.with_name(f"{folder.name}-again")):
        each.mkdir()
        begun = time.perf_counter()
        if ended(started(command.arguments(given, each), log), PATIENCE_S) != 0:
            raise SystemExit(f"undisturbed it fails already: {log.read_text()[-2000:]}")
        count.whole_s = round(time.perf_counter() - begun, 2)
        made.append({name: command.content(path) for name, path in finals(each).items()})
    assert made[0] == made[1], "a run is not the same twice"
    return made[0]


def disturbed(
    name: str,
    command: Command,
    given: Path,
    folder: Path,
    expected: dict[str, bytes],
    draw: random.Random,
    count: Count,
    in_a_row: int,
) -> None:
    """One run, killed and started again until it ends by itself, or has been killed `in_a_row` times."""
    folder.mkdir()
    log = folder.with_suffix(".log")
    count.runs += 1
    for row in range(in_a_row + 1):
        done = set(finals(folder)) == set(expected)  # a run that has ended would only begin anew
        within = PATIENCE_S if done or row == in_a_row else draw.uniform(0.02, 1.1 * count.whole_s)
        ending, before = draw.choice(ENDINGS), set(folder.glob(".*"))
        code = ended(started(command.arguments(given, folder), log), within, ending)
        if code is None:
            count.kills += 1
            if ending[0] != signal.SIGKILL:
                left = sorted(path.name for path in set(folder.glob(".*")) - before)
                count.violations += [f"{name}: {ending[0].name} leaves {left}"] if left else []
            count.violations += [
                f"{name}: {problem}" for problem in _problems(command, folder, expected, count)
            ]
            continue
        if code != 0:
            count.violations.append(f"{name}: started again it fails: {log.read_text()[-1500:]}")
        break
    found = {each: command.content(path) for each, path in finals(folder).items()}
    if found != expected:
        differ = sorted(each for each in {*found, *expected} if found.get(each) != expected.get(each))
        count.violations.append(f"{name}: ends with other files {differ}")
    litter = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    litter = sorted(set(litter) - set(expected))
    if litter:
        count.violations.append(f"{name}: leaves {litter}")


def _problems(command: Command, folder: Path, expected: dict[str, bytes], count: Count) -> list[str]:
    """What stands under a final name and is not whole, or not what it should be."""
    problems = []
    for name, path in finals(folder).items():
        count.final_files_seen += 1
        try:
            if path.suffix == ".safetensors":
                Reader(path)
            if command.content(path) != expected[name]:
                problems.append(f"{name} is another file than it should be")
        except Exception as error:
            problems.append(f"{name} is not whole: {error!r}")
    return problems


def _import_for_children() -> None:
    """What a command imports on its way, once here and not in each child."""
    torch.optim.Adam([torch.zeros(1)])
    assert accelerate.__version__
    assert matplotlib.__version__
    for name in ("compress", "finetune", "compare"):
        command_line(name)


def run(kills: int, seed: int, commands: list[str], in_a_row: int = MOST_IN_A_ROW) -> dict[str, Any]:
    """At least `kills` kills, the same number for each command."""
    torch.set_num_threads(1)  # a forked child has no other threads
    _import_for_children()
    engines.ENGINES["local"] = partial(Local, start="fork")
    draw = random.Random(seed)
    counts = {name: Count() for name in commands}
    with tempfile.TemporaryDirectory(prefix="factorpack-kills-") as place:
        given = Path(place) / "given"
        inputs(given)
        for name, count in counts.items():
            command = COMMANDS[name]
            expected = expected_of(command, given, Path(place) / name, count)
            while count.kills * len(commands) < kills:
                folder = Path(place) / f"{name}{count.runs}"
                disturbed(name, command, given, folder, expected, draw, count, in_a_row)
    return {name: vars(count) for name, count in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", nargs="+", default=ALL, choices=list(COMMANDS))
    parser.add_argument("--in-a-row", type=int, default=MOST_IN_A_ROW, help="most kills of one run")
    parser.add_argument("--results", type=Path, default=RESULTS / "kills")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    found = run(arguments.kills, arguments.seed, arguments.commands, arguments.in_a_row)
    document = {
        "command": f"python -m tools.kill_runs --kills {arguments.kills} --seed {arguments.seed}",
        "machine": machine(),
        "seconds": round(time.perf_counter() - begun, 1),
        "kills": sum(count["kills"] for count in found.values()),
        "result": found,
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / f"seed{arguments.seed}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))
    sys.exit(any(count["violations"] for count in found.values()))


if __name__ == "__main__":
    main()
