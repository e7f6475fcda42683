"""A packed file in each way it can run: latency beside the FP32 model, resident and peak memory, load time."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import factorpack as fp
from benchmarks.data import checkpoint, pretrained
from benchmarks.first import first_answers
from benchmarks.measure import allocated_bytes, one_thread_clock, seconds
from factorpack.commands.bench import measure_modes
from factorpack.methods import METHODS, from_fields
from factorpack.runtime.apply import MODES
from factorpack.runtime.packed_layers import PackedLayer

LINK_BITS_PER_S = 100e6


def run(
    model: str,
    batches: list[int],
    slack: float,
    rounds: list[int],
    threads: list[int],
    repeats: int,
    ratio: float | None = None,
    method: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Packed from the weights alone, into `ratio` or by `method`; `slack` is auto's.

    Each batch size has its rounds. First answers are timed in `repeats` processes for each of `threads`.
    """
    source = checkpoint(model)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "packed.safetensors"
        chosen = from_fields(METHODS, method) if method else None
        fp.save(fp.compress(pretrained(model), chosen, ratio=ratio, progress=False), file)
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(batch, 3, 224, 224, generator=generator) for batch in batches]
        net = pretrained(model)
        clock = one_thread_clock()
        fp32_load = seconds(lambda: net.load_state_dict(load_file(source)), clock=clock)
        packed_load = seconds(lambda: fp.load(file).load_into(net), clock=clock)
        largest = max(4 * encoded.numel for encoded in fp.load(file).values())
        return {
            "threads": torch.get_num_threads(),
            "clock": clock.__name__,
            "fp32_bytes": source.stat().st_size,
            "file_bytes": file.stat().st_size,
            "largest_weight_bytes": largest,
            "fp32_load_s": fp32_load,
            "packed_load_s": packed_load,
            "fp32_over_link_s": 8 * source.stat().st_size / LINK_BITS_PER_S + fp32_load,
            "packed_over_link_s": 8 * file.stat().st_size / LINK_BITS_PER_S + packed_load,
            "first": first_answers(model, file, ("dense", "packed"), threads, repeats),
            "rows": [
                asdict(row)
                for batch, count in zip(inputs, rounds, strict=True)
                for row in measure_modes(
                    file, lambda: pretrained(model), [batch], MODES, slack, count, twin=True, clock=clock
                )
            ],
            "rebuild_peak_bytes": _rebuild_peak(fp.load(file), pretrained(model)),
        }


def _rebuild_peak(packed: fp.Packed, net: nn.Module) -> int:
    """The most that rebuilding any one weight takes, itself included, by torch's own count of allocations."""
    layers = [
        module for module in packed.apply(net, "packed").model.modules() if isinstance(module, PackedLayer)
    ]
    return max(allocated_bytes(layer.packed) for layer in layers)
