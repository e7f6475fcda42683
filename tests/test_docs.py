"""What the documents say must be true: code blocks run, tables are what the results say."""

from __future__ import annotations

import copy
import doctest
import importlib
import inspect
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import factorpack
from benchmarks.run import EXPERIMENTS, RESULTS, STUDIES
from factorpack.commands import COMMANDS, command_line
from factorpack.planning.families import DEFAULT_METHOD, FAMILIES
from factorpack.planning.recipe import KEYS, recipe_from
from tests.forking import run_forked

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES += ["README.md", "examples/README.md"]


def blocks(page: str, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [block for written_in, block in fenced if written_in == language]


def test_examples_in_docstrings() -> None:
    """Modules are found by their text, since looking through their objects takes longer than the examples."""
    home = Path(factorpack.__file__).parent
    shown = [path for path in home.rglob("*.py") if ">>>" in path.read_text() and "_triton" not in path.name]
    results = {}
    for path in shown:
        parts = path.relative_to(home.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        results[module.__name__] = doctest.testmod(module)
    assert {name: result for name, result in results.items() if result.failed} == {}
    assert sum(result.attempted for result in results.values()) >= 20


def test_every_module_can_be_imported() -> None:
    for found in pkgutil.walk_packages(factorpack.__path__, "factorpack."):
        if not found.name.endswith("_triton"):  # needs triton, which comes with CUDA builds of torch
            importlib.import_module(found.name)


def test_the_method_that_docs_add_keeps_the_contract() -> None:
    (block,) = blocks("docs/adding-a-method.md", "python")
    used = "found = factorpack.decoding.decode(Half().encode(Weight(torch.ones(3, 2))))\nassert found.eq(1).all()\n"
    run_forked([sys.executable, "-c", f"import factorpack.decoding\n{block}\n{used}"], check=True)


@pytest.mark.usefixtures("trained_once")
@pytest.mark.filterwarnings("ignore:training did not help")  # an epoch on random images need not
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page != "docs/adding-a-method.md"]
)
def test_code_on_a_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = GIVEN.get(page, images)()
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)
    if page == "README.md":
        assert 20 <= names["packed"].size().file_ratio <= 20.3
        assert names["accuracy"](names["restored"], names["test"]) > 0.97


def nothing() -> dict[str, Any]:
    pytest.importorskip("sklearn", reason="the digits need the demo extra")
    return {}


def images() -> dict[str, Any]:
    """What pages take as given: a small model of images and what to feed it with."""
    pytest.importorskip("accelerate", reason="fine-tuning needs the train extra")
    pytest.importorskip("onnxscript", reason="exporting needs the onnx extra")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 4), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10),
    ).eval()  # fmt: skip
    batches = list(torch.randn(4, 16, 3, 16, 16))
    labels = torch.randint(10, (16,))
    return {
        "fp": factorpack,
        "model": model,
        "original": copy.deepcopy(model),
        "batches": batches,
        "batch": batches[0],
        "train_batches": [(batch, labels) for batch in batches],
        "packed": factorpack.compress(model, factorpack.Scalar(bits=4), progress=False),
    }


def language_model() -> dict[str, Any]:
    """A language model packed in a folder, and batches of texts."""
    transformers = pytest.importorskip("transformers", reason="opening models needs the hf extra")
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=128, **heads)
    model = transformers.LlamaForCausalLM(config).eval()
    packed = factorpack.compress(model, factorpack.Scalar(bits=4), progress=False)
    factorpack.hub.save_pretrained(packed, "small-llama", like=model)
    return {"batches": [{"input_ids": torch.randint(96, (4, 16))} for _ in range(4)]}


GIVEN = {"README.md": nothing, "docs/hub.md": language_model}
"""What a page's code does not make itself, where it is not `images`."""


def commands() -> list[tuple[str, str]]:
    """Every `factorpack ...` that a page shows, in a block or a sentence."""
    found = []
    for page in PAGES:
        text = "\n".join(blocks(page, "")).replace("\\\n", " ")
        found += [(page, line) for line in text.splitlines() if line.startswith("factorpack ")]
        inline = re.findall(r"`(factorpack [a-z]+ [^`]+\S)`", (ROOT / page).read_text())
        found += [(page, line) for line in inline if "..." not in line and "|" not in line]
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_on_pages_have_the_options_they_use(page: str, line: str) -> None:
    words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
    assert words[0] in COMMANDS, page
    command = command_line(words[0])
    with command.make_context(words[0], ["--help"], resilient_parsing=True) as context:
        left = command.make_parser(context).parse_args(words[1:])[1]
    assert left == [], page


def test_the_reference_has_every_public_name() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    documented = {name.split(".")[-1] for name in re.findall(r"^::: (factorpack\.\S+)$", pages, re.MULTILINE)}
    assert set(factorpack.__all__) - documented == {"__version__"}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="the site needs the docs extra")
    # Not --quiet: what is not said is not counted either.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        build, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    for page, name in {
        "compress": "factorpack.compress",
        "planning": "factorpack.calibration.calibrate.calibrate",
    }.items():
        assert f'id="{name}"' in (tmp_path / "reference" / page / "index.html").read_text()


def test_the_import_order_on_the_page_is_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    order = [line.replace("factorpack.", "").replace(" | ", ", ") for line in contracts[0]["layers"]]
    assert blocks("docs/architecture.md", "") == ["".join(f"{line}\n" for line in order)]


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
    run_forked([sys.executable, "-m", "benchmarks.tables", "--check"], check=True, cwd=ROOT)


CASES = sorted(EXPERIMENTS.rglob("*.toml"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}/{case.stem}")
def test_an_experiment_fits_its_study_and_its_result_is_of_its_settings(case: Path) -> None:
    """So the command under a table makes that table."""
    settings = tomllib.loads(case.read_text())
    stored = RESULTS / case.parent.name / f"{case.stem}.json"
    if stored.exists():
        assert json.loads(stored.read_text())["settings"] == settings
    study = importlib.import_module(STUDIES[case.parent.name])
    inspect.signature(study.run).bind(**settings)


def test_readme_names_the_test_command() -> None:
    assert "make test" in (ROOT / "README.md").read_text()
    assert "make test" in (ROOT / ".ci" / "run").read_text()
