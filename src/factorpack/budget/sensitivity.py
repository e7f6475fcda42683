"""How much a model's predictions depend on each layer's outputs: Fisher information, from a few inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import batch_size, device_of, forward, hooked
from factorpack.budget.outputs import Predictions, predictions_of
from factorpack.calibration.calibrate import Calibration
from factorpack.errors import SourceError


@dataclass(frozen=True, slots=True, eq=False)
class Information:
    """Fisher information at a layer's outputs, per prediction: the mean of its diagonal; all of it for embeddings.

    Half of `level`, times the squared error that compression leaves in a channel's output, is what a layer
    adds to the Kullback-Leibler divergence from the original's predictions.
    """

    level: float = 0.0
    metric: Tensor | None = None
    """For an embedding of width D: E[g g^T] of the gradients g at its outputs, (D, D)."""


@dataclass(slots=True, eq=False)
class Sums:
    """Sums over predictions, on the device of the layer, so that no batch waits for them."""

    level: Tensor | None = None
    """In float64."""
    metric: Tensor | None = None

    def add(self, layer: nn.Module, output: Tensor, gradient: Tensor) -> None:
        last = isinstance(layer, nn.Linear | nn.Embedding) or output.dim() < 3
        level = gradient.double().square().sum() / output.shape[-1 if last else 1]
        self.level = level if self.level is None else self.level + level
        if isinstance(layer, nn.Embedding):
            rows = gradient.flatten(0, -2).float()
            outer = rows.T @ rows
            self.metric = outer if self.metric is None else self.metric + outer

    def per_prediction(self, predictions: int) -> Information:
        level = 0.0 if self.level is None else float(self.level) / predictions
        return Information(level, None if self.metric is None else self.metric / predictions)


def measure_information(
    model: nn.Module, calibration: Calibration, layers: Sequence[str], samples: int = 128, seed: int = 0
) -> dict[str, Information]:
    """The squared gradient of the model's own log-likelihood at the outputs of some layers.

    Summed over positions, averaged over channels and predictions. Labels are drawn from the model's own
    predictions, so none are needed. Values that are not logits count as the mean of a Gaussian whose standard
    deviation is their own RMS.
    """
    generator = torch.Generator(device_of(model)).manual_seed(seed)
    totals = {name: Sums() for name in layers}
    seen, predictions = 0, 0
    for batch in calibration.batches if layers else []:
        found = _add_gradients(totals, model, batch, generator)
        if found is None:
            raise not_finite(model, calibration)
        predictions += found
        seen += batch_size(batch)
        if seen >= samples:
            break
    return {name: each.per_prediction(predictions) for name, each in totals.items()}


def _add_gradients(
    totals: dict[str, Sums], model: nn.Module, batch: Any, generator: torch.Generator
) -> int | None:
    """Adds what one batch shows of each layer; returns its number of predictions, None if some are NaN."""
    outputs: list[tuple[str, Tensor]] = []

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        hooked(model, after={name: catch_output(name, outputs) for name in totals}),
    ):
        predictions = predictions_of(forward(model, batch), batch)
        loss = log_likelihood(predictions, generator)
        if loss is None:
            return None
        found = torch.autograd.grad(loss, [output for _, output in outputs], allow_unused=True)
    for (name, output), gradient in zip(outputs, found, strict=True):
        if gradient is not None:
            totals[name].add(model.get_submodule(name), output, gradient)
    return len(predictions.values)


def catch_output(name: str, outputs: list[tuple[str, Tensor]]) -> Callable[[nn.Module, Any, Any], Tensor]:
    """A hook that adds a layer's output to `outputs`, with a gradient."""

    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        kept = output if output.requires_grad else output.detach().requires_grad_()
        outputs.append((name, kept))
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
