"""How long compressing, saving, loading and decoding take, how much memory, and what other coders make."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file

import factorpack as fp
from benchmarks.data import checkpoint
from benchmarks.measure import peak_bytes, reset_peak, seconds
from factorpack.format import entropy
from factorpack.format.bitpack import pack
from factorpack.methods import METHODS, from_fields
from factorpack.quantize.uniform import code_range


def run(model: str, method: dict[str, Any]) -> dict[str, Any]:
    chosen = from_fields(METHODS, method)
    with tempfile.TemporaryDirectory() as folder:
        packed_path, torch_path = Path(folder) / "packed.safetensors", Path(folder) / "fp32.pt"
        source = checkpoint(model)
        torch.save(load_file(source), torch_path)
        packed = fp.compress(source, chosen, progress=False)
        fp.save(packed, packed_path)
        report = fp.load(packed_path).size()
        return {
            "file_bytes": report.file_bytes,
            "file_ratio": report.file_ratio,
            "paper_ratio": report.paper_ratio,
            "compress_s": seconds(lambda: fp.compress(source, chosen, progress=False)),
            "save_s": seconds(lambda: fp.save(packed, packed_path)),
            "load_s": seconds(lambda: fp.load(packed_path)),
            "load_and_decode_s": seconds(lambda: fp.load(packed_path).state_dict()),
            "torch_load_fp32_s": seconds(lambda: torch.load(torch_path, weights_only=True)),
            "safetensors_load_fp32_s": seconds(lambda: load_file(source)),
            "entropy_decode_symbols_per_s_per_core": decode_rate(packed),
            "peak_bytes": {
                "checkpoint": source.stat().st_size,
                "compress_to": _peak("compress_to", source, packed_path, method),
                "export": _peak("export", source, packed_path, method),
            },
            "latent_bytes": coders(packed),
        }


def decode_rate(packed: fp.Packed) -> float:
    """Latent codes entropy-decoded a second, on one core: model building and copying included."""
    streams = [
        (entropy.encode(encoded.parts["latent"].numpy()), *encoded.parts["latent"].shape)
        for encoded in packed.values()
        if encoded.kind == "factors"
    ]
    symbols = sum(rows * columns for _, rows, columns in streams)
    return symbols / seconds(lambda: [entropy.decode(*stream) for stream in streams])


def coders(packed: fp.Packed) -> dict[str, float]:
    """Bytes of all latent codes: ideal, ours, and general compressors on the fixed-width packed codes."""
    latents = [
        (enc.parts["latent"].numpy(), enc.bits["latent"]) for enc in packed.values() if enc.kind == "factors"
    ]
    fixed = [
        pack((codes.astype(np.int16) - code_range(bits)[0]).astype(np.uint16).ravel(), bits)
        for codes, bits in latents
    ]
    return {
        "ideal_per_row": sum(_ideal_bytes(codes) for codes, _ in latents),
        "ideal_per_tensor": sum(_ideal_bytes(codes.reshape(1, -1)) for codes, _ in latents),
        "entropy_coded": sum(len(entropy.encode(codes)) for codes, _ in latents),
        "fixed_width": sum(map(len, fixed)),
        "zstd_19_of_fixed_width": sum(len(zstandard.compress(data, 19)) for data in fixed),
        "xz_9_of_fixed_width": sum(len(lzma.compress(data, preset=9)) for data in fixed),
        "xz_9_of_bytes": sum(len(lzma.compress(codes.tobytes(), preset=9)) for codes, _ in latents),
    }


def _ideal_bytes(rows: np.ndarray) -> float:
    """Empirical entropy of each row under its own histogram, side information left out."""
    total = 0.0
    for row in rows:
        counts = np.unique(row, return_counts=True)[1]
        total -= float((counts * np.log2(counts / counts.sum())).sum())
    return total / 8


def _peak(verb: str, source: Path, packed: Path, method: dict[str, Any]) -> int:
    """Memory a fresh process takes for one verb, beyond what importing factorpack takes."""
    arguments = json.dumps([verb, str(source), str(packed), method])
    command = [sys.executable, "-m", "benchmarks.studies.speed", arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _child(verb: str, source: str, packed: str, method: dict[str, Any]) -> None:
    torch.linalg.eigh(torch.eye(8).double())  # the linear algebra library loads on first use
    before = reset_peak()
    if verb == "compress_to":
        fp.compress(source, from_fields(METHODS, method), to=packed, progress=False)
    else:
        fp.load(packed).decode_to(packed + ".plain", progress=False)
    print(peak_bytes() - before)


if __name__ == "__main__":
    _child(*json.loads(sys.argv[1]))
