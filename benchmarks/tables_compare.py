"""Tables of all methods at the same sizes: what each file is worth, and what it took to make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.tables_common import markdown, result, source
from factorpack.comparison import Point
from factorpack.comparison.figure import title_of

MODELS = {"resnet18": "ResNet18", "mobilenet_v2": "MobileNetV2"}


def points_of(case: str) -> tuple[list[Point], dict[str, float]]:
    """The points of a comparison, and what was measured of the original."""
    outcome = result("compare", case)["result"]
    return [Point(**point) for point in outcome["points"]], outcome["original"]


def compared(case: str) -> Callable[[], str]:
    """A row a method, a column a size: top-1 of the file, and its real ratio."""

    def cell(point: Point) -> str:
        if not point.file:
            return point.settings.replace(" is the smallest it makes", " at most")
        return f"{100 * point.measured['top1']:.1f} ({point.file_ratio:.1f}x)"

    def table() -> str:
        document = result("compare", case)
        points, original = points_of(case)
        rows = _rows(points, cell)
        head = ["method", *(f"{ratio:g}x" for ratio in document["settings"]["ratios"])]
        note = f"Original {100 * original['top1']:.1f}. In parentheses the real ratio of the file.\n"
        return f"{markdown(head, rows)}\n{note}{source(document)}"

    return table


def seconds() -> str:
    """How long each method took for ResNet18, size by size."""
    document = result("compare", "resnet18")
    points, _ = points_of("resnet18")
    rows = _rows(points, lambda point: f"{point.compress_s:.1f}" if point.file else "-")
    head = ["seconds to compress ResNet18", *(f"{ratio:g}x" for ratio in document["settings"]["ratios"])]
    return f"{markdown(head, rows)}\n{source(document)}"


def _rows(points: list[Point], cell: Callable[[Point], str]) -> list[list[str]]:
    names = dict.fromkeys(point.method for point in points)
    return [[_title(name), *(cell(point) for point in points if point.method == name)] for name in names]


def _title(name: str) -> str:
    title = title_of(name)
    return f"**{title}**" if name == "planned" else title


def trellis() -> str:
    rows, notes = [], ""
    for model, title in MODELS.items():
        document = result("ablation", f"{model}-trellis")
        notes += source(document)
        rows += [_trellis_row(title, row) for row in document["result"]["rows"]]
    return f"{markdown(['model', 'codes', 'file ratio', 'top-1', 'KL, nats'], rows)}\n{notes}"


def _trellis_row(title: str, row: dict[str, Any]) -> list[str]:
    words = row["name"].removeprefix("everything, ").removeprefix("and ")
    return [title, words, f"{row['file_ratio']:.2f}", f"{row['top1']:.1f}", f"{row['kl']:.4f}"]


def codewords() -> str:
    """VQ, BGD and PQF in the two regimes of their papers, before and after the same few-shot training."""
    document = result("fewshot", "codewords")
    rows = [
        [
            _codewords_name(row["method"]),
            f"{row['file_ratio']:.1f}",
            f"{row['weight_error'] ** 0.5:.3f}",
            *(f"{row[key]['kl']:.2f}" for key in ("before", "norms_anew")),
            f"{row['kl']:.3f}",
            f"{row['top1']:.1f}",
        ]
        for row in sorted(document["result"]["rows"], key=lambda row: row["file_ratio"] > 36)
    ]
    head = ["method", "file ratio", "weight error", "KL before", "norms anew", "KL trained", "top-1 trained"]
    return f"{markdown(head, rows)}\n{document['settings']['schedule']}\n{source(document)}"


def _codewords_name(method: dict[str, Any]) -> str:
    told = [f"{key} {method[key]}" for key in ("samples", "damping", "gram") if key in method]
    return ", ".join([f"{title_of(method['method'])}, {method['regime']} blocks", *told])


COMPARED: dict[str, Callable[[], str]] = {
    "compared-resnet18-cifar": compared("resnet18-cifar"),
    "compared-mobilenet_v2-cifar": compared("mobilenet_v2-cifar"),
    "codewords": codewords,
    "compared-resnet18": compared("resnet18"),
    "compared-mobilenet_v2": compared("mobilenet_v2"),
    "compared-seconds": seconds,
    "trellis-whole": trellis,
}
