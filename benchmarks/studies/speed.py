"""How long compressing, saving, loading and decoding take, how much memory, and what other entropy coders reach."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file

import factorpack as fp
from benchmarks.data import checkpoint
from benchmarks.formatting import MODELS, format_source, format_table, load_result
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
    """Latent codes entropy-decoded per second, on one core: model building and copying included."""
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


def tabulate() -> str:
    documents = [load_result("speed", model) for model in MODELS]
    results = [document["result"] for document in documents]
    table = format_table(
        ["`QSPCA(rank=128, latent_bits=3)`", *MODELS.values()],
        [[label, *(cell(one) for one in results)] for label, cell in ROWS.items()],
    )
    return f"{table}\n{format_source(*documents)}"


ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "file, MB": lambda r: f"{r['file_bytes'] / 1e6:.2f}",
    "times smaller than FP32, bytes on disk": lambda r: f"{r['file_ratio']:.2f}",
    "ratio by the paper's formula": lambda r: f"{r['paper_ratio']:.2f}",
    "compress, s": lambda r: f"{r['compress_s']:.2f}",
    "save, s": lambda r: f"{r['save_s']:.2f}",
    "load and decode to dense, s": lambda r: f"{r['load_and_decode_s']:.2f}",
    "torch.load of the FP32 file, s": lambda r: f"{r['torch_load_fp32_s']:.3f}",
    "entropy decoding, million codes/s on one core": lambda r: (
        f"{r['entropy_decode_symbols_per_s_per_core'] / 1e6:.0f}"
    ),
    "peak memory of compress / decode, MB": lambda r: (
        f"{r['peak_bytes']['compress_to'] / 1e6:.0f} / {r['peak_bytes']['export'] / 1e6:.0f}"
    ),
    "latent codes, kB: entropy coded": lambda r: f"{r['latent_bytes']['entropy_coded'] / 1e3:.0f}",
    "... ideal, with a free model for every row": lambda r: f"{r['latent_bytes']['ideal_per_row'] / 1e3:.0f}",
    "... fixed width": lambda r: f"{r['latent_bytes']['fixed_width'] / 1e3:.0f}",
    "... fixed width, then zstd -19": lambda r: f"{r['latent_bytes']['zstd_19_of_fixed_width'] / 1e3:.0f}",
    "... fixed width, then xz -9": lambda r: f"{r['latent_bytes']['xz_9_of_fixed_width'] / 1e3:.0f}",
}
TABLES = {"speed": tabulate}


if __name__ == "__main__":
    _child(*json.loads(sys.argv[1]))
