"""Batch norms and biases around compressed layers: outputs corrected, what is kept raw made small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import forward
from factorpack.budget.norm_bits import NORM_PARTS, is_norm
from factorpack.decoding import decode
from factorpack.errors import WeightError
from factorpack.methods import Keep
from factorpack.quantize.mantissas import FLOAT_TYPES, round_mantissas
from factorpack.record import Encoded, LayerMoments
from factorpack.solve.moments import NORMS
from factorpack.weight import Weight

LARGEST_CORRECTION = 4.0
"""A variance is corrected by this factor at most."""
NEGLIGIBLE = 2.0**-20
"""A value with so small a share of the largest may become zero: trained norms have such channels by the dozen."""


def norms_after(model: nn.Module, batch: Any) -> dict[str, str]:
    """Layers whose output goes unchanged into a batch norm, and the norm's name."""
    if not any(isinstance(module, NORMS) for module in model.modules()):
        return {}
    names = {module: name for name, module in model.named_modules()}
    outputs: list[tuple[Tensor, int, str]] = []
    found: dict[str, str] = {}

    def layer_called(module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append((output, output._version, names[module]))

    def norm_called(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        for output, version, name in outputs:
            # An in-place relu changes the tensor under the same identity.
            if inputs and output is inputs[0] and output._version == version:
                found[name] = names[module]

    hooks = []
    for module in model.modules():
        if isinstance(module, NORMS):
            hooks.append(module.register_forward_pre_hook(norm_called))
        elif isinstance(getattr(module, "weight", None), Tensor):
            hooks.append(module.register_forward_hook(layer_called))
    try:
        with torch.no_grad():
            forward(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def correct_outputs(
    layer: nn.Module,
    norm: nn.Module | None,
    weight: Tensor,
    original: Tensor,
    moments: LayerMoments,
    variances: bool = True,
) -> bool:
    """Restores a layer's mean output, through its norm's running mean or its own bias, if it has one.

    With `variances` the variance of its outputs is restored too, where a norm follows: rounding by rate and
    distortion shrinks them. All of it follows from the moments, without another forward pass. `weight` and
    `original` are (out, K). Returns whether anything could be corrected.
    """
    split = (len(moments.mean), -1, weight.shape[1])
    weight, original = (each.reshape(split).to(moments.mean) for each in (weight, original))
    now = (weight @ moments.mean[:, :, None]).flatten()
    before = (original @ moments.original_mean[:, :, None]).flatten()
    bias = getattr(layer, "bias", None)
    with torch.no_grad():
        if isinstance(norm, NORMS) and norm.running_mean is not None:
            ratio = torch.ones_like(now)
            if variances and norm.running_var is not None:
                ratio = _ratio(weight, original, now, before, moments)
                changed = (norm.running_var + norm.eps) * ratio.to(norm.running_var) - norm.eps
                norm.running_var.copy_(changed.clamp_min(0))
            # The norm's mean output is the original's where (now - mean) / deviation is.
            added = bias.to(now) if isinstance(bias, Tensor) else 0.0
            away = (before + added - norm.running_mean.to(before)) * ratio.sqrt()
            norm.running_mean.copy_(now + added - away)
        elif isinstance(bias, Tensor):
            bias.add_((before - now).to(bias))
        else:
            return False
    return True


def moved_mean(weight: Weight, values: Tensor) -> Tensor | None:
    """How far new values of a weight move its layer's mean output, (out,); None where that will not be restored."""
    moments = weight.inputs
    if not isinstance(moments, LayerMoments) or not moments.restores_mean:
        return None
    mean = moments.mean
    change = (values.to(mean) - weight.values.to(mean)).reshape(len(mean), -1, mean.shape[1])
    return (change @ mean[:, :, None]).flatten()


def _power(weight: Tensor, moments: LayerMoments) -> Tensor:
    """E[(W u)^2] of (groups, out/groups, K): (out,)."""
    return ((weight @ moments.second.to(weight)) * weight).sum(2).flatten()


def _ratio(weight: Tensor, original: Tensor, now: Tensor, before: Tensor, moments: LayerMoments) -> Tensor:
    """How many times larger the variance of each output is, within limits; 1 where there never was any."""
    power = moments.original_power
    wanted = (_power(original, moments) if power is None else power.flatten()) - before.square()
    least = 1e-6 * wanted.mean().clamp_min(1e-30)
    ratio = (_power(weight, moments) - now.square()) / wanted.clamp_min(least)
    return torch.where(wanted > least, ratio.clamp(1 / LARGEST_CORRECTION, LARGEST_CORRECTION), 1.0)


def small_leftovers(
    tensors: Mapping[str, Encoded], model: nn.Module | None, fold_norms: bool = True, norm_bits: int = 0
) -> dict[str, Encoded]:
    """Makes what is kept raw small, and folds batch norms where the model is known.

    At inference a norm is y = a x + b. Its weight becomes a, its bias b, both in FP16 or less; its running mean
    becomes 0 and its running variance 1 - eps. The function is the same, but it can no longer be trained
    with batch statistics. Norms and biases are rounded to `norm_bits` bits of mantissa, unless that is 0.
    Tensors that the caller excluded, or chose a method for, stay as they are.
    """
    norms = (
        [] if model is None else [(f"{name}." if name else "", norm) for name, norm in model.named_modules()]
    )
    norms = [(prefix, norm) for prefix, norm in norms if isinstance(norm, NORMS)]
    # Statistics that will be trained stay tensors even where all values are equal.
    trained = {prefix + part for prefix, _ in norms for part in NORM_PARTS if not fold_norms}
    small = {
        name: (half if name in trained else shrink)(
            decode(encoded), norm_bits if is_norm(name, encoded.shape) else 0
        ).noted(encoded.note)
        for name, encoded in tensors.items()
        if encoded.kind == "keep" and not encoded.by_caller
    }
    for prefix, norm in norms if fold_norms else []:
        if all(prefix + part in small for part in NORM_PARTS):
            parts = (decode(tensors[prefix + part]) for part in NORM_PARTS)
            small |= _folded(prefix, norm.eps, norm_bits, *parts)
    return {name: small.get(name, encoded) for name, encoded in tensors.items()}


def _folded(
    prefix: str, eps: float, norm_bits: int, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> dict[str, Encoded]:
    scale = weight.double() / torch.sqrt(variance.double() + eps)
    shift = bias.double() - mean.double() * scale
    named = {
        "weight": half(scale.to(weight.dtype), norm_bits),
        "bias": half(shift.to(bias.dtype), norm_bits),
        "running_mean": constant(mean, 0.0),
        "running_var": constant(variance, 1.0 - eps),
    }
    return {prefix + part: encoded.noted("folded batch norm") for part, encoded in named.items()}


def folded_norms(tensors: Mapping[str, Encoded]) -> set[str]:
    """Names of the tensors of folded norms: those whose running mean is 0 everywhere, the variance one value."""
    prefixes = [name.removesuffix("running_mean") for name in tensors if name.endswith("running_mean")]
    return {
        prefix + part
        for prefix in prefixes
        for part in NORM_PARTS
        if all(prefix + each in tensors for each in NORM_PARTS)
        and all(tensors[prefix + each].kind == "constant" for each in NORM_PARTS[2:])
        and not tensors[f"{prefix}running_mean"].parts["value"].any()
    }


def shrink(value: Tensor, bits: int = 0) -> Encoded:
    """A tensor that is not a weight, as small as possible: one value where all are equal, FP16 where that is close.

    With `bits`, as many bits of each mantissa are kept.
    """
    if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
        return constant(value, value.flatten()[0])
    is_wide = value.is_floating_point() and value.dtype.itemsize > 2
    return half(value, bits) if is_wide else _rounded(value, value.dtype, bits)


def half(value: Tensor, bits: int = 0) -> Encoded:
    """Rounded to FP16, or kept where FP16 would overflow or lose values that matter beside the largest.

    With `bits`, as many bits of each mantissa are kept in either case.
    """
    size = value.abs()
    largest = size.max().item() if size.numel() else 0.0
    lost = (value != 0) & (size < 2.0**-14)
    zero = size < 2.0 ** -(15 + (bits or 10))
    if lost.float().mean() > 0.5 or bool((size[zero] > NEGLIGIBLE * largest).any()):
        return _rounded(value, value.dtype, bits)
    try:
        return _rounded(value.masked_fill(zero, 0), torch.float16, bits)
    except WeightError:
        return _rounded(value, value.dtype, bits)


def _rounded(value: Tensor, dtype: torch.dtype, bits: int) -> Encoded:
    """Kept as `dtype`, with so many bits of each mantissa, or all for 0."""
    encoded = Keep(dtype if dtype != value.dtype else None).encode(Weight(value))
    if not bits or dtype not in FLOAT_TYPES or bits >= FLOAT_TYPES[dtype].mantissa_bits:
        return encoded
    return replace(encoded, parts={"values": round_mantissas(value, bits, dtype)})


def constant(like: Tensor, number: float | Tensor) -> Encoded:
    """A tensor with one value everywhere."""
    value = torch.as_tensor(number, dtype=like.dtype).reshape(1).cpu()
    return Encoded("constant", tuple(like.shape), like.dtype, {"value": value})
