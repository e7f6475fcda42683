"""The hash-pinned requirements: complete, and of the versions that constraints.txt pins."""

from __future__ import annotations

import re
from importlib.metadata import distributions

import pytest

from tools.lock import BUILD, FILES, FOLDER, needed, read_pins


def locked(file: str) -> dict[str, tuple[str, int]]:
    """The version, and the number of hashes, of each package in a file and those it includes."""
    found: dict[str, tuple[str, int]] = {}
    for entry in re.split(r"(?<!\\)\n", (FOLDER / f"{file}.txt").read_text()):
        if entry.startswith("-r "):
            found |= locked(entry.removeprefix("-r ").removesuffix(".txt"))
        elif entry and not entry.startswith("#"):
            name, version = entry.split()[0].split("==")
            found[name] = (version, len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry)))
    return found


@pytest.mark.parametrize("file", FILES)
def test_every_package_has_the_pinned_version_and_a_hash(file: str) -> None:
    pins, found = read_pins(), locked(file)
    assert BUILD in found
    assert "torch" not in found
    assert {name: version for name, (version, _) in found.items()} == {name: pins[name] for name in found}
    assert all(hashes for _, hashes in found.values())


def test_nothing_that_is_installed_here_was_left_out() -> None:
    installed = {
        re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each.requires or [] for each in distributions()
    }
    wanted = needed(installed, FILES["dev"]) & set(installed)
    assert len(wanted) > 60
    assert wanted <= set(locked("dev"))
