"""A packed file in each way it can run: latency beside the FP32 model, resident and peak memory, load time."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import factorpack as fp
from benchmarks.data import checkpoint, pretrained
from benchmarks.measure import peak_bytes, reset_peak, seconds
from factorpack.bench import measure_modes
from factorpack.methods import METHODS, from_fields
from factorpack.runtime.apply import MODES

LINK_BITS_PER_S = 100e6


def run(
    model: str,
    batches: list[int],
    slack: float,
    ratio: float | None = None,
    method: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Packed from the weights alone, into `ratio` or by `method`; `slack` is auto's."""
    source = checkpoint(model)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "packed.safetensors"
        chosen = from_fields(METHODS, method) if method else None
        fp.save(fp.compress(pretrained(model), chosen, ratio=ratio, progress=False), file)
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(batch, 3, 224, 224, generator=generator) for batch in batches]
        net = pretrained(model)
        fp32_load = seconds(lambda: net.load_state_dict(load_file(source)))
        packed_load = seconds(lambda: fp.load(file).load_into(net))
        largest = max(4 * encoded.numel for encoded in fp.load(file).values())
        return {
            "threads": torch.get_num_threads(),
            "fp32_bytes": source.stat().st_size,
            "file_bytes": file.stat().st_size,
            "largest_weight_bytes": largest,
            "fp32_load_s": fp32_load,
            "packed_load_s": packed_load,
            "fp32_over_link_s": 8 * source.stat().st_size / LINK_BITS_PER_S + fp32_load,
            "packed_over_link_s": 8 * file.stat().st_size / LINK_BITS_PER_S + packed_load,
            "rows": [
                asdict(row) for row in measure_modes(file, lambda: pretrained(model), inputs, MODES, slack)
            ],
            "rebuild_peak_bytes": _rebuild_peak(file, model),
        }


def _rebuild_peak(file: Path, model: str) -> int:
    """What rebuilding weights takes beyond the packed model, one after the other, in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.studies.runtime", json.dumps([str(file), model])]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _child(file: str, model: str) -> None:
    net = pretrained(model)
    fp.load(file).apply(net, "packed")
    packed = [module for module in net.modules() if hasattr(module, "packed")]
    with torch.inference_mode():
        packed[0].packed()  # libraries load on first use
        before = reset_peak()
        for module in packed:
            module.packed()
    print(peak_bytes() - before)


if __name__ == "__main__":
    _child(*json.loads(sys.argv[1]))
