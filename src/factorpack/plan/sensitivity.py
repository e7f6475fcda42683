"""How much a model's answers depend on each layer's outputs: Fisher information, from a few inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.calibrate import Calibration, forward
from factorpack.errors import SourceError


def sensitivities(
    model: nn.Module, calibration: Calibration, layers: Sequence[str], samples: int = 128, seed: int = 0
) -> dict[str, float]:
    """The squared gradient of the model's own log-likelihood at the outputs of some layers.

    Summed over positions, averaged over channels and samples: half of it, times the squared error that
    compression leaves in a channel's output, is what a layer adds to the Kullback-Leibler divergence from
    the original's answers. Labels are drawn from the model's own answers, so none are needed. Answers that
    are no logits (no matrix and no `logits`, or one number each) count as the mean of a Gaussian of their
    own spread.
    """
    generator = torch.Generator().manual_seed(seed)
    totals = dict.fromkeys(layers, 0.0)
    seen = 0
    for batch in calibration.batches if layers else []:
        gradients, count = _gradients(model, batch, layers, generator)
        for name, calls in gradients.items():
            totals[name] += sum(calls)
        seen += count
        if seen >= samples:
            break
    return {name: total / seen for name, total in totals.items()}


def _gradients(
    model: nn.Module, batch: Any, layers: Sequence[str], generator: torch.Generator
) -> tuple[dict[str, list[float]], int]:
    outputs: list[tuple[str, Tensor]] = []

    def catch(name: str) -> Callable[[nn.Module, Any, Any], Tensor]:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            kept = output if output.requires_grad else output.detach().requires_grad_()
            outputs.append((name, kept))
            return kept.clone()  # what follows may work in place

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(catch(name)) for name in layers]
    try:
        with torch.enable_grad():
            answer = forward(model, batch)
            loss, count = _log_likelihood(answer, generator)
            if not loss.requires_grad:
                raise SourceError(
                    "the model's answers have no gradient, so nothing is known of what its layers matter: "
                    "its forward must run without torch.no_grad() or a conversion to integers"
                )
            found = torch.autograd.grad(loss, [output for _, output in outputs], allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    summed: dict[str, list[float]] = {name: [] for name in layers}
    for (name, output), gradient in zip(outputs, found, strict=True):
        if gradient is not None:
            linear = isinstance(model.get_submodule(name), nn.Linear)
            channels = output.shape[-1 if linear or output.dim() < 3 else 1]
            summed[name].append(float(gradient.double().square().sum()) / channels)
    return summed, count


def _log_likelihood(answer: Any, generator: torch.Generator) -> tuple[Tensor, int]:
    """The log-likelihood of a drawn answer, summed over the samples, and their number."""
    logits = answer if isinstance(answer, Tensor) else getattr(answer, "logits", None)
    # A single number is a value, not a choice between classes.
    classes = isinstance(logits, Tensor) and logits.dim() > 1 and logits.shape[-1] > 1
    if isinstance(logits, Tensor) and classes and (logits.dim() == 2 or logits is not answer):
        flat = logits.flatten(0, -2)
        shares = flat.detach().float().softmax(1).cpu()
        if shares.isnan().any():
            raise SourceError("the model answers with NaN or infinity on the calibration data")
        labels = torch.multinomial(shares, 1, generator=generator)[:, 0].to(flat.device)
        return nn.functional.cross_entropy(flat.float(), labels, reduction="sum"), len(logits)
    values = as_logits(answer)
    noise = torch.randn(values.shape, generator=generator).to(values)
    spread = values.detach().float().square().mean().sqrt().clamp_min(1e-12)
    return (values * noise).sum() / spread, len(values)


def as_logits(answer: Any) -> Tensor:
    """The answer itself, its `logits`, or its first tensor."""
    logits = answer if isinstance(answer, Tensor) else getattr(answer, "logits", None)
    return logits if isinstance(logits, Tensor) else first_tensor(answer)


def first_tensor(answer: Any) -> Tensor:
    """The first tensor in whatever a model returns."""
    values = list(answer.values()) if hasattr(answer, "values") else answer
    for value in values if isinstance(values, list | tuple) else []:
        if isinstance(value, Tensor):
            return value
    raise SourceError(f"the model answers with a {type(answer).__name__}, in which there is no tensor")
