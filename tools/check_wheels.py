"""Whether every dependency has a wheel for Linux, macOS and Windows and each Python: `python -m tools.check_wheels`.

pip is asked to resolve each requirement of pyproject.toml for another system, from wheels alone, without installing
anything. It asks the index that it is configured for. What has no wheel is listed, and the exit code is 1 where that
is a dependency of the plain package.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
SYSTEMS = {
    "Linux": ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"),
    "macOS": ("macosx_14_0_arm64", "macosx_12_0_arm64", "macosx_11_0_arm64"),
    "Windows": ("win_amd64",),
}
PYTHONS = ("3.11", "3.12", "3.13")
OURS = ("docs", "bench", "dev")
"""Extras of those who work on the package."""


@dataclass(frozen=True, slots=True)
class Need:
    """A requirement, and the extra that has it; none for the plain package."""

    requirement: str
    extra: str = ""


def read_needs(project: Path = PROJECT) -> list[Need]:
    """What a user installs: the package's own dependencies, then those of its extras."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    extras = {name: each for name, each in table["optional-dependencies"].items() if name not in OURS}
    return [
        *map(Need, table["dependencies"]),
        *(Need(requirement, extra) for extra, each in extras.items() for requirement in each),
    ]


def pip_command(requirement: str, system: str, python: str, folder: Path) -> list[str]:
    """What resolves one requirement for another system, and installs nothing."""
    platforms = [word for name in SYSTEMS[system] for word in ("--platform", name)]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
    where = ["--dry-run", "--ignore-installed", "--no-deps", "--target", str(folder)]
    wheels = ["--only-binary", ":all:", "--python-version", python, *platforms]
    return [sys.executable, "-m", "pip", "install", *quiet, *where, *wheels, requirement]


def find_missing(needs: Sequence[Need], pythons: Sequence[str]) -> Iterator[tuple[Need, str, str, str]]:
    """Requirements without a wheel: the system and Python that lack it, and pip's last words."""
    with tempfile.TemporaryDirectory() as folder:
        for need in needs:
            for system in SYSTEMS:
                for python in pythons:
                    command = pip_command(need.requirement, system, python, Path(folder))
                    done = subprocess.run(command, capture_output=True, text=True, check=False)
                    if done.returncode:
                        said = done.stderr.strip().splitlines() or ["pip said nothing"]
                        yield need, system, python, said[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", help="only this version; can be repeated")
    parser.add_argument("--plain", action="store_true", help="only the dependencies without any extra")
    given = parser.parse_args()
    needs = [need for need in read_needs() if not (given.plain and need.extra)]
    pythons = given.python or PYTHONS
    missing = []
    for need, system, python, said in find_missing(needs, pythons):
        missing.append(need)
        of = f"extra {need.extra}" if need.extra else "the plain package"
        print(f"no wheel: {need.requirement} ({of}) on {system}, Python {python}: {said}", flush=True)
    asked = len(needs) * len(SYSTEMS) * len(pythons)
    print(f"{len(needs)} requirements, {asked - len(missing)} of {asked} have wheels")
    sys.exit(any(not need.extra for need in missing))


if __name__ == "__main__":
    main()
