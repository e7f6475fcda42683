"""`factorpack methods`."""

from __future__ import annotations

import json

from factorpack.methods import METHODS
from tests.commands.running import ok


def test_every_method_with_its_settings() -> None:
    listed = ok("methods").splitlines()
    assert set(METHODS) <= set(listed)
    assert "  bits=8, clip=mse" in listed
    assert any(line.startswith("  rank=256, latent_bits=5, sparsity=0.0, ") for line in listed)


def test_for_programs() -> None:
    found = {each["name"]: each for each in json.loads(ok("methods", "--json"))["methods"]}
    assert list(found) == list(METHODS)
    assert all(each["about"] for each in found.values())
    assert found["scalar"]["settings"] == {
        "bits": {"expected": "a whole number", "required": False, "default": 8},
        "clip": {"expected": "'mse' or 'minmax'", "required": False, "default": "mse"},
    }
