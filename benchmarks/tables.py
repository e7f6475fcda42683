"""Writes the measured tables of README.md and docs from benchmarks/results.

python -m benchmarks.tables            rewrite what stands between <!-- name: ... --> and <!-- /name -->
python -m benchmarks.tables --check    exit 1 where a table is not what the results say
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tables_common import ROOT, markdown, result, source
from benchmarks.tables_compare import COMPARED
from benchmarks.tables_kernels import KERNELS
from benchmarks.tables_onnx import EXPORTED
from benchmarks.tables_permute import PERMUTED
from benchmarks.tables_planned import PLANNED
from benchmarks.tables_recipes import RECIPES
from benchmarks.tables_runtime import RUNTIME
from benchmarks.tables_scale import SCALED
from benchmarks.tables_sentences import SENTENCES

PAGES = ("README.md", "docs/results.md", "docs/onnx.md", "docs/hub.md", "docs/recipes.md")


def main() -> None:
    stale = [page for page in PAGES if _rewrite(ROOT / page, write="--check" not in sys.argv)]
    if stale and "--check" in sys.argv:
        sys.exit(f"stale tables in {', '.join(stale)}: run python -m benchmarks.tables")


def _rewrite(page: Path, write: bool) -> bool:
    text = page.read_text()
    fresh = text
    for name, table in TABLES.items():
        block = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)", re.DOTALL)
        fresh = block.sub(lambda found, table=table: f"{found[1]}{table()}{found[2]}", fresh)
    if write and fresh != text:
        page.write_text(fresh)
    return fresh != text


def speed() -> str:
    documents = {model: result("speed", model) for model in ("resnet18", "mobilenet_v2")}
    results = [document["result"] for document in documents.values()]
    lines: dict[str, Callable[[dict[str, Any]], str]] = {
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
        "... ideal, a free model for every row": lambda r: f"{r['latent_bytes']['ideal_per_row'] / 1e3:.0f}",
        "... fixed width": lambda r: f"{r['latent_bytes']['fixed_width'] / 1e3:.0f}",
        "... fixed width, then zstd -19": lambda r: (
            f"{r['latent_bytes']['zstd_19_of_fixed_width'] / 1e3:.0f}"
        ),
        "... fixed width, then xz -9": lambda r: f"{r['latent_bytes']['xz_9_of_fixed_width'] / 1e3:.0f}",
    }
    table = markdown(
        ["`QSPCA(rank=128, latent_bits=3)`", *documents],
        [[label, *(cell(one) for one in results)] for label, cell in lines.items()],
    )
    return f"{table}\n" + "".join(source(document) for document in documents.values())


def thresholding() -> str:
    document = result("thresholding", "resnet18")
    outcome = document["result"]
    cells = outcome["table"]
    rows = []
    for rank, name in dict.fromkeys((cell["rank"], cell["name"]) for cell in cells):
        mine = [cell for cell in cells if (cell["rank"], cell["name"]) == (rank, name)]
        scores = [f"{cell['top1']:.1f} ({cell['paper']:.1f})" for cell in mine]
        rows.append([str(rank), name, *scores])
    head = ["rank", "solver", *(f"{cell['sparsity']:.0%}" for cell in cells[:3])]
    note = f"FP32 {outcome['fp32']:.2f} on these 2,000 images; the paper's numbers in parentheses.\n"
    return f"{markdown(head, rows)}\n{note}{source(document)}"


VARIANTS = {
    "": "a scale a row, sorted by value",
    "-columns": "a scale a column, sorted by value",
    "-codes": "a scale a row, sorted by code",
    "-columns-codes": "a scale a column, sorted by code",
    "-last": "the same, one-shot after all layers",
    "-columns-codes-100": "a scale a column, sorted by code",
    "-few": "a scale a row, sorted by value",
    "-original-few": "a scale a column, sorted by code, original inputs",
    "-original": "a scale a column, sorted by code, original inputs",
}


SHOWN = ("no data-aware optimisation", "one-shot, validation set", "iterative, 30 steps")


def thresholding_variants() -> str:
    rows, notes = [], ""
    for suffix, words in VARIANTS.items():
        document = result("thresholding", f"resnet18{suffix}")
        notes += source(document)
        cells = document["result"]["table"]
        for rank, name in dict.fromkeys((cell["rank"], cell["name"]) for cell in cells):
            if rank == 128 or (suffix == "" and name not in SHOWN):
                continue
            mine = [cell for cell in cells if (cell["rank"], cell["name"]) == (rank, name)]
            scores = [f"{cell['top1']:.1f} ({cell['top1'] - cell['paper']:+.1f})" for cell in mine]
            rows.append([words, str(rank), name, *scores, *["-"] * (3 - len(scores))])
    head = ["variant", "rank", "solver", "10%", "20%", "30%"]
    return f"{markdown(head, rows)}\nIn parentheses the difference from the paper.\n{notes}"


def cifar(model: str) -> Callable[[], str]:
    def table() -> str:
        document = result("cifar", model)
        outcome = document["result"]
        rows = [
            [
                *_setting(row["method"]),
                f"{row['paper_ratio']:.2f}",
                f"{row['file_ratio']:.2f}",
                f"{row['top1_before']:.2f}",
                f"{row['top1']:.2f}",
            ]
            for row in sorted(outcome["rows"], key=lambda row: row["file_ratio"])
        ]
        head = ["rank", "bits", "sparsity", "paper's ratio", "file ratio", "before", "fine-tuned"]
        settings = document["settings"]
        note = f"FP32 {outcome['fp32_test_top1']:.2f}; seed {settings['seed']}; {settings['schedule']}.\n"
        return f"{markdown(head, rows)}\n{note}{source(document)}"

    return table


def fewshot(model: str) -> Callable[[], str]:
    def table() -> str:
        document = result("fewshot", model)
        rows = [
            [
                *_setting(row["method"]),
                f"{row['file_ratio']:.2f}",
                f"{row['before']['top1']:.1f}",
                f"{row['top1']:.1f}",
                f"{row['agreement']:.1f}",
                f"{row['kl']:.3f}",
            ]
            for row in sorted(document["result"]["rows"], key=lambda row: row["file_ratio"])
        ]
        head = [
            "rank",
            "bits",
            "sparsity",
            "file ratio",
            "before",
            "after",
            "agreement with FP32",
            "KL, nats",
        ]
        return f"{markdown(head, rows)}\n{document['settings']['schedule']}\n{source(document)}"

    return table


def ablation() -> str:
    document = result("cifar", "resnet18")
    rows = []
    for ratio in (11, 25):
        for row in near(document["result"]["rows"], ratio):
            rows.append(
                [f"{ratio}x", *_setting(row["method"]), f"{row['paper_ratio']:.2f}", f"{row['top1']:.2f}"]
            )
    return f"{markdown(['near', 'rank', 'bits', 'sparsity', 'ratio', 'top-1'], rows)}\n{source(document)}"


def baselines() -> str:
    document = result("baselines", "resnet18")
    rows = [
        [
            ", ".join(
                [row["method"]["method"], *(f"{k} {v}" for k, v in row["method"].items() if k != "method")]
            ),
            f"{row['file_bytes'] / 1e6:.2f}",
            f"{row['file_ratio']:.2f}",
            f"{row['paper_ratio']:.2f}",
            f"{row['weight_error']:.3f}",
            f"{row['compress_s'] + row['save_s']:.1f}",
        ]
        for row in document["result"]["rows"]
    ]
    head = ["method", "file, MB", "file ratio", "fixed-width ratio", "weight error", "seconds"]
    return f"{markdown(head, rows)}\n{source(document)}"


def near(rows: list[dict[str, Any]], ratio: float) -> list[dict[str, Any]]:
    """Results whose ratio by the paper's formula is within 12 % of `ratio`, the smallest rank first."""
    close = [row for row in rows if abs(row["paper_ratio"] / ratio - 1) < 0.12]
    return sorted(close, key=lambda row: (row["method"]["rank"], row["method"]["latent_bits"]))


def _setting(method: dict[str, Any]) -> list[str]:
    return [str(method["rank"]), str(method["latent_bits"]), f"{method['sparsity']:.0%}"]


TABLES: dict[str, Callable[[], str]] = {
    "speed": speed,
    "thresholding": thresholding,
    "thresholding-variants": thresholding_variants,
    "cifar-resnet18": cifar("resnet18"),
    "cifar-mobilenet_v2": cifar("mobilenet_v2"),
    "ablation": ablation,
    "baselines": baselines,
    "fewshot-resnet18": fewshot("resnet18"),
    "fewshot-mobilenet_v2": fewshot("mobilenet_v2"),
    **PLANNED,
    **PERMUTED,
    **RECIPES,
    **COMPARED,
    **EXPORTED,
    **RUNTIME,
    **KERNELS,
    **SENTENCES,
    **SCALED,
}

if __name__ == "__main__":
    main()
