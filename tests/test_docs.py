"""What the documents say must be true: code blocks run, tables are what the results say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import factorpack
from factorpack.model import DEFAULT_METHOD
from factorpack.plan.families import FAMILIES
from factorpack.plan.recipe import KEYS, recipe_from

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "name", [found.name for found in pkgutil.walk_packages(factorpack.__path__, "factorpack.")]
)
def test_examples_in_docstrings(name: str) -> None:
    if name.endswith("_triton"):
        pytest.importorskip("triton", reason="the kernel needs triton, which comes with CUDA builds of torch")
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_method_that_docs_add_keeps_the_contract() -> None:
    text = (ROOT / "docs" / "adding-a-method.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    code = (
        block[1]
        + "\nencoded = Half().encode(torch.ones(3, 2))\nassert factorpack.decode(encoded).shape == (3, 2)\n"
    )
    subprocess.run([sys.executable, "-c", "import factorpack\n" + code], check=True)


def test_the_recipe_that_docs_show_is_one() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    block = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert block is not None
    shown = tomllib.loads(block[1])
    assert set(shown) == set(KEYS), "the example has every key there is"
    recipe_from(block[1], DEFAULT_METHOD, "docs/recipes.md")
    for name in (*KEYS, *FAMILIES):
        assert f"`{name}`" in text, f"docs/recipes.md does not say what {name} is"


def test_the_tables_are_what_the_results_say() -> None:
    subprocess.run([sys.executable, "-m", "benchmarks.tables", "--check"], check=True, cwd=ROOT)


def test_readme_names_the_test_command() -> None:
    assert "make test" in (ROOT / "README.md").read_text()
    assert "make test" in (ROOT / ".ci" / "run").read_text()
