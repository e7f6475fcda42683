"""A comparison as a picture: accuracy against size, a colour a method, the original as a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from factorpack.compare.grid import Point
from factorpack.compare.opponents import OPPONENTS, PLANNED
from factorpack.errors import PlanError

INK = "#222222"
# Told apart by most eyes, and by their marks where colours are not.
COLOURS = (
    "#1f6fb4", "#2e8540", "#8a8a8a", "#d9731a", "#9b59b6", "#c0392b", "#7f6000",
    "#16a085", "#34495e", "#b07aa1", "#59a14f", "#e15759", "#4e79a7", "#f28e2b", "#76b7b2",
)  # fmt: skip
MARKS = "o^vsDPX*<>hpdH8"


def title_of(name: str) -> str:
    return "planned to a budget" if name == PLANNED else OPPONENTS[name].title


def pareto(
    points: Sequence[Point],
    original: float | None,
    measure: str = "top1",
    axes: Any = None,
    scale: float = 100.0,
) -> Any:
    """Draws on `axes`, or a new figure, and returns the figure. Names stand beside the lines' ends."""
    plt = _pyplot()
    figure = axes.figure if axes is not None else plt.figure(figsize=(9.6, 5.6))
    axes = axes if axes is not None else figure.add_subplot()
    names = [name for name in (PLANNED, *OPPONENTS) if any(point.method == name for point in points)]
    known = [PLANNED, *OPPONENTS]
    for name in names:
        line = sorted(
            (point.file_ratio, scale * point.measured[measure])
            for point in points
            if point.method == name and point.file and measure in point.measured
        )
        if not line:
            continue
        place = known.index(name)
        style = {"color": COLOURS[place], "marker": MARKS[place], "ms": 6 if name == PLANNED else 4.5}
        axes.plot(*zip(*line, strict=True), lw=2.2 if name == PLANNED else 1.1, label=title_of(name), **style)
        if name == PLANNED:
            for ratio, score in line:
                axes.annotate(
                    f"{score:.1f}", (ratio, score), xytext=(0, 7), textcoords="offset points",
                    ha="center", fontsize=8, color=COLOURS[place], fontweight="bold",
                )  # fmt: skip
    if original is not None:
        axes.axhline(scale * original, color=INK, lw=0.8, ls="--")
        axes.annotate(
            f"original {scale * original:.1f}", (1.0, scale * original), xycoords=("axes fraction", "data"),
            ha="right", va="bottom", fontsize=8, color=INK,
        )  # fmt: skip
    axes.set(xlabel="times smaller than FP32, bytes on disk", ylabel=f"{measure}, %", xscale="log")
    ticks = sorted({point.asked_ratio for point in points})
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def save_figure(figure: Any, path: Path) -> list[Path]:
    """As PNG and SVG beside each other."""
    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for target in written:
        figure.savefig(target, dpi=150, bbox_inches="tight")
    _pyplot().close(figure)
    return written


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise PlanError("a figure needs matplotlib: pip install 'factorpack[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
