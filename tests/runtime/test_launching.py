from __future__ import annotations

from typing import Any

import pytest
import torch

from factorpack.runtime import launching
from factorpack.runtime.launching import Prepared


class Kernel:
    """Compiles to itself, and notes every launch."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, is_interpreted: bool = False) -> None:
        self.first: list[Any] = []
        self.again: list[Any] = []
        self.is_interpreted = is_interpreted

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: object, **settings: object) -> Kernel | None:
            self.first.append((grid, arguments, settings))
            return None if self.is_interpreted else self

        return launch

    def run(self, *arguments: object) -> None:
        self.again.append(arguments)


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "current_stream", lambda _: 77)


def prepared(kernel: Kernel) -> Prepared:
    return Prepared(kernel, (3, 2, 1), (10, 20), {"N": 5, "EVEN": True}, {"num_warps": 4})


def test_what_was_compiled_is_launched_with_the_same_arguments() -> None:
    kernel = Kernel()
    one, two = torch.zeros(8), torch.ones(8)
    launch = prepared(kernel)
    launch.launch(one, None)
    assert kernel.first == [((3, 2, 1), (one, None, 10, 20), {"N": 5, "EVEN": True, "num_warps": 4})]
    run = launch.launch(two, None)
    before = (3, 2, 1, 77, "function", "metadata", None, None, None)
    assert kernel.again == [(*before, two, None, 10, 20, 5, True)]
    assert run is not None
    run(78, one, None)
    assert kernel.again[1] == (3, 2, 1, 78, *before[4:], one, None, 10, 20, 5, True)
    assert len(kernel.first) == 1


@pytest.mark.parametrize("other", [torch.zeros(8, dtype=torch.float16), torch.zeros(9)[1:], None])
def test_another_type_or_place_is_compiled_again(other: torch.Tensor | None) -> None:
    kernel = Kernel()
    launch, first = prepared(kernel), torch.zeros(8)
    launch.launch(first, first)
    launch.launch(first, other)
    assert (len(kernel.first), len(kernel.again)) == (2, 0)
    launch.launch(first, other)
    assert (len(kernel.first), len(kernel.again)) == (2, 1)


def test_the_interpreter_starts_anew_each_time() -> None:
    kernel = Kernel(is_interpreted=True)
    launch = prepared(kernel)
    assert launch.launch(torch.zeros(8)) is None
    launch.launch(torch.zeros(8))
    assert len(kernel.first) == 2


def test_a_triton_that_takes_other_arguments_launches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, tensor = Kernel(), torch.zeros(8)
    monkeypatch.setattr(kernel, "run", lambda _: None)
    launch = prepared(kernel)
    launch.launch(tensor)
    launch.launch(tensor)
    assert kernel.first == 2 * [((3, 2, 1), (tensor, 10, 20), {"N": 5, "EVEN": True, "num_warps": 4})]
