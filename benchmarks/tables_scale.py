"""The table of large checkpoints, and what it says of larger ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.tables_common import markdown, result, source

CASES = {
    "scalar-0.1b-one-worker": "4-bit codes",
    "scalar-0.1b": "4-bit codes",
    "scalar-0.5b": "4-bit codes",
    "scalar-2b": "4-bit codes",
    "qspca-0.1b": "QSPCA, rank 64, 4 bits",
    "qspca-0.5b": "QSPCA, rank 64, 4 bits",
    "qspca-2b": "QSPCA, rank 64, 4 bits",
    "budget-0.1b": "`ratio=10`, planned",
}
LARGE, LARGE_TENSOR, LARGE_LAYER = 70.6e9, 128256 * 8192, 28672 * 8192
"""Weights of Llama 3 70B, of its embedding, and of its largest layer."""
CORES = 64


def scaled() -> str:
    documents = {case: result("scale", case) for case in CASES}
    rows = [
        [
            title,
            f"{found['parameters'] / 1e9:.2f}",
            str(workers),
            f"{found['checkpoint_bytes'] / 1e6:,.0f}",
            f"{found['file_bytes'] / 1e6:,.0f}",
            f"{found['seconds']:.0f}",
            f"{found['cpu_in_tasks_s']:.0f}",
            f"{_rate(found) / 1e6:.0f}",
            f"{2e-6 * found['largest_tensor_bytes']:.0f}",
            f"{found['worker_peak_bytes'] / 1e6:,.0f}",
            f"{found['driver_peak_bytes'] / 1e6:,.0f}",
        ]
        for title, workers, found in (
            (CASES[case], each["settings"]["workers"], each["result"]) for case, each in documents.items()
        )
    ]
    head = ["method", "billion weights", "workers", "BF16 checkpoint, MB", "file, MB", "seconds"]
    head += ["CPU seconds in workers", "MB a CPU second", "largest tensor in FP32, MB"]
    head += ["peak of a worker, MB", "of the driver, MB"]
    notes = "".join(map(source, documents.values()))
    return f"{markdown(head, rows)}\n{notes}\n{_larger(documents['scalar-2b']['result'])}"


def _rate(found: dict[str, Any]) -> float:
    """Bytes of checkpoint that a core takes in a second of its time."""
    return float(found["checkpoint_bytes"] / found["cpu_in_tasks_s"])


def _larger(found: dict[str, Any]) -> str:
    """What follows for a checkpoint of 70 billion weights."""
    seconds = 2 * LARGE / _rate(found)
    # A worker's start is the driver's: the same interpreter with the same modules.
    a_number = (found["worker_peak_bytes"] - found["driver_start_bytes"]) / (
        found["largest_tensor_bytes"] / 2
    )
    copied = found["file_bytes"] / (found["seconds"] - found["until_last_tensor_s"])
    file_bytes = LARGE * found["file_bytes"] / found["parameters"]
    memory = [(found["driver_start_bytes"] + a_number * count) / 1e9 for count in (LARGE_TENSOR, LARGE_LAYER)]
    return (
        f"From the 4-bit run of {found['parameters'] / 1e9:.1f} billion: 70.6 billion weights are "
        f"{2 * LARGE / 1e9:.0f} GB of BF16, {seconds / 3600:.1f} core hours at {_rate(found) / 1e6:.0f} MB "
        f"a CPU second, {seconds / CORES / 60:.1f} minutes on {CORES} cores that have nothing else to do and "
        f"storage that gives them {2e-9 * LARGE * CORES / seconds:.1f} GB/s; the embedding alone keeps one "
        f"core busy for {2 * LARGE_TENSOR / _rate(found) / 60:.1f} minutes. "
        f"Above its start a worker takes {a_number:.0f} bytes a number of its tensor: {memory[0]:.0f} GB for "
        f"the 128,256 x 8,192 embedding, {memory[1]:.1f} GB for the largest layer. The driver then copies "
        f"{file_bytes / 1e9:.0f} GB of parts into one file, {file_bytes / copied / 60:.0f} minutes at the "
        f"{copied / 1e6:.0f} MB/s it had here, reading the file again included.\n"
    )


def killed() -> str:
    document = result("kills", "seed0")
    rows = [
        [
            name,
            str(count["kills"]),
            str(count["runs"]),
            str(count["final_files_seen"]),
            str(len(count["violations"])),
        ]
        for name, count in document["result"].items()
    ]
    head = ["command", "kills", "runs they were of", "whole files seen after a kill", "violations"]
    return f"{markdown(head, rows)}\n{source(document)}"


def needed() -> str:
    document = result("need", "methods")
    rows = [
        [
            ", ".join([name, *(f"{key} {value}" for key, value in fields.items() if key != "method")]),
            f"{row['bytes_a_number']:.0f}",
            f"{row['cpu_s']:.1f}",
        ]
        for row in document["result"]["rows"]
        for fields, name in [(row["method"], row["method"]["method"])]
    ]
    return f"{markdown(['method', 'bytes a number', 'CPU seconds'], rows)}\n{source(document)}"


SCALED: dict[str, Callable[[], str]] = {"scaled": scaled, "killed": killed, "needed": needed}
