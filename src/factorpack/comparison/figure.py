"""Plots a comparison: accuracy against size, one colour per method, the original as a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from factorpack.comparison.baselines import BASELINES, PEERS, PLANNED
from factorpack.comparison.point import Point
from factorpack.errors import PlanError
from factorpack.format.atomic import atomic_write

INK = "#222222"
# Distinct for most readers; the markers help where the colours do not.
COLOURS = (
    "#1f6fb4", "#2e8540", "#8a8a8a", "#d9731a", "#9b59b6", "#c0392b", "#7f6000",
    "#16a085", "#34495e", "#b07aa1", "#59a14f", "#e15759", "#4e79a7", "#f28e2b", "#76b7b2",
    "#000000",
)  # fmt: skip
MARKS = "o^vsDPX*<>hpdH8x"


def pareto(points: Sequence[Point], original: float | None, axes: Any = None) -> Any:
    """Plots top-1 against file ratios, on `axes` or in a new figure with a legend; returns the figure."""
    alone = axes is None
    if alone:
        axes = _pyplot().figure(figsize=(9.6, 5.6)).add_subplot()
    for place, name in enumerate((PLANNED, *BASELINES, *PEERS)):
        shown = [
            point for point in points if point.method == name and point.file and "top1" in point.measured
        ]
        if shown:
            _draw(axes, shown, COLOURS[place], MARKS[place])
    if original is not None:
        axes.axhline(100 * original, color=INK, lw=0.8, ls="--")
        where = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        axes.annotate(f"original {100 * original:.1f}", (1.0, 100 * original), fontsize=8, color=INK, **where)
    axes.set(xlabel="times smaller than FP32, bytes on disk", ylabel="top-1, %", xscale="log")
    ticks = sorted({point.asked_ratio for point in points if point.asked_ratio})
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if alone:
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return axes.figure


def _draw(axes: Any, points: Sequence[Point], colour: str, mark: str) -> None:
    """Draws a method's points; those of the planner are larger and labelled with their scores."""
    line = sorted((point.file_ratio, 100 * point.measured["top1"]) for point in points)
    first = points[0].method == PLANNED
    style = {"color": colour, "marker": mark, "ms": 6 if first else 4, "lw": 2.2 if first else 1.0}
    axes.plot(*zip(*line, strict=True), label=points[0].title, zorder=3 if first else 2, **style)
    for ratio, score in line if first else []:
        place = {"xytext": (0, -13), "textcoords": "offset points", "ha": "center"}
        axes.annotate(f"{score:.1f}", (ratio, score), fontsize=8, color=colour, fontweight="bold", **place)


def save_figure(figure: Any, path: Path) -> list[Path]:
    """Saves a figure as PNG and SVG."""
    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    pyplot = _pyplot()
    with pyplot.rc_context({"svg.hashsalt": path.stem}):  # which SVG would else draw at random
        for target in written:
            with atomic_write(target) as file:
                kind = target.suffix.removeprefix(".")
                stamp = {"Date": None} if kind == "svg" else {}
                figure.savefig(file, format=kind, dpi=150, bbox_inches="tight", metadata=stamp)
    pyplot.close(figure)
    return written


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise PlanError("a figure needs matplotlib: pip install 'factorpack[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
