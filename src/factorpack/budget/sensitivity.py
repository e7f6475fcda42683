"""How much a model's predictions depend on each layer's outputs: Fisher information, from a few inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from factorpack.batches import batch_size, device_of, forward, hooked, mask_of, merge_batches, run
from factorpack.budget.coding import works_together
from factorpack.budget.outputs import Predictions, predictions_of
from factorpack.calibration.calibrate import Calibration
from factorpack.calibration.joined import tokens_kept
from factorpack.errors import SourceError
from factorpack.progress import Progress, Showing


@dataclass(frozen=True, slots=True, eq=False)
class Information:
    """Fisher information at a layer's outputs, per prediction: the mean of its diagonal; all of it for embeddings.

    Half of `level`, times the squared error that compression leaves in a channel's output, is what a layer
    adds to the Kullback-Leibler divergence from the original's predictions.
    """

    level: float = 0.0
    metric: Tensor | None = None
    """For an embedding of width D: E[g g^T] of the gradients g at its outputs, (D, D)."""
    rows: Tensor | None = None
    """For an embedding or a linear layer: the squared gradient that falls on each row of its weight."""


class Call(NamedTuple):
    """One call of a layer, whose output has a gradient."""

    layer: str
    output: Tensor
    looked_up: Tensor | None
    """The rows that an embedding has returned."""


@dataclass(slots=True, eq=False)
class Sums:
    """Sums over predictions, on the device of the layer, so that no batch waits for them."""

    level: Tensor | None = None
    """In float64."""
    metric: Tensor | None = None
    rows: Tensor | None = None

    @staticmethod
    def of(layer: nn.Module, call: Call, gradient: Tensor) -> Sums:
        """What one call of a layer shows."""
        output = call.output
        if isinstance(layer, nn.Linear) and works_together(gradient.device):  # once over a head's many values
            rows = gradient.flatten(0, -2).float().square().sum(0)
            return Sums(rows.double().sum() / len(rows), rows=rows)
        last = isinstance(layer, nn.Linear | nn.Embedding) or output.dim() < 3
        level = gradient.double().square().sum() / output.shape[-1 if last else 1]
        if not isinstance(layer, nn.Linear | nn.Embedding):
            return Sums(level)
        each = gradient.flatten(0, -2).float()  # (positions, channels)
        if isinstance(layer, nn.Linear):
            return Sums(level, rows=each.square().sum(0))
        # A GPU adds in any order; in float64 that changes nothing that counts.
        rows = each.new_zeros(layer.num_embeddings, dtype=torch.float64)
        if call.looked_up is not None:
            rows.index_add_(0, call.looked_up.flatten(), each.square().sum(1).double())
        return Sums(level, each.T @ each, rows)

    def add(self, other: Sums) -> None:
        assert other.level is not None
        for part in fields(self):
            before, found = getattr(self, part.name), getattr(other, part.name)
            if found is not None:
                setattr(self, part.name, found if before is None else before + found)

    def per_prediction(self, predictions: int) -> Information:
        level = 0.0 if self.level is None else float(self.level) / predictions
        others = (None if each is None else each / predictions for each in (self.metric, self.rows))
        return Information(level, *others)


def measure_information(
    model: nn.Module,
    calibration: Calibration,
    layers: Sequence[str],
    samples: int = 128,
    seed: int = 0,
    progress: Showing = False,
) -> dict[str, Information]:
    """The squared gradient of the model's own log-likelihood at the outputs of some layers.

    Summed over positions, averaged over channels and predictions. Labels are drawn from the model's own
    predictions, so none are needed. Values that are not logits count as the mean of a Gaussian whose standard
    deviation is their own RMS.
    """
    generator = torch.Generator(device_of(model)).manual_seed(seed)
    batches = batches_of(calibration, samples) if layers else []
    batches = merge_batches(batches, tokens_kept(calibration, model))

    def show_all(bar: Progress) -> Iterator[Shown | None]:
        for batch in batches:
            yield show(model, batch, layers, generator)
            bar.advance("", 1)

    with Progress("measuring", len(batches), progress) as bar:
        return sum_gradients(model, calibration, layers, show_all(bar))


Shown = tuple[int, list[tuple[str, Sums]]]
"""A batch's number of predictions, and what each call of a layer shows of it."""


def batches_of(calibration: Calibration, samples: int) -> list[Any]:
    """The first batches that have `samples` inputs together, the last of them whole."""
    sizes = accumulate(map(batch_size, calibration.batches), initial=0)
    return [batch for batch, before in zip(calibration.batches, sizes, strict=False) if before < samples]


def sum_gradients(
    model: nn.Module, calibration: Calibration, layers: Sequence[str], shown: Iterable[Shown | None]
) -> dict[str, Information]:
    """What batches show together, added up in their order."""
    totals, predictions = {name: Sums() for name in layers}, 0
    for found in shown:
        if found is None:
            raise not_finite(model, calibration)
        predictions += found[0]
        for name, sums in found[1]:
            totals[name].add(sums)
    return {name: each.per_prediction(predictions) for name, each in totals.items()}


def show(model: nn.Module, batch: Any, layers: Sequence[str], generator: torch.Generator) -> Shown | None:
    """What one batch shows of some layers; None if predictions are NaN."""
    calls: list[Call] = []

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        hooked(model, after={name: catch_output(name, calls) for name in layers}),
    ):
        predictions = predictions_of(forward(model, batch), batch)
        loss = log_likelihood(predictions, generator)
        if loss is None:
            return None
        found = torch.autograd.grad(loss, [call.output for call in calls], allow_unused=True)
    sums = [
        (call.layer, Sums.of(model.get_submodule(call.layer), call, gradient))
        for call, gradient in zip(calls, found, strict=True)
        if gradient is not None
    ]
    return len(predictions.values), sums


def label_states(model: nn.Module, batches: Sequence[Any], seed: int = 0) -> list[Tensor]:
    """The generator's state before each batch draws its labels, so that any of them can be first.

    How many numbers a batch draws depends on the shape of its predictions alone. The model runs once for each
    shape of batches.
    """
    generator = torch.Generator(device_of(model)).manual_seed(seed)
    shapes: dict[object, tuple[torch.Size, bool]] = {}
    states = []
    for batch in batches:
        states.append(generator.get_state())
        values, mask = batch.values() if isinstance(batch, dict) else [batch], mask_of(batch)
        alike = (*(each.shape for each in values), None if mask is None else int(mask.sum()))
        if alike not in shapes:
            found = predictions_of(run(model, batch), batch)
            shapes[alike] = found.values.shape, found.are_logits
        _skip_draws(*shapes[alike], generator)
    return states


def catch_output(name: str, calls: list[Call]) -> Callable[[nn.Module, Any, Any], Tensor]:
    """A hook that adds a call of a layer to `calls`, its output with a gradient."""

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        kept = output if output.requires_grad else output.detach().requires_grad_()
        looked_up = inputs[0] if isinstance(module, nn.Embedding) and inputs else None
        calls.append(Call(name, kept, looked_up))
        return kept.clone()  # what follows may work in place

    return hook


def not_finite(model: nn.Module, calibration: Calibration) -> SourceError:
    return SourceError(
        "the model returns NaN or infinity on the calibration data; the first layer with them in its "
        f"input or output is {calibration.first_not_finite(model)!r}"
    )


def log_likelihood(predictions: Predictions, generator: torch.Generator) -> Tensor | None:
    """The log-likelihood of labels drawn from the predictions, summed over all of them; None where they are NaN."""
    loss = _likelihood(predictions, generator)
    if loss is not None and not loss.requires_grad:
        raise SourceError(
            "the model's outputs have no gradient, so its layers' sensitivities cannot be measured: "
            "its forward must run without torch.no_grad() or a conversion to integers"
        )
    return loss


def _likelihood(predictions: Predictions, generator: torch.Generator) -> Tensor | None:
    values = predictions.values
    if predictions.are_logits:
        shares = values.detach().float().softmax(1).to(generator.device)
        if shares.isnan().any():
            return None
        labels = torch.multinomial(shares, 1, generator=generator)[:, 0].to(values.device)
        return nn.functional.cross_entropy(values.float(), labels, reduction="sum")
    noise = torch.randn(values.shape, generator=generator, device=generator.device).to(values)
    deviation = values.detach().float().square().mean().sqrt().clamp_min(1e-12)
    return (values * noise).sum() / deviation


def _skip_draws(shape: torch.Size, are_logits: bool, generator: torch.Generator) -> None:
    """Draws as many numbers as `_likelihood` does for predictions of a shape."""
    if are_logits:
        torch.multinomial(torch.ones(shape, device=generator.device), 1, generator=generator)
    else:
        torch.randn(shape, generator=generator, device=generator.device)
