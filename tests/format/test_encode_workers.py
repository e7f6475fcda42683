"""Workers are processes without torch that give the same bytes, and nothing is lost with one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from factorpack.errors import FormatError
from factorpack.format import encode_ahead as ahead
from factorpack.format import encode_workers as workers
from factorpack.format.encode_ahead import encode_ahead
from factorpack.format.encode_workers import encode_codes, encode_elsewhere
from tests.format.test_encode_ahead import model


@pytest.fixture(autouse=True)
def no_workers_but_its_own() -> Iterator[None]:
    workers.stop_idle()
    yield
    workers.stop_idle()


def codes() -> np.ndarray:
    return np.random.default_rng(0).laplace(scale=2, size=(60, 50)).round().astype(np.int8)


def test_tensors_of_a_large_model_are_encoded_by_workers(monkeypatch: pytest.MonkeyPatch):
    expected = list(encode_ahead(model().items(), 1))
    monkeypatch.setattr(ahead, "_LEAST_SENT", 1000)
    monkeypatch.setattr(ahead, "_MANY", 2000)
    assert list(encode_ahead(model().items(), 2)) == expected
    assert 1 <= len(workers._idle) <= 2


def test_a_small_model_starts_none():
    list(encode_ahead(model().items(), 2))
    assert not workers.are_running()


def test_an_error_comes_back_and_the_worker_goes_on():
    with pytest.raises(FormatError) as here:
        encode_codes(codes(), 0, 8)  # no path through a trellis
    with pytest.raises(FormatError) as there:
        encode_elsewhere(codes(), 0, 8)
    assert str(there.value) == str(here.value)
    first = workers._idle[0].pid
    assert encode_elsewhere(codes(), 0, 0) == encode_codes(codes(), 0, 0)
    assert [worker.pid for worker in workers._idle] == [first]


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_a_dead_worker_had_is_encoded_here(is_gone: bool):
    """One that is gone before it is asked breaks the pipe; another ends it."""
    expected = encode_codes(codes(), 0, 0)
    encode_elsewhere(codes(), 0, 0)
    worker = workers._idle[0]
    os.kill(worker.pid, signal.SIGKILL)
    if is_gone:
        worker.wait()
    assert encode_elsewhere(codes(), 0, 0) == expected
    assert not workers.are_running()


@pytest.mark.parametrize("program", ["", "/opt/application", "/nowhere/python3"])
def test_where_no_worker_can_start_codes_are_encoded_here(program: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", program)
    assert encode_elsewhere(codes(), 0, 0) == encode_codes(codes(), 0, 0)
    assert not workers.are_running()


def test_a_worker_does_not_import_torch_and_ends_with_its_caller():
    program = workers._PROGRAM + "; assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, "1", *sys.path],
        input=b"",
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_leaves_its_parents_workers_alone():
    encode_elsewhere(codes(), 0, 0)
    child = os.fork()
    if child == 0:
        os._exit(workers.are_running())
    assert os.waitpid(child, 0)[1] == 0
    assert workers.are_running()
