"""Tensors are read and made in advance: in the order that takes least time, and within memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import factorpack as fp
from factorpack.errors import FormatError
from factorpack.format.container import Reader
from factorpack.format.tensor_source import TensorSource
from factorpack.record import Encoded
from factorpack.runtime import candidates
from factorpack.runtime.candidates import Makers
from factorpack.runtime.fill import Filler, on_cpu
from tests.helpers import assert_same_tensor

WIDTHS = [8, 16, 40, 24, 32, 12, 20]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, width, bias=False) for width in WIDTHS))


@pytest.fixture
def source(model: nn.Module, tmp_path: Path) -> TensorSource:
    fp.save(fp.compress(model, fp.Scalar(4), progress=False), tmp_path / "file")
    return TensorSource(Reader(tmp_path / "file"))


@pytest.fixture
def makers(
    model: nn.Module, source: TensorSource, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Makers]:
    monkeypatch.setattr(candidates, "WORTH_A_THREAD", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def made(mode: str) -> Makers:
        forms = dict.fromkeys(source, "packed") if mode == "packed" else {}
        plain = {name: [] if name in forms else [name] for name in source}
        return Makers(source, Filler(model, on_cpu), mode, False, forms, plain)

    return made


def test_what_is_held_until_it_is_filled_in_is_read_as_it_is_needed(
    makers: Callable[[str], Makers], source: TensorSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, waiting = [], threading.Semaphore(0)
    read = Reader.__getitem__

    def noted(self: Reader, name: str) -> Encoded:
        started.append(name)
        waiting.release()
        return read(self, name)

    monkeypatch.setattr(Reader, "__getitem__", noted)
    names = list(source)
    made = makers("dense").ahead(names)
    encoded, weight = next(made)
    assert encoded is not None
    assert weight is None
    next(made)
    for _ in range(3):  # the two that were asked for, and the one that was begun when the first was taken
        assert waiting.acquire(timeout=30)
    assert not waiting.acquire(timeout=0.5)
    assert set(started) == set(names[:3])
    made.close()


def test_the_largest_is_begun_first_where_nothing_is_held(
    makers: Callable[[str], Makers], source: TensorSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    started: list[str] = []
    work = Makers._made
    monkeypatch.setattr(Makers, "_made", lambda self, name: started.append(name) or work(self, name))
    names = list(source)
    found = list(makers("packed").ahead(names))
    assert sorted(started) == sorted(names)
    assert set(started[:2]) <= {names[number] for number in (2, 4, 3)}
    for name, (encoded, weight) in zip(names, found, strict=True):
        assert encoded is None
        assert weight is not None
        for part, values in source.read(name).parts.items():
            assert_same_tensor(weight.part(part).contiguous(), values)


def test_an_error_ends_all_of_them(
    makers: Callable[[str], Makers], source: TensorSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list(source)
    read = TensorSource.read

    def fail(self: TensorSource, name: str) -> Encoded:
        if name == names[1]:
            raise FormatError("damaged")
        return read(self, name)

    monkeypatch.setattr(TensorSource, "read", fail)
    made = makers("packed").ahead(names)
    next(made)
    with pytest.raises(FormatError, match="damaged"):
        next(made)
