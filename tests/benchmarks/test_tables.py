"""The driver of the tables finds what is wrong with a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.formatting import RESULTS, format_source, load_result
from benchmarks.run import EXPERIMENTS, STUDIES

OPEN, CLOSE = "<!-- speed: python -m benchmarks.tables -->\n", "<!-- /speed -->\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OPEN, "without their opening or closing line: speed"),
        (CLOSE, "without their opening or closing line: speed"),
        (OPEN + OPEN + CLOSE, "without their opening or closing line: speed"),
        (OPEN + "<!-- /sped -->\n", "without their opening or closing line: sped, speed"),
        (OPEN + CLOSE + "<!-- sped: x -->\n<!-- /sped -->", "no study writes the blocks sped"),
        ("", "no page has the blocks speed"),
    ],
)
def test_a_page_with_a_broken_block_is_refused(text: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        tables.check_names(text, ["speed"])


def test_one_block_may_be_on_two_pages() -> None:
    tables.check_names(2 * (OPEN + "a table\n" + CLOSE), ["speed"])


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A README with one block that is not up to date."""
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "collect_tables", lambda: {"speed": lambda: "new\n"})
    found = tmp_path / "README.md"
    found.write_text(f"before\n{OPEN}old\n{CLOSE}after\n")
    return found


def test_check_reports_a_stale_table_and_writes_nothing(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tables", "--check"])
    with pytest.raises(SystemExit, match=r"stale tables in README\.md"):
        tables.main()
    assert "old" in page.read_text()


def test_a_stale_table_is_rewritten(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tables"])
    tables.main()
    assert page.read_text() == f"before\n{OPEN}new\n{CLOSE}after\n"
    monkeypatch.setattr("sys.argv", ["tables", "--check"])
    tables.main()


def test_every_table_ends_its_last_line() -> None:
    assert all(table().endswith("\n") for table in tables.collect_tables().values())


def test_a_table_says_where_it_comes_from() -> None:
    line = format_source(load_result("speed", "resnet18"))
    assert line.startswith("`python -m benchmarks.run benchmarks/experiments/speed/resnet18.toml` on ")


def test_every_experiment_has_a_study_and_the_readme_lists_it() -> None:
    assert {folder.name for folder in EXPERIMENTS.iterdir()} == set(STUDIES)
    readme = (RESULTS.parent / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", readme, re.MULTILINE)) == set(STUDIES)
