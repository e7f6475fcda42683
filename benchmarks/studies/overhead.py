"""The paper's section 3.4: what running on codes costs each layer, counted, and measured on this machine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import factorpack as fp
from benchmarks.data import pretrained
from benchmarks.formatting import format_source, format_table, load_result
from benchmarks.measure import one_thread_clock
from factorpack.kinds import KINDS
from factorpack.methods import METHODS, from_fields
from factorpack.record import Encoded, weight_of
from factorpack.runtime.factored import why_not_factored
from factorpack.runtime.timing import least_seconds
from factorpack.source import TRANSPOSED


def run(model: str, method: dict[str, Any], batch: int, rounds: int) -> dict[str, Any]:
    """Multiply-adds and bit operations of one forward pass, and each layer's fastest time in each mode."""
    packed = fp.compress(pretrained(model), from_fields(METHODS, method), progress=False)
    example = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    report = count_overhead(packed, pretrained(model), example)
    seconds = _seconds(packed, model, example, list(report.layers), rounds)
    layers = [
        {"name": name, "rank": packed[name].parts["codebook"].shape[1], "seconds": seconds[name]}
        | {"bits": dict(packed[name].bits)}
        | _counts(cost)
        for name, cost in report.layers.items()
    ]
    clock = one_thread_clock().__name__
    threads = torch.get_num_threads()
    return {"threads": threads, "clock": clock, "layers": layers, "total": _counts(report.total)}


def _counts(cost: Cost) -> dict[str, Any]:
    return asdict(cost) | {"overhead": cost.overhead, "bit_overhead": cost.bit_overhead}


def _seconds(
    packed: fp.Packed, model: str, example: Tensor, weights: list[str], rounds: int
) -> dict[str, dict[str, float]]:
    """Each layer on its own inputs: dense, packed and, where possible, factored, in turns."""
    applied = {mode: packed.apply(pretrained(model), mode) for mode in ("dense", "packed", "factored")}
    modes = {layer.name: {"dense", "packed", layer.mode} for layer in applied["factored"].layers}
    found = {}
    with torch.inference_mode():
        for weight in weights:
            name = weight.removesuffix(".weight")
            inputs = _inputs(applied["dense"].model, name, example)
            runs = {
                mode: applied[mode].model.get_submodule(name) for mode in applied if mode in modes[weight]
            }
            found[weight] = least_seconds(runs, inputs, {}, rounds, one_thread_clock())
    return found


def _inputs(model: nn.Module, name: str, example: Tensor) -> tuple[Tensor, ...]:
    """What a layer is called with."""
    seen: list[tuple[Tensor, ...]] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    model(example)
    hook.remove()
    return seen[0]


# Counting


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True)
class Cost:
    """Multiply-adds and bit operations of running layers and of rebuilding their weights."""

    layer_macs: int
    rebuild_macs: int
    layer_bit_ops: int
    rebuild_bit_ops: int
    factored_macs: int | None
    """For a layer that computes Z (C^T x) instead of rebuilding its weight; None where it cannot."""
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
    """Factor-coded tensors that no convolution or linear layer ran, so that nothing is known about them."""

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


def count_overhead(
    packed: fp.Packed, model: nn.Module, example: Tensor, *, weight_bits: int = 32, activation_bits: int = 32
) -> OverheadReport:
    """Counts one forward pass of `model` on `example`, each weight rebuilt every time its layer runs.

    A bit operation is a multiply-add times the bits of both operands: `weight_bits` and
    `activation_bits` in the layer, the codes' own widths in C Z; in a factored layer, those of the codes
    and of the activations.
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
        module = modules.get(name, model)  # a weight may be stored under a name that no layer has
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
    """How often each weight is multiplied, for every time its layer runs: found without arithmetic."""
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
        if isinstance(module, TRANSPOSED):  # spreads every input position over several output positions
            positions = inputs[0].numel() // module.in_channels
        elif isinstance(module, _CONVOLUTIONS):
            positions = output.numel() // module.out_channels
        else:
            positions = output.numel() // output.shape[-1]
        found.setdefault(name, []).append(positions)

    return count


# Tables


def tabulate(case: str) -> str:
    """One row per layer that has factors, and the sums: counted, and measured."""
    document = load_result("overhead", case)
    outcome = document["result"]
    rows = [
        [row["name"].removesuffix(".weight"), str(row["rank"]), *_count_cells(row), *_time_cells([row])]
        for row in outcome["layers"]
    ]
    rows.append(["all", "", *_count_cells(outcome["total"]), *_time_cells(outcome["layers"])])
    head = ["layer", "k", "million MACs", "to rebuild", "extra", "extra bit operations", "factored MACs"]
    head += ["factored bit operations", "dense, ms", "packed", "factored"]
    return f"{format_table(head, rows)}\n{format_source(document)}"


def _count_cells(row: dict[str, Any]) -> list[str]:
    """Factored counts are shares of the layer's own."""
    shares = [
        "-" if row[f"factored_{what}"] is None else f"{row[f'factored_{what}'] / row[f'layer_{what}']:.0%}"
        for what in ("macs", "bit_ops")
    ]
    macs = [f"{row[name] / 1e6:.1f}" for name in ("layer_macs", "rebuild_macs")]
    return [*macs, f"{row['overhead']:.0%}", f"{row['bit_overhead']:.1%}", *shares]


def _time_cells(rows: list[dict[str, Any]]) -> list[str]:
    """Milliseconds of all these layers together; none for a mode that some of them do not have."""
    return [
        f"{1e3 * sum(row['seconds'][mode] for row in rows):.2f}"
        if all(mode in row["seconds"] for row in rows)
        else "-"
        for mode in ("dense", "packed", "factored")
    ]


TABLES = {
    "overhead-paper": partial(tabulate, "resnet18-paper"),
    "overhead-kernels": partial(tabulate, "resnet18-kernels"),
}
