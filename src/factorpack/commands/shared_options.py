"""Options that every command takes, and what they do: `--quiet` and `--threads`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any

import typer

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing but errors, and what --json prints.")
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Cores to keep busy at most, so that the machine stays usable. Default: all. With --engine, workers "
        "are limited by --workers.",
        min=1,
        show_default=False,
    ),
]
SHARED: dict[str, tuple[Any, Any]] = {"threads": (Threads, None), "quiet": (Quiet, False)}
"""Names, types and defaults."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_QUIET = ContextVar("quiet", default=False)


def is_quiet() -> bool:
    """Whether the command that runs was told to print nothing."""
    return _QUIET.get()


def shows_bar(as_json: bool) -> bool:
    """Whether a command shows a progress bar, on a terminal."""
    return not (as_json or is_quiet())


def with_shared_options(function: Callable[..., None]) -> Callable[..., None]:
    """A command that also takes the options of all commands."""

    def run(threads: int | None, quiet: bool, **given: Any) -> None:
        with _quiet(quiet), limited_threads(threads):
            function(**given)

    signature = inspect.signature(function, eval_str=True)
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in SHARED.items()
    ]
    parameters = [*signature.parameters.values(), *shared]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__, run.__name__ = function.__doc__, function.__name__
    return run


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    before = _QUIET.set(quiet)
    try:
        yield
    finally:
        _QUIET.reset(before)


@contextmanager
def limited_threads(threads: int | None) -> Iterator[None]:
    """Work in this process, and in those that it starts, keeps no more cores busy."""
    if threads is None:
        yield
        return
    import torch

    before = torch.get_num_threads(), {name: os.environ.get(name) for name in THREAD_VARIABLES}
    torch.set_num_threads(threads)
    os.environ |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        for name, value in before[1].items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
