"""Weights of 4 bits by maintained packages, beside ours: the bytes of codes and scales, and the weight error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from benchmarks.data import checkpoint
from benchmarks.formatting import format_source, format_table, load_result
from factorpack.comparison.ladders import Ladders
from factorpack.decoding import decode
from factorpack.format.packed_file import file_bytes
from factorpack.methods import LSQ, RDOQ, Method, Scalar
from factorpack.weight import Weight

BITS = 4
SCALE_BYTES = 2
"""Scales and zero points count as FP16 for all, as they are stored in practice."""
Coded = tuple[Tensor, int]
"""Decoded weight, and how many numbers lie beside the codes."""


def run(layers: list[list[str]], groups: list[int]) -> dict[str, Any]:
    """`layers` are checkpoints and names; a group of 0 is a whole row."""
    rows = []
    for source, name in layers:
        with safe_open(checkpoint(source), "pt") as file:
            weight = file.get_tensor(name).float()
        layer = f"{source.split(':')[0]} {name}"
        theirs = [_peer_row(layer, peer, group, weight) for peer in PEERS for group in groups]
        rows += [*theirs, *_ours(layer, weight, [row["bytes"] for row in theirs])]
    return {"versions": {name: version(name) for name in PEERS}, "rows": rows}


def _peer_row(layer: str, peer: str, group: int, weight: Tensor) -> dict[str, Any]:
    decoded, beside = PEERS[peer](weight, group)
    size = weight.numel() * BITS // 8 + SCALE_BYTES * beside
    return _row(layer, peer, group, size, weight, decoded)


def _row(layer: str, method: str, group: int, size: int, weight: Tensor, decoded: Tensor) -> dict[str, Any]:
    error = float((decoded.float() - weight).square().sum() / weight.square().sum()) ** 0.5
    row = {"layer": layer, "method": method, "group": group, "bytes": size, "weight_error": error}
    print(row, flush=True)
    return row


def _ours(layer: str, weight: Tensor, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """Rounding to nearest and LSQ at 4 bits, codes at fixed width; then RDOQ in files of the peers' sizes."""
    for title, method in (
        ("ours, rounding to nearest", Scalar(BITS)),
        ("ours, LSQ before training", LSQ(BITS)),
    ):
        size = weight.numel() * BITS // 8 + SCALE_BYTES * len(weight)
        yield _row(layer, title, 0, size, weight, decode(method.encode(Weight(weight))))
    ladders = Ladders(RDOQ.ladders(), lambda method: (_file_bytes(weight, method), 0.0))
    for limit in sorted({min(sizes), max(sizes)}):
        best = ladders.best_within(limit)
        assert best is not None
        decoded = decode(best.encode(Weight(weight)))
        yield _row(layer, "ours, RDOQ", 0, _file_bytes(weight, best), weight, decoded)


def _file_bytes(weight: Tensor, method: Method) -> int:
    return file_bytes({"weight": method.encode(Weight(weight))}, {})


def _quanto(weight: Tensor, group: int) -> Coded:
    from optimum.quanto import HqqOptimizer, qint4, quantize_weight

    scale, shift = HqqOptimizer()(weight, qint4, 0, group or None, zeropoint=False)
    coded = quantize_weight(weight, qint4, 0, scale, shift, group or None)
    return coded.dequantize(), scale.numel() + shift.numel()


def _hqq(weight: Tensor, group: int) -> Coded:
    from hqq.core.quantize import Quantizer

    settings = {"nbits": BITS, "group_size": group or None, "axis": 1, "optimize": True}
    coded, meta = Quantizer.quantize(weight.clone(), device="cpu", compute_dtype=torch.float32, **settings)
    return Quantizer.dequantize(coded, meta), meta["scale"].numel() + meta["zero"].numel()


def _torchao(weight: Tensor, group: int) -> Coded:
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup

    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    config = IntxWeightOnlyConfig(
        weight_dtype=torch.int4,
        granularity=PerGroup(group) if group else PerAxis(0),
        mapping_type=MappingType.ASYMMETRIC,
    )
    quantize_(layer, config, filter_fn=lambda *_: True)
    coded: Any = layer.weight
    return coded.dequantize(), coded.scale.numel() + coded.zero_point.numel()


PEERS: dict[str, Callable[[Tensor, int], Coded]] = {
    "optimum-quanto": _quanto,
    "hqq": _hqq,
    "torchao": _torchao,
}


def tabulate() -> str:
    document = load_result("peers", "linear")
    result = document["result"]
    rows = [
        [
            row["layer"],
            f"{row['method']} {result['versions'].get(row['method'], '')}".strip(),
            str(row["group"]) if row["group"] else "-" if "RDOQ" in row["method"] else "row",
            f"{row['bytes']:,}",
            f"{row['weight_error']:.4f}",
        ]
        for row in result["rows"]
    ]
    head = ["layer", "method", "group", "bytes", "weight error"]
    return f"{format_table(head, rows)}\n{format_source(document)}"


TABLES = {"peers": tabulate}
