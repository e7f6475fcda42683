"""Sensitivities of a model that does not fit the device: forward along its segments, and backward one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import StopForward, device_of, forward, hooked
from factorpack.budget.outputs import predictions_of
from factorpack.budget.sensitivity import Call, Information, Sums, catch_output, log_likelihood, not_finite
from factorpack.calibration.calibrate import Calibration
from factorpack.passes.segments import INPUTS, Border, Forms, Segments, run_to, starting_from
from factorpack.progress import Progress, Showing

STREAMED_SAMPLES = 16
"""Inputs to measure on: their activations at all borders are kept, 9 GB for 16 x 2,048 tokens of an 8 B model."""


def measure_information_by_segment(
    model: nn.Module,
    calibration: Calibration,
    layers: Sequence[str],
    samples: int = STREAMED_SAMPLES,
    seed: int = 0,
    progress: Showing = False,
) -> dict[str, Information]:
    """What `measure_information` finds, with the weights and the graph of one segment in memory at a time.

    A layer that runs again in a later segment only to make an input of its blocks counts where it first runs.
    """
    used, segments = calibration.first(samples), calibration.segments(model)
    totals, generator = {name: Sums() for name in layers}, torch.Generator(device_of(model)).manual_seed(seed)
    passes = [_Pass(model, batch, segments) for batch in used.batches]
    predictions = 0
    with Progress("measuring", 2 * len(segments), progress) as bar:
        for place in range(1, len(segments)):
            for each in passes:
                each.advance(place)
            bar.advance("", 1)
        with torch.inference_mode(False), torch.enable_grad():
            for each in passes:
                found = each.add_last(totals, generator)
                if found is None:
                    raise not_finite(model, calibration)
                predictions += found
            bar.advance("", 1)
            for place in reversed(range(len(segments) - 1)):
                for each in passes:
                    each.add_before(totals, place)
                bar.advance("", 1)
    return {name: sums.per_prediction(predictions) for name, sums in totals.items()}


class _Pass:
    """One batch on its way through a model and back."""

    def __init__(self, model: nn.Module, batch: Any, segments: Segments) -> None:
        self._model, self._batch, self._segments = model, batch, segments
        self._forms: Forms = {}
        self._borders = [INPUTS]
        """In host memory."""
        self._gradient: Tensor | None = None
        """At the border behind the segments that are left."""

    def advance(self, place: int) -> None:
        border = run_to(self._model, self._batch, self._segments, self._borders[-1], self._forms, place)
        assert border.value is not None
        self._borders.append(Border(place, border.value.cpu()))

    def add_last(self, totals: dict[str, Sums], generator: torch.Generator) -> int | None:
        """Adds what the last segment's layers show; returns the number of predictions, None if some are NaN."""
        graph = self._run(totals, None)
        predictions = predictions_of(graph.end, self._batch)
        loss = log_likelihood(predictions, generator)
        if loss is None:
            return None
        self._add(totals, graph, loss, None)
        return len(predictions.values)

    def add_before(self, totals: dict[str, Sums], place: int) -> None:
        """Adds what the layers of a segment show, once all segments behind it are done."""
        graph = self._run(totals, self._segments.cuts[place].module)
        if graph.end.requires_grad and self._gradient is not None:
            self._add(totals, graph, graph.end, self._gradient.to(graph.end.device))

    def _run(self, totals: dict[str, Sums], until: str | None) -> _Graph:
        """Runs the last segment that is left, with gradients: until a module has returned, or to the end."""
        border = self._borders.pop()
        start = None if border.value is None else border.value.detach().requires_grad_()
        graph = _Graph(start, begun=start is None)
        begin = {} if start is None else {self._segments.cuts[border.place - 1].module: graph.begin}
        with (
            starting_from(self._model, self._segments, Border(border.place, start), self._forms),
            hooked(self._model, after={name: graph.catch(name) for name in totals}),
            hooked(self._model, after=begin),
            hooked(self._model, after={} if until is None else {until: graph.stop}),
            suppress(StopForward),
        ):
            graph.end = forward(self._model, self._batch)
        return graph

    def _add(self, totals: dict[str, Sums], graph: _Graph, end: Tensor, gradient: Tensor | None) -> None:
        outputs = [call.output for call in graph.calls]
        starts = [] if graph.start is None else [graph.start]
        if not outputs and not starts:
            return
        found = torch.autograd.grad(end, [*outputs, *starts], gradient, allow_unused=True)
        self._gradient = found[-1] if starts else None
        for call, each in zip(graph.calls, found[: len(outputs)], strict=True):
            if each is not None:
                totals[call.layer].add(Sums.of(self._model.get_submodule(call.layer), call, each))


@dataclass(slots=True, eq=False)
class _Graph:
    """The computation of one segment: where it starts, the outputs of its layers, and its end."""

    start: Tensor | None
    """None at the model's inputs."""
    begun: bool = False
    calls: list[Call] = field(default_factory=list)
    end: Any = None

    def catch(self, name: str) -> Callable[[nn.Module, Any, Any], Tensor | None]:
        hook = catch_output(name, self.calls)
        return lambda *call: hook(*call) if self.begun else None

    def begin(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self.begun = True

    def stop(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.end = output[0] if isinstance(output, tuple) else output
        raise StopForward
