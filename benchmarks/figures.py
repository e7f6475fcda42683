"""Draws the figures of the documents, most of them from benchmarks/results: python -m benchmarks.figures"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from benchmarks.formatting import MODELS, ROOT, load_result
from benchmarks.studies.cifar import near
from benchmarks.studies.compare import points_of
from benchmarks.studies.weights_alone import peer_points
from factorpack import QSPCA
from factorpack.comparison.figure import pareto as pareto_of_all
from factorpack.weight import Weight

FIGURES = ROOT / "docs" / "figures"
INK, BLUE, ORANGE, GREY = "#222222", "#1f6fb4", "#d9731a", "#8a8a8a"

# The paper's appendix, ResNet18 on ImageNet after 25 epochs: its ratio and its top-1.
PAPER = [
    (6.01, 70.26), (6.96, 70.06), (8.91, 70.04), (11.50, 69.77), (13.20, 69.47), (16.95, 69.15),
    (18.17, 68.91), (20.19, 68.73), (21.70, 68.63), (23.04, 68.17), (25.34, 68.11), (27.49, 67.52),
    (29.02, 67.20), (30.02, 66.94), (32.62, 66.86), (33.78, 66.37), (39.88, 64.48),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FIGURES)
    folder = parser.parse_args().output
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in {
        "cifar-pareto": pareto(),
        "rank-or-bits": rank_or_bits(),
        "fewshot": fewshot(),
        "planned": planned(),
        "trained": trained(),
        "compared": compared("", "ImageNet top-1, %, 2,000 images", (-2, 76)),
        "compared-trained": compared("-cifar", "CIFAR-10 top-1, %, 10,000 images", (60, 92)),
        "curves": curves(),
        "representation": representation(),
    }.items():
        _save(figure, folder / name)


def pareto() -> plt.Figure:
    """Accuracy lost against real file ratio, both nets, and the paper's own points in its own ratio."""
    figure, axes = plt.subplots(figsize=(7.2, 4.9))
    for model, colour in (("resnet18", BLUE), ("mobilenet_v2", ORANGE)):
        document = load_result("cifar", model)
        outcome, epochs = document["result"], document["settings"]["schedule"]["epochs"]
        rows = sorted(outcome["rows"], key=lambda row: row["file_ratio"])
        lost = [row["top1"] - outcome["fp32_test_top1"] for row in rows]
        ratios = [row["file_ratio"] for row in rows]
        name = f"{model}, CIFAR-10, {epochs} epochs (FP32 {outcome['fp32_test_top1']:.1f} %)"
        axes.plot(ratios, lost, "o", color=colour, ms=4.5, label=name)
        _frontier(axes, ratios, lost, colour)
    axes.plot(
        [ratio for ratio, _ in PAPER],
        [score - 69.76 for _, score in PAPER],
        "x",
        color=GREY,
        ms=5,
        label="the paper: ResNet18, ImageNet, 25 epochs (its ratio)",
    )
    axes.axhline(0, color=INK, lw=0.8)
    axes.annotate("FP32", (axes.get_xlim()[1], 0), ha="right", va="bottom", color=INK)
    axes.set(xlabel="times smaller than FP32, bytes on disk", ylabel="top-1 against FP32, points")
    axes.set_title("QSPCA fine-tuned, the paper's settings", loc="left")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1)
    return figure


def rank_or_bits() -> plt.Figure:
    """At one size: is it better to spend on rank or on bits?"""
    rows = load_result("cifar", "resnet18")["result"]["rows"]
    figure, panes = plt.subplots(1, 2, figsize=(7.2, 3.4), sharey=True)
    for axes, ratio in zip(panes, (11, 25), strict=True):
        for row in near(rows, ratio):
            method = row["method"]
            axes.plot(method["rank"], row["top1"], "o", color=BLUE, ms=5)
            label = f" {method['latent_bits']} bits" + (
                f", {method['sparsity']:.0%}" if method["sparsity"] else ""
            )
            axes.annotate(label, (method["rank"], row["top1"]), fontsize=8, va="center")
        axes.set(xlabel="rank", title=f"near {ratio}x by the paper's formula")
        axes.margins(x=0.25)
    panes[0].set_ylabel("CIFAR-10 top-1, %")
    return figure


def fewshot() -> plt.Figure:
    figure, axes = plt.subplots(figsize=(7.2, 3.8))
    for model, colour in (("resnet18", BLUE), ("mobilenet_v2", ORANGE)):
        rows = sorted(load_result("fewshot", model)["result"]["rows"], key=lambda row: row["file_ratio"])
        ratios = [row["file_ratio"] for row in rows]
        axes.plot(
            ratios, [row["top1"] for row in rows], "o-", color=colour, ms=5, label=f"{model}, 1,000 images"
        )
        axes.plot(
            ratios,
            [row["before"]["top1"] for row in rows],
            "o:",
            color=colour,
            ms=3,
            label=f"{model}, before",
        )
    axes.set(xlabel="times smaller than FP32, bytes on disk", ylabel="ImageNet top-1, %, 2,000 images")
    axes.legend(frameon=False)
    return figure


def planned() -> plt.Figure:
    """Without training: planned files, other methods at their sizes, and what the paper reaches with 25 epochs."""
    figure, panes = plt.subplots(1, 2, figsize=(9.6, 4.4), sharey=True)
    for axes, model in zip(panes, ("resnet18", "mobilenet_v2"), strict=True):
        outcome = load_result("budget", model)["result"]
        for name, (colour, mark, words) in PEERS.items():
            points = [(row["file_ratio"], row["top1"]) for row in outcome["rows"] if _peer(row) == name]
            if name == "qspca":  # the paper's own settings too, where they do better than the rank that fits
                points += [
                    (row["file_ratio"], row["before"]["top1"])
                    for row in load_result("fewshot", model)["result"]["rows"]
                ]
            points = sorted(points) if name == "planned" else _best(points)
            axes.plot(*zip(*points, strict=True), mark, color=colour, ms=5, lw=1.4, label=words)
            for ratio, score in points if name == "planned" else []:
                place = {"xytext": (2, -13), "textcoords": "offset points", "ha": "center", "fontsize": 8}
                axes.annotate(f"{score:.1f}", (ratio, score), **place)
        if model == "resnet18":
            axes.plot(
                *zip(*PAPER, strict=True),
                "x",
                color=GREY,
                ms=4,
                label="the paper after 25 epochs (its ratio)",
            )
        axes.axhline(outcome["fp32"], color=INK, lw=0.8)
        right = axes.get_xlim()[1], outcome["fp32"]
        axes.annotate(f"FP32 {outcome['fp32']:.1f}", right, va="bottom", ha="right", fontsize=8)
        axes.set(xlabel="times smaller than FP32, bytes on disk", title=model)
    panes[0].set(ylabel="ImageNet top-1, %, 2,000 images", ylim=(0, 76))
    figure.legend(
        *panes[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="lower center", ncols=3
    )
    return figure


PEERS = {
    "planned": (BLUE, "o-", "planned to a budget, no training"),
    "second_order": (ORANGE, "s--", "error feedback, fixed width"),
    "qspca": ("#5b8c3e", "^--", "the paper's QSPCA before training"),
    "scalar": ("#9b59b6", "v--", "rounding to nearest, fixed width"),
}


def _peer(row: dict[str, Any]) -> str:
    return "planned" if "planner" in row else str(row["method"]["method"])


def _best(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points no other beats in both size and accuracy, the largest file first."""
    best: list[tuple[float, float]] = []
    for ratio, score in sorted(points, reverse=True):
        if not best or score > best[-1][1]:
            best.append((ratio, score))
    return best[::-1]


def compared(suffix: str, label: str, limits: tuple[float, float]) -> plt.Figure:
    """Every method at the same sizes."""
    figure, panes = plt.subplots(1, 2, figsize=(10.4, 5.2), sharey=True)
    for axes, (model, title) in zip(panes, MODELS.items(), strict=True):
        points, original = points_of(model + suffix)
        peers = [] if suffix else peer_points(model)
        pareto_of_all([*points, *peers], original["top1"], axes)
        axes.set(title=title)
    panes[0].set(ylabel=label, ylim=limits)
    panes[1].set(ylabel="")
    figure.legend(
        *panes[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="lower center", ncols=6
    )
    return figure


def trained() -> plt.Figure:
    """CIFAR-10 with equal epochs: the paper's settings, and nets planned to a size."""
    figure, panes = plt.subplots(1, 2, figsize=(9.6, 4.4), sharey=True)
    for axes, case in zip(panes, ("resnet18", "resnet18-long"), strict=True):
        document = load_result("rate", case)
        outcome, schedule = document["result"], document["settings"]["schedule"]
        for name, colour, mark, words in (
            ("qspca", "#5b8c3e", "^", "the paper's QSPCA, trained"),
            ("planned", BLUE, "o", "planned, then trained with a rate term"),
        ):
            rows = [row for row in outcome["rows"] if _is_plain(row, name, schedule)]
            for key, style in (("top1", "-"), ("top1_before", ":")):
                points = sorted((row["file_ratio"], row[key]) for row in rows)
                label = words if key == "top1" else f"... before training ({name})"
                axes.plot(*zip(*points, strict=True), mark + style, color=colour, ms=5, lw=1.4, label=label)
        axes.axhline(outcome["fp32_test_top1"], color=INK, lw=0.8)
        right = axes.get_xlim()[1], outcome["fp32_test_top1"]
        axes.annotate(f"FP32 {outcome['fp32_test_top1']:.1f}", right, va="bottom", ha="right", fontsize=8)
        axes.set(xlabel="times smaller than FP32, bytes on disk", title=f"{schedule['epochs']} epochs")
    panes[0].set(ylabel="CIFAR-10 test accuracy, %", ylim=(84, 90.5))
    panes[1].legend(frameon=False, loc="lower right", fontsize=8)
    return figure


def _is_plain(row: dict[str, Any], name: str, schedule: dict[str, Any]) -> bool:
    """Whether a row is a method as it is, trained with the study's own schedule."""
    method = row["method"]
    usual = row["schedule"]["learning_rate"] == schedule["learning_rate"]
    return method["method"] == name and usual and "start" not in method


def curves() -> plt.Figure:
    """Bits per weight against relative squared error, one line per layer of ResNet18."""
    found = load_result("kept", "resnet18-curves")["result"]["curves"]["resnet18"]
    figure, axes = plt.subplots(figsize=(7.2, 4.2))
    for number, (name, curve) in enumerate(found.items()):
        bits = [8 * size / curve["numel"] for size in curve["bytes"]]
        shade = plt.get_cmap("viridis")(number / max(len(found) - 1, 1))
        axes.plot(bits, curve["losses"], "-", color=shade, lw=1.2)
        if number in (0, len(found) - 1):
            axes.annotate(f" {name}", (bits[0], curve["losses"][0]), fontsize=8, color=INK, va="top")
    axes.set(yscale="log", xlim=(0, 5.5), ylim=(1e-3, 1.5))
    axes.set(xlabel="bits per weight, codebook included", ylabel="squared error over the weight's energy")
    axes.set_title(
        "ResNet18 from its weights alone, first layer dark to last layer light", loc="left", fontsize=10
    )
    return figure


def representation() -> plt.Figure:
    """Kernels of a small layer, cut into tiles, and the codes that QSPCA really makes of them."""
    generator = torch.Generator().manual_seed(0)
    shapes = torch.linalg.qr(torch.randn(9, 4, generator=generator))[0] * torch.tensor([4.0, 2.5, 1.5, 0.7])
    weight = (torch.randn(4, 6, 4, generator=generator) @ shapes.T).view(4, 6, 3, 3)
    encoded = QSPCA(rank=4, latent_bits=3, sparsity=0.2, tile=9, center=False).encode(Weight(weight))
    codebook, latent = encoded.parts["codebook"], encoded.parts["latent"]
    panels = {
        "W: 4 filters of 6 kernels": weight.permute(0, 2, 1, 3).reshape(12, 18),
        "tiles, one per column": Weight(weight).tiles(9),
        "C, 4-bit codes": codebook,
        "Z, 3-bit codes, zeros white": latent,
    }
    widths = [panel.shape[1] for panel in panels.values()]
    figure, panes = plt.subplots(1, 4, figsize=(10.4, 2.3), width_ratios=widths)
    for axes, sign, (title, panel) in zip(
        panes, ("", "\u2192", "\u2248", "\u00d7"), panels.items(), strict=True
    ):
        most = float(panel.abs().max())
        axes.imshow(panel, cmap="RdBu", vmin=-most, vmax=most)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_title(title, fontsize=8)
        axes.text(-0.04, 0.5, sign, transform=axes.transAxes, ha="right", va="center", fontsize=14)
    for place in range(1, 6):
        panes[0].axvline(3 * place - 0.5, color="white", lw=1.5)
    for place in range(1, 4):
        panes[0].axhline(3 * place - 0.5, color="white", lw=1.5)
    tile = {"fill": False, "ec": INK, "lw": 1.8, "clip_on": False, "zorder": 3}
    panes[0].add_patch(plt.Rectangle((5.5, -0.5), 3, 3, **tile))
    panes[1].add_patch(plt.Rectangle((1.5, -0.5), 1, 9, **tile))
    panes[3].add_patch(plt.Rectangle((1.5, -0.5), 1, 4, **tile))
    panes[2].set_xlabel("d = 9 by k = 4", fontsize=8)
    panes[3].set_xlabel("k = 4 by n = 24", fontsize=8)
    return figure


def _frontier(axes: plt.Axes, ratios: list[float], values: list[float], colour: str) -> None:
    best = _best(list(zip(ratios, values, strict=True)))
    axes.plot(*zip(*best, strict=True), "-", color=colour, lw=1, alpha=0.6)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout(rect=(0, 0.1 if figure.legends else 0, 1, 1))
    metadata: dict[str, Any] = {"Date": None}
    figure.savefig(path.with_suffix(".svg"), metadata=metadata)
    figure.savefig(path.with_suffix(".png"), dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
