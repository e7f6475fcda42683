"""What codes cost a running layer: arithmetic of C Z, or of a factored layer, beside the layer's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from factorpack.kinds import KINDS
from factorpack.packed import Packed
from factorpack.record import Encoded, weight_of
from factorpack.runtime.factored import why_not_factored
from factorpack.source import TRANSPOSED

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True)
class Cost:
    """Multiply-adds and bit operations of running layers and of rebuilding their weights."""

    layer_macs: int
    rebuild_macs: int
    layer_bit_ops: int
    rebuild_bit_ops: int
    factored_macs: int | None
    """Multiply-adds of a layer that computes Z (C^T x) instead of rebuilding; None where it cannot."""
    factored_bit_ops: int | None

    @property
    def overhead(self) -> float:
        """Extra multiply-adds, as a share of the layer's own: k / p in the paper."""
        return self.rebuild_macs / self.layer_macs if self.layer_macs else 0.0

    @property
    def bit_overhead(self) -> float:
        return self.rebuild_bit_ops / self.layer_bit_ops if self.layer_bit_ops else 0.0


@dataclass(frozen=True, slots=True)
class OverheadReport:
    """The cost of every factor-coded weight that runs in a layer, by name, and of all together."""

    layers: dict[str, Cost]
    uncounted: tuple[str, ...]
    """Factor-coded tensors that no convolution or linear layer used, so that their cost is unknown."""

    @property
    def total(self) -> Cost:
        costs = self.layers.values()
        return Cost(
            sum(cost.layer_macs for cost in costs),
            sum(cost.rebuild_macs for cost in costs),
            sum(cost.layer_bit_ops for cost in costs),
            sum(cost.rebuild_bit_ops for cost in costs),
            _sum_or_none(cost.factored_macs for cost in costs),
            _sum_or_none(cost.factored_bit_ops for cost in costs),
        )


def overhead(
    packed: Packed, model: nn.Module, example: Tensor, *, weight_bits: int = 32, activation_bits: int = 32
) -> OverheadReport:
    """Counts one forward pass of `model` on `example`, in which each weight is rebuilt every time its layer runs.

    A bit operation is a multiply-add times the bits of both operands: `weight_bits` and
    `activation_bits` in the layer, the codes' own widths in C Z; in a factored layer, those of the codes
    and of the activations.

    >>> overhead(packed, model, torch.zeros(1, 3, 224, 224)).total.overhead  # doctest: +SKIP
    """
    positions: dict[str, list[int]] = {}
    for name, counts in _positions(model, example).items():
        positions.setdefault(packed.aliases.get(name, name), []).extend(counts)
    layers, uncounted = {}, []
    modules = {weight_of(name): module for name, module in model.named_modules()}
    for name, encoded in packed.items():
        if not KINDS[encoded.kind].is_product:
            continue
        if name not in positions:
            uncounted.append(name)
            continue
        tile, rank = encoded.parts["codebook"].shape
        tiles = encoded.parts["latent"].shape[1]
        layer = encoded.numel * sum(positions[name])
        rebuild = tile * tiles * rank * len(positions[name])
        module = modules.get(name, model)  # a weight may belong to no layer under its stored name
        mixing, summing = _factored(module, encoded, sum(positions[name]))
        bits = encoded.bits["codebook"], encoded.bits["latent"]
        works = not why_not_factored(module, encoded)
        layers[name] = Cost(
            layer,
            rebuild,
            layer * weight_bits * activation_bits,
            rebuild * bits[0] * bits[1],
            mixing + summing if works else None,
            (mixing * bits[0] + summing * bits[1]) * activation_bits if works else None,
        )
    return OverheadReport(layers, tuple(uncounted))


def _factored(layer: nn.Module, encoded: Encoded, positions: int) -> tuple[int, int]:
    """Multiply-adds of C^T x, the same for all filters of a group, and of Z times that."""
    rank, tiles = encoded.parts["latent"].shape
    groups = layer.groups if isinstance(layer, _CONVOLUTIONS) else 1
    per_filter = encoded.numel // encoded.shape[0]
    return positions * groups * per_filter * rank, positions * tiles * rank


def _sum_or_none(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(filter(None, known))


def _positions(model: nn.Module, example: Tensor) -> dict[str, list[int]]:
    """How often each weight is multiplied, for every run of its layer: found without arithmetic."""
    shadow = copy.deepcopy(model).to("meta").eval()
    found: dict[str, list[int]] = {}
    for name, module in shadow.named_modules():
        if isinstance(module, (nn.Linear, *_CONVOLUTIONS, *TRANSPOSED)):
            module.register_forward_hook(_counter(weight_of(name), found))
    with torch.no_grad():
        shadow(example.to("meta"))
    return found


def _counter(
    name: str, found: dict[str, list[int]]
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, TRANSPOSED):  # every input position contributes to several output positions
            positions = inputs[0].numel() // module.in_channels
        elif isinstance(module, _CONVOLUTIONS):
            positions = output.numel() // module.out_channels
        else:
            positions = output.numel() // output.shape[-1]
        found.setdefault(name, []).append(positions)

    return count
