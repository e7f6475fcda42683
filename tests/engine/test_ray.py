"""The Ray engine, on a cluster of two workers that it starts itself; skipped where ray is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from factorpack.engine import Ray, Task
from factorpack.errors import EngineError, PlanError, WeightError
from tests.engine import works
from tests.engine.test_calibrated import compress

pytestmark = pytest.mark.filterwarnings("ignore")  # ray's own, of which there are many


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One cluster for all tests: each would take seconds to start."""
    ray = pytest.importorskip("ray", reason="the engine 'ray' needs the extra of that name")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
class TestOnACluster:
    def test_every_task_is_run_once(self) -> None:
        tasks = [Task(str(number), works.doubled, (number,), memory_bytes=number) for number in range(9)]
        found = sorted((outcome.task.name, outcome.value) for outcome in Ray().run(tasks))
        assert found == [(str(number), 2 * number) for number in range(9)]

    def test_more_memory_than_there_is_does_not_wait_for_ever(self) -> None:
        (outcome,) = Ray(workers=1).run([Task("large", works.threads, memory_bytes=1 << 60)])
        assert outcome.value == 1

    def test_an_error_is_raised_as_it_was_with_the_name(self) -> None:
        with pytest.raises(WeightError, match="no code can stand for NaN") as caught:
            list(Ray().run([Task("conv.weight", works.refused, ("NaN",))]))
        assert caught.value.__notes__ == ["in a worker on 'conv.weight'"]

    def test_a_dead_worker_is_replaced(self, tmp_path: Path) -> None:
        (outcome,) = Ray(retries=1).run([Task("fragile", works.dies, (tmp_path, 1))])
        assert outcome.value == "alive"

    def test_a_task_that_kills_every_worker_is_given_up(self, tmp_path: Path) -> None:
        with pytest.raises(
            EngineError, match=r"'fragile': its worker died 2 times, .* with this error from Ray"
        ):
            list(Ray(retries=1).run([Task("fragile", works.dies, (tmp_path, 9))]))

    def test_a_calibrated_budget_has_the_bytes_of_one_process(self, tmp_path: Path) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        alone, spread = (compress(tmp_path / str(each), "text", each) for each in (None, Ray(2)))
        torch.set_num_threads(before)
        assert spread == alone


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"pip install 'factorpack\[ray\]'"):
        list(Ray().run([Task("one", works.threads)]))


def test_settings() -> None:
    with pytest.raises(PlanError, match="workers -2"):
        Ray(-2)
