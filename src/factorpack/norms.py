"""Batch norms and biases around compressed layers: mean outputs put right, leftovers made small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.calibrate import forward
from factorpack.decode import decode
from factorpack.errors import WeightError
from factorpack.methods import Keep
from factorpack.record import Encoded, LayerMoments

NORMS = nn.modules.batchnorm._BatchNorm
DECIDED = ("excluded by", "chosen by")
"""How the notes of tensors begin that the caller decided on (plan/rules.py)."""
_NORM_PARTS = ("weight", "bias", "running_mean", "running_var")


def norms_after(model: nn.Module, batch: Any) -> dict[str, str]:
    """Layers whose output goes into a batch norm as it is, and the norm's name."""
    names = {module: name for name, module in model.named_modules()}
    answers: list[tuple[Tensor, int, str]] = []
    found: dict[str, str] = {}

    def answered(module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            answers.append((output, output._version, names[module]))

    def norm_called(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        for output, version, name in answers:
            # A relu in place makes another tensor of it under the same identity.
            if inputs and output is inputs[0] and output._version == version:
                found[name] = names[module]

    hooks = []
    for module in model.modules():
        if isinstance(module, NORMS):
            hooks.append(module.register_forward_pre_hook(norm_called))
        elif isinstance(getattr(module, "weight", None), Tensor):
            hooks.append(module.register_forward_hook(answered))
    try:
        with torch.no_grad():
            forward(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def correct_mean(
    layer: nn.Module, norm: nn.Module | None, weight: Tensor, original: Tensor, moments: LayerMoments
) -> bool:
    """Gives a layer the mean output it had, through its norm's running mean or its own bias, if it has one.

    The means follow from the moments, without another pass. `weight` and `original` are (out, K).
    """
    groups = len(moments.mean)
    split = (groups, -1, weight.shape[1])
    now = (weight.reshape(split).to(moments.mean) @ moments.mean[:, :, None]).flatten()
    before = (original.reshape(split).to(moments.mean) @ moments.original_mean[:, :, None]).flatten()
    bias = getattr(layer, "bias", None)
    with torch.no_grad():
        if isinstance(norm, NORMS) and norm.running_mean is not None:
            norm.running_mean.add_((now - before).to(norm.running_mean))
        elif isinstance(bias, Tensor):
            bias.add_((before - now).to(bias))
        else:
            return False
    return True


def small_leftovers(
    tensors: Mapping[str, Encoded], model: nn.Module | None, fold_norms: bool = True
) -> dict[str, Encoded]:
    """The same model with what is kept raw made small, and its batch norms folded where the model is known.

    At inference a norm is y = a x + b. Its weight becomes a, its bias b, both in FP16; its running mean
    becomes 0 and its running variance 1 - eps. The same function, but no longer one to train with batch
    statistics. Tensors the caller excluded, or chose a method for, stay as they are.
    """
    small = {
        name: leftover(decode(encoded)).noted(encoded.note)
        for name, encoded in tensors.items()
        if encoded.kind == "keep" and not encoded.note.startswith(DECIDED)
    }
    if model is not None and fold_norms:
        for name, norm in model.named_modules():
            prefix = f"{name}." if name else ""
            if isinstance(norm, NORMS) and all(prefix + part in small for part in _NORM_PARTS):
                small |= _folded(prefix, norm.eps, *(decode(tensors[prefix + part]) for part in _NORM_PARTS))
    return {name: small.get(name, encoded) for name, encoded in tensors.items()}


def _folded(
    prefix: str, eps: float, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> dict[str, Encoded]:
    scale = weight.double() / torch.sqrt(variance.double() + eps)
    shift = bias.double() - mean.double() * scale
    named = {
        "weight": half(scale.to(weight.dtype)),
        "bias": half(shift.to(bias.dtype)),
        "running_mean": constant(mean, 0.0),
        "running_var": constant(variance, 1.0 - eps),
    }
    return {prefix + part: encoded.noted("folded batch norm") for part, encoded in named.items()}


def leftover(value: Tensor) -> Encoded:
    """A tensor that is no weight, as small as it goes: one number where all are equal, FP16 where that is close."""
    if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
        return constant(value, value.flatten()[0])
    return half(value) if value.is_floating_point() and value.dtype.itemsize > 2 else Keep().encode(value)


def half(value: Tensor) -> Encoded:
    """Rounded to FP16, or kept where FP16 would overflow or lose small numbers that differ."""
    try:
        encoded = Keep("float16").encode(value)
    except WeightError:
        return Keep().encode(value)
    lost = (value != 0) & (value.abs() < 2.0**-14)
    return Keep().encode(value) if lost.float().mean() > 0.5 else encoded


def constant(like: Tensor, number: float | Tensor) -> Encoded:
    """A tensor of one value everywhere."""
    value = torch.as_tensor(number, dtype=like.dtype).reshape(1).cpu()
    return Encoded("constant", tuple(like.shape), like.dtype, {"value": value})
