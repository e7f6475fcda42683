"""The same budget twice: the same bytes on a CPU; with other threads, only sums are rounded otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import factorpack as fp
from factorpack.budget.journal import Finished, Journal
from tests.budget.test_journal import language_model, net, tokens
from tests.helpers import seeded

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]]]] = {
    "images": (net, lambda: [seeded(8, 3, 24, 24), seeded(8, 3, 24, 24, seed=1)]),
    "text": (language_model, tokens),
}


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for each in value.values():
            yield from numbers_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from numbers_in(each)
    elif value is not None:
        yield float(value)


@pytest.mark.parametrize("case", CASES)
def test_what_threads_change(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sensitivities, curves and divergences are sums over tensors, which threads divide."""
    make, data = CASES[case]
    keep = Journal.keep
    runs: list[list[tuple[str, list[float]]]] = []

    def watched(mine: Journal, name: str, finished: Finished, *more: Any) -> None:
        runs[-1].append((name, list(numbers_in(finished.document))))
        keep(mine, name, finished, *more)

    monkeypatch.setattr(Journal, "keep", watched)
    files = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        runs.append([])
        path = tmp_path / f"{len(runs)}"
        fp.compress(make(), calibration=data(), ratio=6.0, to=path, progress=False)
        files.append(path.read_bytes())
    assert files[1] == files[2]
    assert runs[1] == runs[2]
    planned = [name for name, _ in runs[0]].index("curves")
    for (name, one), (other_name, two) in zip(runs[0][:planned], runs[1][:planned], strict=True):
        assert name == other_name
        assert two == pytest.approx(one, rel=1e-4)
