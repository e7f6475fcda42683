"""Processes on this machine: what they return, and what becomes of them and of their errors."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from factorpack.commands.engines import engine_of
from factorpack.engine import Local, Task, memory, run_tasks
from factorpack.engine import local as local_engine
from factorpack.errors import EngineError, PlanError, WeightError
from factorpack.progress import ProgressUpdate
from tests.engine import works
from tests.forking import Forked

FORK = Local(workers=2, start="fork")


def values(engine: Local, tasks: Sequence[Task]) -> dict[str, object]:
    return {outcome.task.name: outcome.value for outcome in engine.run(tasks)}


def test_every_task_is_run_once() -> None:
    tasks = [Task(str(number), works.doubled, (number,)) for number in range(20)]
    found = [(outcome.task.name, outcome.value) for outcome in FORK.run(tasks)]
    assert sorted(found) == sorted((str(number), 2 * number) for number in range(20))
    assert list(FORK.run([])) == []


def test_new_interpreters_have_one_thread_and_tell_their_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")  # else every interpreter would have one
    tasks = [Task("threads", works.threads), Task("process", works.process)]
    (first, second) = Local(workers=1).run(tasks)
    assert {first.task.name: first.value, second.task.name: second.value}["threads"] == 1
    assert first.worker == second.worker != f"{os.uname().nodename}:{os.getpid()}"
    assert second.peak_bytes >= first.peak_bytes > 10e6


def test_an_error_is_raised_as_it_was_with_the_name() -> None:
    with pytest.raises(WeightError, match="no code can stand for NaN") as caught:
        list(FORK.run([Task("conv.weight", works.refused, ("NaN",))]))
    assert caught.value.__notes__ == ["in a worker on 'conv.weight'"]


def test_an_error_that_cannot_travel_is_told_in_words() -> None:
    with pytest.raises(RuntimeError, match="Odd: 1 and 2") as caught:
        list(FORK.run([Task("conv.weight", works.odd)]))
    assert "in odd" in "".join(caught.value.__notes__), "the worker's own trace"


def test_a_dead_worker_is_replaced(tmp_path: Path) -> None:
    tasks = [Task("fragile", works.dies, (tmp_path, 2)), Task("other", works.doubled, (4,))]
    assert values(FORK, tasks) == {"fragile": "alive", "other": 8}


def test_deaths_are_counted_by_task_and_not_by_name(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    tasks = [Task("planned", works.dies, (folder, 1)) for folder in folders]
    assert [outcome.value for outcome in FORK.run(tasks)] == ["alive"] * 3


def test_a_task_that_kills_every_worker_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"'fragile': its worker died 3 times, .* killed \(SIGKILL\)"):
        values(FORK, [Task("fragile", works.dies, (tmp_path, 9))])
    assert len(list(tmp_path.iterdir())) == 3


def log_of(path: Path) -> list[str]:
    return path.read_text().split()


def test_the_largest_begin_first(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tasks = [Task(str(size), works.noted, (log, str(size)), memory_bytes=size) for size in (2, 3, 1)]
    values(Local(workers=1, start="fork"), tasks)
    assert log_of(log) == ["+3", "-3", "+2", "-2", "+1", "-1"]


@pytest.mark.parametrize(("free", "together"), [(100, False), (1000, True), (None, True)])
def test_tasks_that_do_not_fit_beside_each_other_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int | None, together: bool
) -> None:
    monkeypatch.setattr(local_engine, "free_bytes", lambda: free)
    log = tmp_path / "log"
    # Of 80 bytes one takes 50; the second fits beside it only where there is more. 500 never fit, and run.
    for sizes in [(50, 50), (500, 500)]:
        log.unlink(missing_ok=True)
        tasks = [Task(f"{n}", works.noted, (log, f"{n}", 0.2), size) for n, size in enumerate(sizes)]
        values(FORK, tasks)
        starts = [line[0] for line in log_of(log)]
        assert starts == (
            ["+", "+", "-", "-"] if together and (free is None or sizes[0] == 50) else [*"+-+-"]
        )


def test_free_memory_is_known_here() -> None:
    assert 0 < (memory.free_bytes() or 0) < 1 << 50


def test_a_container_has_no_more_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    whole = memory.free_bytes()
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert memory.free_bytes() == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert (memory.free_bytes() or 0) > (whole or 0) // 2


def test_workers_of_a_killed_driver_end(tmp_path: Path) -> None:
    """Also those forked after each other, which hold each other's pipes open."""
    code = (
        "import sys, pathlib; from factorpack.engine import Local, Task; from tests.engine import works\n"
        "log = pathlib.Path(sys.argv[1])\n"
        "tasks = [Task(str(n), works.noted, (log, str(n), 0.5)) for n in range(9)]\n"
        "list(Local(workers=3, start='fork').run(tasks))"
    )
    log = tmp_path / "log"
    driver = Forked([sys.executable, "-c", code, log], cwd=Path(__file__).parents[2])
    while not log.exists() or len(log_of(log)) < 4:
        time.sleep(0.05)
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
    assert len(children) == 3
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


def test_a_run_that_is_left_early_leaves_no_worker() -> None:
    running = FORK.run([Task(str(number), works.process) for number in range(5)])
    worker = int(next(running).value)
    running.close()  # type: ignore[attr-defined]
    assert not Path(f"/proc/{worker}").exists()


def test_kept_workers_stay_and_give_only_what_was_asked() -> None:
    with FORK.keep() as kept:
        first, second = ([outcome.value for outcome in kept.run([Task("a", works.process)])] for _ in "12")
        assert first == second
        left = kept.run([Task(str(number), works.doubled, (number,)) for number in range(9)])
        next(left)
        left.close()  # type: ignore[attr-defined]
        assert [outcome.value for outcome in kept.run([Task("b", works.doubled, (50,))])] == [100]
        last = [outcome.value for outcome in kept.run([Task("c", works.process)])]
    assert not Path(f"/proc/{last[0]}").exists()


def test_workers_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", works.GPUS.append)
    found = list(Local(4, start="fork").run([Task(str(n), works.gpu, on_gpu=True) for n in range(4)]))
    assert {outcome.value for outcome in found} == {0, 1}
    assert len({outcome.worker for outcome in found}) == 2, "no more workers than GPUs"


def test_names_and_settings() -> None:
    assert engine_of(None, 0) is None
    assert engine_of("local", 3) == Local(3)
    with pytest.raises(PlanError, match=r"unknown engine 'dask', known are local, ray"):
        engine_of("dask", 0)
    with pytest.raises(PlanError, match="2 workers need an engine"):
        engine_of(None, 2)
    with pytest.raises(PlanError, match="workers -1"):
        Local(-1)


def test_a_bar_counts_what_tasks_say() -> None:
    seen: list[ProgressUpdate] = []
    tasks = [Task("one", works.doubled, (1,), size=5), Task("two", works.doubled, (2,), size=15)]
    found = {outcome.task.name: outcome.value for outcome in run_tasks(FORK, tasks, "doubling", seen.append)}
    assert found == {"one": 2, "two": 4}
    first = seen[1]
    assert first.fraction == {"one": 0.25, "two": 0.75}[first.item]
    assert [update.phase for update in seen] == ["doubling"] * 3 + ["done"]
