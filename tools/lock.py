"""Writes requirements/*.txt: the packages that `make` installs, each with the hashes of its published files.

`python -m tools.lock` takes the versions from constraints.txt, the packages from pyproject.toml and the hashes
from the package index that pip uses. Run it after either of the two files has changed.

torch is not among them. Its builds for a CPU and for each CUDA have one version and different bytes, and pip
prefers a file whose hash is listed: it would download gigabytes for a GPU where a CPU build lies beside. So
torch, and what only its CUDA builds need, is installed by its version alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

from pip._internal.models.index import PyPI
from pip._vendor.packaging.markers import default_environment
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename
from pip._vendor.packaging.version import Version

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
FILES = {"demo": ("demo",), "dev": ("demo", "dev"), "docs": ("demo", "dev", "docs")}
"""Each file and its extras; it holds what the file before it does not."""
BY_VERSION = {"torch", "factorpack"}
BUILD = "setuptools"
"""Builds the package itself."""
PLATFORMS = ("linux", "win32", "darwin")
OLDEST = 11
"""The minor version of the oldest Python."""


def read_pins(path: Path = ROOT / "constraints.txt") -> dict[str, str]:
    """The version of each package in constraints.txt."""
    pairs = (line.partition("==") for line in path.read_text().splitlines())
    return {canonicalize_name(name): version for name, _, version in pairs}


def resolve() -> dict[str, list[str]]:
    """What each package of all extras requires, as pip resolves them here; nothing is installed."""
    extras = ",".join(FILES["docs"])
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command += ["--report", "-", "-c", str(ROOT / "constraints.txt"), f"{ROOT}[{extras}]"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    packages = [each["metadata"] for each in json.loads(done.stdout)["install"]]
    return {canonicalize_name(each["name"]): each.get("requires_dist", []) for each in packages}


def needed(requires: dict[str, list[str]], extras: Iterable[str]) -> set[str]:
    """The packages of some of factorpack's extras, on any platform."""
    found: set[tuple[str, str]] = set()
    waiting = [("factorpack", extra) for extra in extras] + [(BUILD, "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) not in found:
            found.add((name, extra))
            for line in requires.get(name, []):
                if extra or "extra ==" not in line:
                    waiting += _named(Requirement(line), extra)
    return {name for name, _ in found} - BY_VERSION


def _named(requirement: Requirement, extra: str) -> Iterator[tuple[str, str]]:
    """The package that a requirement names, and its extras, where it holds on any platform."""
    base = default_environment() | {"extra": extra}
    environments = [{**base, "sys_platform": each} for each in PLATFORMS]
    if requirement.marker is None or any(requirement.marker.evaluate(each) for each in environments):
        for each in ("", *requirement.extras):
            yield canonicalize_name(requirement.name), each


class _Links(HTMLParser):
    """The addresses on a page of the index."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for key, value in attrs if tag == "a" and key == "href" and value]


def published_hashes(name: str, version: str) -> list[str]:
    """The hashes of a release's wheels for every platform, or of its source where it has no wheel."""
    page = _Links()
    with urllib.request.urlopen(f"{PyPI.simple_url}/{name}/") as answer:
        page.feed(answer.read().decode())
    wheels, sources = set(), set()
    for link in page.found:
        address, fragment = urldefrag(link)
        file = unquote(address.rpartition("/")[2])
        if file.endswith(".whl") and _is_usable(file, version):
            wheels.add(fragment)
        elif file.endswith(f"-{version}.tar.gz"):
            sources.add(fragment)
    found = sorted(wheels or sources)
    if not found or not all(each.startswith("sha256=") for each in found):
        raise SystemExit(f"the index has no hashes for {name} {version}")
    return [each.removeprefix("sha256=") for each in found]


def _is_usable(file: str, version: str) -> bool:
    """Whether a wheel is of this version and for a Python that factorpack runs on."""
    try:
        _, found, _, tags = parse_wheel_filename(file)
    except ValueError:  # a name from before there were rules
        return False
    return found == Version(version) and any(
        tag.interpreter == "py3"
        or tag.abi == "abi3"
        or (tag.interpreter.startswith("cp3") and int(tag.interpreter[3:] or 0) >= OLDEST)
        for tag in tags
    )


def main() -> None:
    pins, requires = read_pins(), resolve()
    FOLDER.mkdir(exist_ok=True)
    written: set[str] = set()
    before = ""
    for file, extras in FILES.items():
        names = sorted((needed(requires, extras) & set(pins)) - written)
        lines = [f"# Written by tools/lock.py: do not edit.\n{before}"]
        for name in names:
            hashes = "".join(f" \\\n    --hash=sha256:{each}" for each in published_hashes(name, pins[name]))
            lines.append(f"{name}=={pins[name]}{hashes}\n")
        (FOLDER / f"{file}.txt").write_text("".join(lines))
        print(f"{file}: {len(names)} packages")
        written |= set(names)
        before = f"-r {file}.txt\n"


if __name__ == "__main__":
    main()
