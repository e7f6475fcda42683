"""What the table of ingredients says of rows that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.studies import ingredients


def rows(name: str, *divergences: tuple[float, float]) -> list[dict[str, object]]:
    """A planner at three seeds, each at two ratios."""
    return [
        {"name": name, "seed": seed, "ratio": ratio, "file_ratio": ratio, "divergence": nats}
        for seed, pair in enumerate(divergences)
        for ratio, nats in zip((10.0, 14.0), pair, strict=True)
    ]


def test_a_change_is_the_geometric_mean_over_seeds_and_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        *rows("everything", (0.1, 1.0), (0.2, 2.0), (0.3, 3.0)),
        *rows("less", (0.2, 2.0), (0.4, 4.0), (0.6, 6.0)),
        *rows("mixed", (0.2, 0.5), (0.2, 2.0), (0.3, 3.0)),
    ]
    document = {
        "command": "python -m benchmarks.run it",
        "machine": {"cpu": "a CPU", "cores": 2, "torch": "2.13.0"},
        "result": {"rows": found},
    }
    (tmp_path / "ingredients").mkdir()
    (tmp_path / "ingredients" / "resnet18.json").write_text(json.dumps(document))
    monkeypatch.setattr("benchmarks.formatting.RESULTS", tmp_path)
    head, _, base, less, mixed, *_ = ingredients.tabulate().splitlines()
    assert head.startswith("| model | planner |")
    assert base == "| ResNet18 | everything | 10x: 0.2000 ± 0.1000 | 14x: 2.0000 ± 1.0000 |  |"
    assert less.endswith("| +100 % ± 0 % |")
    assert mixed.endswith("| +0 % ± 18 % |")


def test_without_results_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.formatting.RESULTS", tmp_path)
    assert ingredients.tabulate().startswith("Not stored yet: ")
