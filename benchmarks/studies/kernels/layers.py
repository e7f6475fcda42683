"""Linear layers as a user calls them: cuBLAS in BF16, torch's int4 kernel, factors and plain codes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.studies.kernels.checks import random_codes
from benchmarks.studies.kernels.timing import DEVICE, copies_of, copy_count, eager_us, graph_us
from factorpack.record import Encoded
from factorpack.runtime import multiply_triton
from factorpack.runtime.factored import FactoredLinear
from factorpack.runtime.packed_layers import PackedLayer, PackedLinear, hold_packed
from factorpack.runtime.packed_weight import PackedWeight

GROUP, INNER_TILES = 128, 8
"""Sizes of torch's int4 weights."""


def time_dense(shape: list[int], batch: int, say: Callable[[str], None]) -> dict[str, Any]:
    """cuBLAS in BF16 and torch's int4 kernel on a layer of this shape."""
    outputs, inputs = shape
    row: dict[str, Any] = {"shape": shape, "batch": batch}
    values = torch.randn(batch, inputs, device=DEVICE, dtype=torch.bfloat16)
    weights = copies_of(torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16))
    calls = [partial(functional.linear, values, one) for one in weights]
    row["bf16_us"] = graph_us(calls)
    row["bf16_eager_us"] = eager_us(calls)
    try:
        bytes_ = torch.randint(0, 256, (outputs, inputs // 2), device=DEVICE, dtype=torch.uint8)
        packed = copies_of(torch.ops.aten._convert_weight_to_int4pack(bytes_, INNER_TILES))
        scales = torch.rand(inputs // GROUP, outputs, 2, device=DEVICE).bfloat16()
        row["int4_us"] = graph_us(
            [partial(torch.ops.aten._weight_int4pack_mm, values, one, GROUP, scales) for one in packed]
        )
    except Exception as error:
        row["int4_us"], row["int4_error"] = None, f"{type(error).__name__}: {error}"[:300]
    say(f"dense {row}")
    return row


def time_packed(
    shape: list[int],
    share: float | None,
    bits: int,
    batch: int,
    tile: int,
    bandwidth: float,
    dense: list[dict[str, Any]],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """A layer of factors with this share of the rank, or of codes alone, as a user calls it."""
    row: dict[str, Any] = {"shape": shape, "share": share, "bits": bits, "batch": batch}
    try:
        layer = _layer(shape, share, bits, tile)
        layers = [copy.deepcopy(layer) for _ in range(copy_count(_bytes(layer)))]
        values = torch.randn(batch, shape[1], device=DEVICE, dtype=torch.bfloat16)
        with torch.inference_mode():
            calls = [partial(one, values) for one in layers]
            row["us"], row["eager_us"] = graph_us(calls), eager_us(calls)
        beside = next(each for each in dense if each["shape"] == shape and each["batch"] == batch)
        row["packed_bytes"] = max(buffer.nbytes for buffer in layer.buffers())  # the codes
        row["faster_than_bf16"] = beside["bf16_us"] / row["us"]
        row["faster_than_int4"] = beside["int4_us"] / row["us"] if beside["int4_us"] else None
        row["share_of_copy_bandwidth"] = row["packed_bytes"] / (row["us"] * 1e-6) / bandwidth
        row["launch"] = asdict(multiply_triton.chosen(bits, batch, round((share or 1) * math.prod(shape))))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    say(_line(row))
    return row


def _line(row: dict[str, Any]) -> str:
    head = f"{row['shape'][0]}x{row['shape'][1]} k/d {row['share']} {row['bits']} bits batch {row['batch']}: "
    if "error" in row:
        return head + row["error"]
    beside = f"x{row['faster_than_bf16']:.2f} bf16, x{row['faster_than_int4'] or math.nan:.2f} int4"
    bandwidth = f"{row['share_of_copy_bandwidth']:.0%} of copies"
    return f"{head}{row['us']:.1f} us, {beside}, {bandwidth}, eager {row['eager_us']:.0f} us"


def _layer(shape: list[int], share: float | None, bits: int, tile: int) -> nn.Module:
    outputs, inputs = shape
    if share is None:
        parts = {
            "codes": random_codes(bits, outputs, inputs),
            "scale": torch.rand(outputs, 1, device=DEVICE).mul(0.02).half(),
        }
        encoded = Encoded("scalar", tuple(shape), torch.bfloat16, parts, {"codes": bits})
    else:
        rank, count = round(share * tile), outputs * inputs // tile
        parts = {
            "codebook": random_codes(8, tile, rank),
            "codebook_scale": torch.rand(1, rank, device=DEVICE).mul(0.01).half(),
            "latent": random_codes(bits, rank, count),
            "latent_scale": torch.rand(rank, 1, device=DEVICE).mul(0.02).half(),
        }
        encoded = Encoded("factors", tuple(shape), torch.bfloat16, parts, {"codebook": 8, "latent": bits})
    layer = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=torch.bfloat16)
    cls: type[PackedLayer] = PackedLinear if share is None else FactoredLinear
    hold_packed(layer, cls, PackedWeight(encoded, torch.empty(0, device=DEVICE, dtype=torch.bfloat16)))
    return layer


def _bytes(layer: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in layer.buffers())
