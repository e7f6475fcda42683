"""`factorpack bench`: what each way of running a packed file costs compared with the FP32 model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.table import Table
from torch import Tensor, nn

from factorpack.commands.console import print_json, print_table
from factorpack.commands.options import Json, MaxMemory, Model, PackedFile
from factorpack.errors import PlanError
from factorpack.model_reference import import_model
from factorpack.packed import load
from factorpack.report.text import human_bytes
from factorpack.runtime.apply import MODES, Applied, Mode, resident_bytes
from factorpack.runtime.timing import ROUNDS, least_seconds
from factorpack.tune.models import default_device

ORIGINAL, TWIN = "original", "original again"


@dataclass(frozen=True, slots=True)
class Way:
    """How a file is applied to a model: the arguments of `packed.apply`."""

    mode: str
    batch: Tensor
    slack: float
    max_memory: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """One mode at one batch size."""

    mode: str
    batch: int
    seconds: float
    ratio: float
    """Its seconds over the original's, both taken in turns."""
    resident_bytes: int
    load_seconds: float | None
    """From the file to a model that can run; for "auto" that includes measuring. None for the original."""
    layers: dict[str, int]
    """How many coded weights run in which way."""


def measure_modes(
    file: Path,
    make: Callable[[], nn.Module],
    inputs: Sequence[Tensor],
    modes: Sequence[str],
    slack: float = 0.0,
    max_memory: int | None = None,
    rounds: int = ROUNDS,
    twin: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Every mode on every batch, in turns with the model as `make` gives it.

    With `twin` there is a second such model, whose ratio says how far ratios near 1 can be trusted.
    Latencies and load times are taken with `clock`.
    """
    rows = []
    for batch in inputs:
        original = make().eval().to(batch.device)
        loaded = {
            mode: _loaded(file, make().eval().to(batch.device), Way(mode, batch, slack, max_memory), clock)
            for mode in modes
        }
        runs: dict[str, Callable[..., Any]] = {ORIGINAL: original}
        if twin:
            runs[TWIN] = make().eval().to(batch.device)
        runs |= {mode: applied.model for mode, (applied, _) in loaded.items()}
        with torch.inference_mode():
            seconds = least_seconds(runs, (batch,), {}, rounds, clock)
        own = seconds[ORIGINAL]
        rows += [
            Row(mode, len(batch), seconds[mode], seconds[mode] / own, resident_bytes(original), None, {})
            for mode in (ORIGINAL, TWIN)
            if mode in runs
        ]
        for mode, (applied, load_seconds) in loaded.items():
            counts = dict(Counter(layer.mode for layer in applied.layers))
            ratio = seconds[mode] / own
            held = applied.resident_bytes
            rows.append(Row(mode, len(batch), seconds[mode], ratio, held, load_seconds, counts))
    return rows


def bench(
    file: PackedFile,
    model: Model,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,16",
    shape: Annotated[str, typer.Option(help="Shape of one input, separated by commas.")] = "3,224,224",
    modes: Annotated[str, typer.Option(help=f"Some of {', '.join(MODES)}, separated by commas.")] = ",".join(
        MODES
    ),
    slack: Annotated[
        float,
        typer.Option(
            help="Extra time that auto may spend to save memory, as a share of the layers' dense time."
        ),
    ] = 0.0,
    max_memory: MaxMemory = None,
    rounds: Annotated[int, typer.Option(help="Runs of each mode, in turns; the fastest counts.", min=1)] = 10,
    as_json: Json = False,
) -> None:
    """Measure latency, memory and load time of a packed file in each mode.

    Latency is the smallest of several runs, taken in turns with the model as --model makes it. Ratios are to
    that model's latency.

    Example:

        factorpack bench resnet18.packed.safetensors --model torchvision.models:resnet18 --batch 1,16
    """
    chosen = modes.split(",")
    unknown = [mode for mode in chosen if mode not in MODES]
    if unknown:
        raise PlanError(f"mode {unknown[0]!r}, known are {', '.join(MODES)}")
    size = _numbers("--shape", shape)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(count, *size, generator=generator).to(default_device())
        for count in _numbers("--batch", batch)
    ]
    rows = measure_modes(file, lambda: import_model(model), inputs, chosen, slack, max_memory, rounds)
    if as_json:
        print_json({"file": str(file), "rows": [asdict(row) for row in rows]})
    else:
        print_table(table_of(rows))


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("batch", "mode"):
        table.add_column(heading)
    for heading in ("ms", "ratio", "resident", "load, s"):
        table.add_column(heading, justify="right")
    table.add_column("layers", style="dim")
    for row in rows:
        layers = ", ".join(f"{count} {mode}" for mode, count in sorted(row.layers.items()))
        load_seconds = "-" if row.load_seconds is None else f"{row.load_seconds:.2f}"
        table.add_row(
            str(row.batch),
            row.mode,
            f"{1e3 * row.seconds:.2f}",
            f"{row.ratio:.2f}",
            human_bytes(row.resident_bytes),
            load_seconds,
            layers,
        )
    return table


def _loaded(file: Path, model: nn.Module, way: Way, clock: Callable[[], float]) -> tuple[Applied, float]:
    limit = way.max_memory if way.mode in ("packed", "auto") else None
    started = clock()
    applied = load(file).apply(model, cast(Mode, way.mode), way.batch, way.slack, limit)
    return applied, clock() - started


def _numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise PlanError(f"{option} is {text!r}, expected whole numbers with commas") from error
    if min(found) < 1:
        raise PlanError(f"{option} is {text!r}, expected numbers of 1 or more")
    return found
