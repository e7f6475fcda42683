"""Kills commands at random moments and lets them go on: `python -m tools.kill_runs --kills 60`.

Each command runs undisturbed once. Then it is run again in an empty folder, ended at a random moment (by SIGKILL,
SIGTERM or SIGINT, alone or with its workers), started again, and so on until it ends by itself. After every kill
whatever stands under a final name must be whole. After SIGTERM and SIGINT the command has also removed its lock
and its temporary files. The end must be the undisturbed run's, byte for byte, with nothing left over, neither
beside it nor in the temporary folder. The exit status says whether all of this held.

Commands run in children of this process, forked after its imports, so that kills hit the work.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import matplotlib.backends.backend_agg
import matplotlib.backends.backend_svg
import torch

from benchmarks.measure import machine
from benchmarks.run import RESULTS
from factorpack.commands import app, command_line, engines, exit_on_sigterm
from factorpack.commands import demo as demo_module
from factorpack.commands.demo import run_demo
from factorpack.engine import Local
from tools.killed_commands import COMMANDS, Command, inputs

MOST_IN_A_ROW = 12
"""Kills of one run before it is left alone: the next may be killed earlier and earlier."""
PATIENCE_S = 120.0
Ending = tuple[signal.Signals, bool]
"""A signal, and whether the workers get it too."""
ALL = [name for name in COMMANDS if name != "compare a small net"]  # which is "compare", for a short run
ENDINGS: list[Ending] = [
    (number, group) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) for group in (True, False)
]


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


def log_of(folder: Path) -> Path:
    return folder.with_suffix(".log")


def temporary_of(folder: Path) -> Path:
    """The temporary folder of the commands that write to `folder`."""
    return folder.with_suffix(".temporary")


def started(arguments: list[str], folder: Path) -> int:
    """A child that leads a group of its own and runs a command line; its process number."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number for number, _ in ENDINGS])
    child = os.fork()
    if child:
        os.setpgid(child, child)  # here too: whichever comes first
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary_of(folder))
        handle = os.open(log_of(folder), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        exit_on_sigterm()
        app(arguments, standalone_mode=False)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # as an interpreter would that ends by itself
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


def finals(folder: Path, kept: tuple[str, ...] = ()) -> dict[str, Path]:
    """Files under names of their own: not hidden, not parts, not a run's state, which may have the names `kept`."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    hidden = [path for path in found if any(part.startswith(".") for part in path.relative_to(folder).parts)]
    state = [path for path in found if path.suffix in (".part", ".checkpoint", ".log") or path.name in kept]
    return {str(path.relative_to(folder)): path for path in found if path not in (*hidden, *state)}


def hidden(folder: Path) -> set[Path]:
    """What a command that has ended leaves only if it was killed: hidden, or in the temporary folder."""
    return {*folder.glob(".*"), *temporary_of(folder).iterdir()}


def expected_of(command: Command, given: Path, folder: Path, count: Count) -> dict[str, bytes]:
    """What an undisturbed run makes, and how long it takes once files are warm; two must agree."""
    made = []
    for each in (folder, folder.with_name(f"{folder.name}-again")):
        each.mkdir()
        temporary_of(each).mkdir()
        begun = time.perf_counter()
        if ended(started(command.arguments(given, each), each), PATIENCE_S) != 0:
            raise SystemExit(f"undisturbed it fails already: {log_of(each).read_text()[-2000:]}")
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
    temporary_of(folder).mkdir()
    count.runs += 1
    for row in range(in_a_row + 1):
        # A run that has ended would only begin anew.
        done = expected and set(finals(folder, command.kept)) == set(expected)
        if done and command.kept and not any((folder / name).exists() for name in command.kept):
            break  # begun anew, it would refuse to write what is there
        within = PATIENCE_S if done or row == in_a_row else draw.uniform(0, 1.1 * count.whole_s)
        ending, before = draw.choice(ENDINGS), hidden(folder)
        code = ended(started(command.arguments(given, folder), folder), within, ending)
        if code is None:
            count.kills += 1
            if ending[0] != signal.SIGKILL:
                left = sorted(path.name for path in hidden(folder) - before if path.name not in command.kept)
                count.violations += [f"{name}: {ending[0].name} leaves {left}"] if left else []
            count.violations += [
                f"{name}: {problem}" for problem in _problems(command, folder, expected, count)
            ]
            continue
        if code != 0:
            count.violations.append(f"{name}: started again it fails: {log_of(folder).read_text()[-1500:]}")
        break
    found = {each: command.content(path) for each, path in finals(folder).items()}
    if found != expected:
        differ = sorted(each for each in {*found, *expected} if found.get(each) != expected.get(each))
        count.violations.append(f"{name}: ends with other files {differ}")
    litter = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - set(expected)
    litter |= {path.name for path in hidden(folder)}
    if litter:
        count.violations.append(f"{name}: leaves {sorted(litter)}")


def _problems(command: Command, folder: Path, expected: dict[str, bytes], count: Count) -> list[str]:
    """What stands under a final name and is not whole, or not what it should be."""
    problems = []
    for name, path in finals(folder, command.kept).items():
        count.final_files_seen += 1
        try:
            if command.content(path) != expected[name]:
                problems.append(f"{name} is another file than it should be")
        except Exception as error:
            problems.append(f"{name} is not whole: {error!r}")
    return problems


def _import_for_children(names: list[str]) -> None:
    """What a command imports on its way, once here and not in each child."""
    torch.optim.Adam([torch.zeros(1)])
    assert accelerate.__version__
    assert matplotlib.__version__
    for name in {arguments.split()[0] for arguments in names}:
        command_line(name)


def kill_command(
    name: str, given: Path, place: Path, kills: float, draw: random.Random, count: Count, in_a_row: int
) -> None:
    command = COMMANDS[name]
    if command.prepare is not None:
        command.prepare(given)
    expected = expected_of(command, given, place / name, count)
    while count.kills < kills:
        disturbed(name, command, given, place / f"{name}{count.runs}", expected, draw, count, in_a_row)
        shutil.rmtree(place / f"{name}{count.runs - 1}")
    print(f"{name}: {count}", file=sys.stderr, flush=True)


def run(kills: int, seed: int, commands: list[str], in_a_row: int = MOST_IN_A_ROW) -> dict[str, Any]:
    """At least `kills` kills, the same number for each command."""
    torch.set_num_threads(1)  # a forked child has no other threads
    _import_for_children(commands)
    demo_module.run_demo = partial(run_demo, ratios=(8,), images=16, epochs=1)
    engines.ENGINES["local"] = partial(Local, start="fork")
    draw = random.Random(seed)
    counts = {name: Count() for name in commands}
    place = Path(tempfile.mkdtemp(prefix="factorpack-kills-"))  # which no child removes when it ends
    try:
        given = place / "given"
        inputs(given)
        for name, count in counts.items():
            kill_command(name, given, place, kills / len(commands), draw, count, in_a_row)
    finally:
        shutil.rmtree(place)
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
