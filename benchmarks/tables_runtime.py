"""The tables of ways to run a packed file: latency, memory, load time, and what it costs each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.tables_common import markdown, result, source

CASES = {
    "resnet18": "ResNet18, planned",
    "mobilenet_v2": "MobileNetV2, planned",
    "resnet18-low-rank": "ResNet18, SVD of a quarter of the rank",
}


def modes() -> str:
    """A line for each file, mode and batch size."""
    lines, notes = [], ""
    for case, title in CASES.items():
        document = result("runtime", case)
        notes += source(document)
        lines += [[title, *_cells(row)] for row in document["result"]["rows"]]
    head = ["file", "batch", "mode", "ms", "of the original's", "resident, MB", "load, s", "layers"]
    return f"{markdown(head, lines)}\n{notes}"


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        str(row["batch"]),
        row["mode"],
        f"{1e3 * row['seconds']:.1f}",
        f"{row['ratio']:.2f}",
        f"{row['resident_bytes'] / 1e6:.2f}",
        "-" if row["load_seconds"] is None else f"{row['load_seconds']:.2f}",
        ", ".join(f"{count} {mode}" for mode, count in sorted(row["layers"].items())) or "-",
    ]


def first() -> str:
    """From a cached file to the first answer, in a process of its own, and how it compares with FP32."""
    lines = []
    for case, title in CASES.items():
        found = {(row["how"], row["threads"]): row for row in result("runtime", case)["result"]["first"]}
        for threads in sorted({count for _, count in found}):
            fp32, dense, packed = (found[how, threads] for how in ("fp32", "dense", "packed"))
            times = [
                f"{1e3 * row[part]:.0f}" for row in (fp32, dense, packed) for part in ("load_s", "total_s")
            ]
            ratios = [f"{row['total_s'] / fp32['total_s']:.1f}" for row in (dense, packed)]
            lines.append([title, str(threads), *times, *ratios])
    head = ["file", "threads", "FP32: load, ms", "to the first answer", "dense: load", "to the first answer"]
    head += ["packed: load", "to the first answer", "dense of FP32's", "packed of FP32's"]
    return markdown(head, lines)


def loading() -> str:
    """From a file to a model that can run, and what memory a weight takes while it is rebuilt."""
    lines = []
    for case, title in CASES.items():
        outcome = result("runtime", case)["result"]
        packed = next(row for row in outcome["rows"] if row["mode"] == "packed")["resident_bytes"]
        largest, peak = outcome["largest_weight_bytes"], outcome["rebuild_peak_bytes"]
        lines.append(
            [
                title,
                *(f"{outcome[name] / 1e6:.2f}" for name in ("fp32_bytes", "file_bytes")),
                *(f"{outcome[name]:.3f}" for name in ("fp32_load_s", "packed_load_s")),
                *(f"{outcome[name]:.2f}" for name in ("fp32_over_link_s", "packed_over_link_s")),
                *(f"{count / 1e6:.2f}" for count in (packed, largest, peak)),
                f"{100 * ((packed + peak) / (packed + largest) - 1):.0f} %",
            ]
        )
    head = ["file", "FP32, MB", "packed, MB", "load FP32, s", "packed", "FP32 over 100 Mbit/s", "packed"]
    head += ["resident packed, MB", "largest weight, MB", "peak while rebuilding, MB"]
    head += ["above resident and largest"]
    return markdown(head, lines)


def overhead(case: str) -> Callable[[], str]:
    def table() -> str:
        """A line for each layer that has factors, and the sums: counted, and measured."""
        document = result("overhead", case)
        outcome = document["result"]
        lines = [
            [row["name"].removesuffix(".weight"), str(row["rank"]), *_counted(row), *_measured([row])]
            for row in outcome["layers"]
        ]
        lines.append(["all", "", *_counted(outcome["total"]), *_measured(outcome["layers"])])
        head = ["layer", "k", "million MACs", "to rebuild", "extra", "extra bit operations", "factored MACs"]
        head += ["factored bit operations", "dense, ms", "packed", "factored"]
        return f"{markdown(head, lines)}\n{source(document)}"

    return table


def _counted(row: dict[str, Any]) -> list[str]:
    """Factored counts as shares of the layer's own."""
    shares = [
        "-" if row[f"factored_{what}"] is None else f"{row[f'factored_{what}'] / row[f'layer_{what}']:.0%}"
        for what in ("macs", "bit_ops")
    ]
    macs = [f"{row[name] / 1e6:.1f}" for name in ("layer_macs", "rebuild_macs")]
    return [*macs, f"{row['overhead']:.0%}", f"{row['bit_overhead']:.1%}", *shares]


def _measured(rows: list[dict[str, Any]]) -> list[str]:
    """Milliseconds of layers together; none for a way that some of them do not have."""
    modes = ("dense", "packed", "factored")
    has = [all(mode in row["seconds"] for row in rows) for mode in modes]
    return [
        f"{1e3 * sum(row['seconds'][mode] for row in rows):.2f}" if known else "-"
        for mode, known in zip(modes, has, strict=True)
    ]


RUNTIME: dict[str, Callable[[], str]] = {
    "modes": modes,
    "loading": loading,
    "first": first,
    "overhead-paper": overhead("resnet18-paper"),
    "overhead-kernels": overhead("resnet18-kernels"),
}
