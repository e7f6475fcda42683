"""How much a model's predictions depend on each layer's outputs: Fisher information, from a few inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import batch_size, forward
from factorpack.budget.outputs import Predictions, predictions_of
from factorpack.calibrate import Calibration
from factorpack.errors import SourceError


@dataclass(slots=True, eq=False)
class Information:
    """Fisher information at a layer's outputs, per prediction: the mean of its diagonal; all of it for embeddings.

    Half of `level`, times the squared error that compression leaves in a channel's output, is what a layer
    adds to the Kullback-Leibler divergence from the original's predictions.
    """

    level: float = 0.0
    metric: Tensor | None = None
    """For an embedding of width D: E[g g^T] of the gradients g at its outputs, (D, D)."""


def measure_information(
    model: nn.Module, calibration: Calibration, layers: Sequence[str], samples: int = 128, seed: int = 0
) -> dict[str, Information]:
    """The squared gradient of the model's own log-likelihood at the outputs of some layers.

    Summed over positions, averaged over channels and predictions. Labels are drawn from the model's own
    predictions, so none are needed. Values that are not logits count as the mean of a Gaussian whose standard
    deviation is their own RMS.
    """
    generator = torch.Generator().manual_seed(seed)
    totals = {name: Information() for name in layers}
    seen, predictions = 0, 0
    for batch in calibration.batches if layers else []:
        predictions += _add_gradients(totals, model, batch, generator)
        seen += batch_size(batch)
        if seen >= samples:
            break
    for each in totals.values():
        each.level /= predictions
        each.metric = None if each.metric is None else each.metric / predictions
    return totals


def _add_gradients(
    totals: dict[str, Information], model: nn.Module, batch: Any, generator: torch.Generator
) -> int:
    """Adds what one batch shows of each layer; returns its number of predictions."""
    outputs: list[tuple[str, Tensor]] = []

    def catch(name: str) -> Callable[[nn.Module, Any, Any], Tensor]:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            kept = output if output.requires_grad else output.detach().requires_grad_()
            outputs.append((name, kept))
            return kept.clone()  # what follows may work in place

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(catch(name)) for name in totals]
    try:
        with torch.enable_grad():
            predictions = predictions_of(forward(model, batch), batch)
            loss = _log_likelihood(predictions, generator)
            if not loss.requires_grad:
                raise SourceError(
                    "the model's outputs have no gradient, so its layers' sensitivities cannot be measured: "
                    "its forward must run without torch.no_grad() or a conversion to integers"
                )
            found = torch.autograd.grad(loss, [output for _, output in outputs], allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    for (name, output), gradient in zip(outputs, found, strict=True):
        if gradient is not None:
            _add(totals[name], model.get_submodule(name), output, gradient)
    return len(predictions.values)


def _add(total: Information, layer: nn.Module, output: Tensor, gradient: Tensor) -> None:
    last = isinstance(layer, nn.Linear | nn.Embedding) or output.dim() < 3
    total.level += float(gradient.double().square().sum()) / output.shape[-1 if last else 1]
    if isinstance(layer, nn.Embedding):
        rows = gradient.flatten(0, -2).float()
        outer = rows.T @ rows
        total.metric = outer if total.metric is None else total.metric + outer


def _log_likelihood(predictions: Predictions, generator: torch.Generator) -> Tensor:
    """The log-likelihood of labels drawn from the predictions, summed over all of them."""
    values = predictions.values
    if predictions.are_logits:
        shares = values.detach().float().softmax(1).cpu()
        if shares.isnan().any():
            raise SourceError("the model returns NaN or infinity on the calibration data")
        labels = torch.multinomial(shares, 1, generator=generator)[:, 0].to(values.device)
        return nn.functional.cross_entropy(values.float(), labels, reduction="sum")
    noise = torch.randn(values.shape, generator=generator).to(values)
    deviation = values.detach().float().square().mean().sqrt().clamp_min(1e-12)
    return (values * noise).sum() / deviation
