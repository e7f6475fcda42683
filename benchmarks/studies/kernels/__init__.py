"""Linear layers on packed codes on a GPU: every kernel against FP64, then its time beside cuBLAS and int4.

The modules beside this one need triton; making the tables does not.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import product
from typing import Any

from benchmarks.formatting import format_source, format_table, load_result


def run(
    layers: list[list[int]],
    batches: list[int],
    bits: list[int],
    shares: list[float],
    tile: int,
    search: bool,
    search_bits: list[int],
    search_seconds: float,
    workers: int,
) -> dict[str, Any]:
    from benchmarks.studies.kernels.checks import list_candidates, list_checks, run_checks
    from benchmarks.studies.kernels.layers import time_dense, time_packed
    from benchmarks.studies.kernels.search import search_launches, time_crossover
    from benchmarks.studies.kernels.timing import copy_bytes_per_s
    from factorpack.runtime.multiply_triton import LAUNCHES

    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"  {time.perf_counter() - started:6.1f} s  {text}", flush=True)

    checks = list_checks()
    candidates = {width: list(list_candidates(width)) for width in search_bits} if search else {}
    checks += [
        {"bits": width, "launch": asdict(launch)} for width, tried in candidates.items() for launch in tried
    ]
    say(f"{len(checks)} checks in {workers} processes")
    outcomes = run_checks(checks, workers)
    failed = [outcome for outcome in outcomes if outcome["fault"]]
    for outcome in failed[:12]:
        say(f"FAILED {outcome}"[:300])
    worst = max((outcome["error"] for outcome in outcomes if not outcome["fault"]), default=0.0)
    say(f"{len(checks) - len(failed)} of {len(checks)} are correct, largest error {worst:.2e}")
    broken = [outcome["launch"] for outcome in failed if outcome.get("launch")]
    bandwidth = copy_bytes_per_s()
    say(f"copies move {bandwidth / 1e12:.2f} TB/s")
    found: list[dict[str, Any]] = []
    if search:
        deadline = time.perf_counter() + search_seconds
        for width, tried in candidates.items():
            usable = [launch for launch in tried if asdict(launch) not in broken]
            found += search_launches(width, usable, deadline, say)
    dense = [time_dense(shape, batch, say) for shape, batch in product(layers, batches)]
    rows = [
        time_packed(shape, share, width, batch, tile, bandwidth, dense, say)
        for shape, share, width, batch in product(layers, [*shares, None], bits, batches)
    ]
    crossover = [row for width in bits for row in time_crossover(width, say)]
    for width, table in LAUNCHES.items():
        for size, pair in table.items():
            say(f"{width}: {size}: {pair}")
    return {
        "copy_bytes_per_s": bandwidth,
        "checks": {"count": len(checks), "failed": failed, "largest_error": worst},
        "launches": {
            str(width): {str(size): [asdict(launch) for launch in pair] for size, pair in table.items()}
            for width, table in LAUNCHES.items()
        },
        "search": found,
        "dense": dense,
        "packed": rows,
        "crossover": crossover,
    }


def tabulate_dense() -> str:
    """One row per layer and kernel that exists without factorpack."""
    document = load_result("kernels", "h200")
    batches = document["settings"]["batches"]
    lines = []
    for shape in document["settings"]["layers"]:
        rows = [row for row in document["result"]["dense"] if row["shape"] == shape]
        for title, field in (("cuBLAS, BF16", "bf16_us"), ("torch's int4", "int4_us")):
            times = ["-" if row[field] is None else f"{row[field]:.1f}" for row in rows]
            lines.append([f"{shape[0]} x {shape[1]}", title, *times])
    return format_table(["layer", "kernel", *(f"batch {batch}, us" for batch in batches)], lines)


def tabulate_packed() -> str:
    """One row per layer, way to pack it and width; and how near the first batch is to copying the codes."""
    document = load_result("kernels", "h200")
    settings, outcome = document["settings"], document["result"]
    lines = []
    for shape, share, bits in product(settings["layers"], (*settings["shares"], None), settings["bits"]):
        case = (shape, share, bits)
        rows = [row for row in outcome["packed"] if (row["shape"], row["share"], row["bits"]) == case]
        way = "codes" if share is None else f"factors, k/d = {share:g}"
        bandwidth = "-" if "error" in rows[0] else f"{rows[0]['share_of_copy_bandwidth']:.0%}"
        lines.append([f"{shape[0]} x {shape[1]}", way, str(bits), *map(_cell, rows), bandwidth])
    head = ["layer", "packed as", "bits", *(f"batch {batch}, us" for batch in settings["batches"])]
    head.append(f"share of copy bandwidth, batch {settings['batches'][0]}")
    checks = outcome["checks"]
    note = (
        f"In parentheses how many times faster than BF16 and than int4. {checks['count']} products were checked "
        f"against FP64; {len(checks['failed'])} were wrong. Copies moved "
        f"{outcome['copy_bytes_per_s'] / 1e12:.2f} TB/s, read and written.\n"
    )
    return f"{format_table(head, lines)}\n{note}{format_source(document)}"


def _cell(row: dict[str, Any]) -> str:
    if "error" in row:
        return "-"
    int4 = "-" if row["faster_than_int4"] is None else f"{row['faster_than_int4']:.1f}"
    return f"{row['us']:.1f} ({row['faster_than_bf16']:.1f}, {int4})"


TABLES = {"kernels-dense": tabulate_dense, "kernels": tabulate_packed}
