"""Weights that stay in their file's bytes on a CPU: memory and time, and which decoders let other threads run."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import constriction
import numpy as np
import torch
from torch import Tensor, nn

import factorpack as fp
from benchmarks.data import pretrained
from benchmarks.formatting import format_source, format_table, load_result
from benchmarks.llamas import random_tokens, stories15m
from factorpack.commands.bench import measure_modes
from factorpack.format import chunks

MODES = ("dense", "packed", "coded")


def measure_cpu(models: list[str], ratio: float, rounds: int) -> dict[str, Any]:
    """With one thread, so that processor time leaves out other programs."""
    torch.set_num_threads(1)
    return {"nets": [_measure(name, ratio, rounds) for name in models], "waits": _waits()}


def _measure(name: str, ratio: float, rounds: int) -> dict[str, Any]:
    def make() -> nn.Module:
        return _Logits(stories15m()) if name == "stories15m" else pretrained(name)

    batch = random_tokens(32000, 1, 1) if name == "stories15m" else torch.randn(1, 3, 224, 224)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "packed.safetensors"
        planner = fp.Planner(trellis=0)
        fp.save(fp.compress(make(), ratio=ratio, planner=planner, progress=False), file)
        rows = measure_modes(file, make, [batch], MODES, rounds=rounds, clock=time.process_time)
        return {
            "model": name,
            "ratio": ratio,
            "file_bytes": file.stat().st_size,
            "rows": [
                {
                    "mode": row.mode,
                    "ms": 1e3 * row.seconds,
                    "held_bytes": row.resident_bytes,
                    "load_s": row.load_seconds,
                }
                for row in rows
            ],
        }


class _Logits(nn.Module):
    """A language model whose output is a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.model(tokens).logits
        return found


def _waits() -> dict[str, float]:
    """The longest time that another thread waits while a decoder runs, as a share of that run."""
    random = np.random.default_rng(0)
    symbols = np.clip(np.round(random.standard_normal(1 << 24) * 2) + 12, 0, 24).astype(np.uint8)
    counts = np.bincount(symbols, minlength=25) / symbols.size
    table = constriction.stream.model.Categorical(counts.astype(np.float32), perfect=False)
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(symbols.astype(np.int32), table)
    words, block = coder.get_compressed(), chunks.compress_block(symbols)
    assert block is not None
    joined = chunks.join_chunks([block])
    decoders: dict[str, Callable[[], object]] = {
        "constriction": lambda: constriction.stream.stack.AnsCoder(words).decode(table, symbols.size),
        "pcodec": lambda: chunks.Chunks(joined, 0, [len(block)]).next(symbols.size, np.dtype(np.uint8)),
    }
    return {name: min(_longest_wait(decode) for _ in range(3)) for name, decode in decoders.items()}


def _longest_wait(work: Callable[[], object]) -> float:
    thread = threading.Thread(target=work)
    started = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest / (time.perf_counter() - started)


def tabulate_cpu() -> str:
    document = load_result("resident", "cpu")
    lines = []
    for net in document["result"]["nets"]:
        lines += [
            [
                f"{net['model']}, {net['ratio']:g} times smaller",
                row["mode"],
                f"{row['held_bytes'] / 1e6:.2f}",
                f"{row['held_bytes'] / net['file_bytes']:.2f}",
                f"{row['ms']:.0f}",
                "-" if row["load_s"] is None else f"{row['load_s']:.2f}",
            ]
            for row in net["rows"]
        ]
    head = ["net", "mode", "held, MB", "held / file", "ms per sample", "load, s"]
    waits = document["result"]["waits"]
    note = ", ".join(f"{100 * share:.0f} % of {name}'s time" for name, share in waits.items())
    return (
        f"{format_table(head, lines)}\n"
        f"One thread, processor time. Another thread waits at a stretch for {note}.\n{format_source(document)}"
    )
