"""The processes of a run, by accelerate."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from factorpack.errors import SourceError

Value = TypeVar("Value")


def require_accelerate() -> None:
    """An error where the package that training needs is absent, before there is work to lose."""
    try:
        importlib.import_module("accelerate")
    except ImportError as error:
        raise SourceError("fine-tuning needs accelerate: pip install 'factorpack[train]'") from error


def open_accelerator(precision: str) -> Any:
    require_accelerate()
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState

    # accelerate keeps the precision of a process's first run, and refuses another one later.
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()
    # Split batches, so that a step has the same number of samples for any number of processes.
    loading = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    return Accelerator(mixed_precision=precision, dataloader_config=loading)


def is_main_process() -> bool:
    """Whether this is the main process of a run: all have the result, one should write it."""
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


def compute_once(work: Callable[[], Value]) -> Value:
    """The main process's result in all of them: on a GPU each might find another one."""
    from accelerate.utils import broadcast_object_list

    found: list[Any] = [work() if is_main_process() else None]
    broadcast_object_list(found)
    result: Value = found[0]
    return result
