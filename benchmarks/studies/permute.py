"""Is a model easier to vector-quantize once its channels are permuted? Errors of k-means at equal size."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.data import pretrained
from benchmarks.formatting import format_source, format_table, load_result
from benchmarks.training import device
from factorpack.comparison.permute import Permuted, permute_model
from factorpack.weight import Weight


def run(
    model: str, pointwise: int, kernels: int, codewords: int, passes: int, iterations: int, seeds: int
) -> dict[str, Any]:
    """`pointwise` elements per tile of a linear layer or 1x1 convolution, `kernels` kernels in any other's.

    `passes` belong to k-means, `iterations` to the search. K-means starts from `seeds` different sets of
    tiles, since that alone moves its error.
    """

    def tile_of(_name: str, shape: tuple[int, ...]) -> int:
        kernel = torch.Size(shape[2:]).numel()
        return pointwise if kernel == 1 else kernels * kernel

    net = pretrained(model).to(device())
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    started = time.perf_counter()
    permuted, report = permute_model(net, images, tile_of=tile_of, iterations=iterations)
    seconds = time.perf_counter() - started
    before, after = net.state_dict(), permuted.state_dict()
    rows = []
    for name, log_det in _log_dets(report).items():
        tile = tile_of(name, tuple(before[name].shape))
        errors = [
            [_error(Weight(state[name]).tiles(tile).T, codewords, passes, seed) for seed in range(seeds)]
            for state in (before, after)
        ]
        rows.append(
            {
                "weight": name,
                "shape": list(before[name].shape),
                "tile": tile,
                "log_det_of_group": log_det,
                "error": [statistics.mean(each) for each in errors],
                "spread": [max(each) - min(each) for each in errors],
            }
        )
        print(rows[-1], flush=True)
    return {"search_seconds": round(seconds, 1), "change": report.change, "rows": rows}


def _log_dets(report: Permuted) -> dict[str, list[float]]:
    """Each weight that was searched on, and the log det per element of its group before and after."""
    return {name: [each.before, each.after] for each in report.searched for name in each.children}


def _error(tiles: Tensor, codewords: int, passes: int, seed: int) -> float:
    """Squared error of k-means over the tiles' energy; a codeword that no tile is nearest to stays."""
    generator = torch.Generator().manual_seed(seed)
    centres = tiles[torch.randperm(len(tiles), generator=generator)[:codewords].to(tiles.device)]
    for _ in range(passes):
        nearest = _nearest(tiles, centres)
        count = nearest.bincount(minlength=len(centres))[:, None]
        total = torch.zeros_like(centres).index_add_(0, nearest, tiles)
        centres = torch.where(count > 0, total / count.clamp_min(1), centres)
    lost = tiles - centres[_nearest(tiles, centres)]
    return float(lost.double().square().sum() / tiles.double().square().sum())


def _nearest(tiles: Tensor, centres: Tensor) -> Tensor:
    half = centres.square().sum(1) / 2
    return torch.cat(
        [torch.addmm(half, part, centres.T, alpha=-1).argmin(1) for part in tiles.split(1 << 16)]
    )


def tabulate() -> str:
    """One row per model, tile, and whether a weight narrows; every element of a weight counts the same.

    Weights with no more tiles than codewords are left out: they lose nothing in any order.
    """
    documents = {case: load_result("permute", case) for case in CASES}
    lines = []
    for case, document in documents.items():
        outcome = document["result"]
        lossy = [row for row in outcome["rows"] if row["error"][0] > 0]
        for kind in sorted({_kind(row) for row in lossy}):
            rows = [row for row in lossy if _kind(row) == kind]
            lines.append([CASES[case], *map(str, kind), *_cells(rows), f"{outcome['search_seconds']:.0f}"])
    head = ["model", "tile", "outputs", "weights", "log det", "permuted", "error", "permuted", "change"]
    head += ["single weights", "by start", "search, s"]
    return f"{format_table(head, lines)}\n{format_source(*documents.values())}"


def _kind(row: dict[str, Any]) -> tuple[int, str]:
    outputs, inputs = row["shape"][:2]
    return row["tile"], "fewer than inputs" if outputs < inputs else "as many or more"


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    sizes = [math.prod(row["shape"]) for row in rows]

    def mean(key: str, place: int) -> float:
        return sum(size * row[key][place] for size, row in zip(sizes, rows, strict=True)) / sum(sizes)

    before, after = mean("error", 0), mean("error", 1)
    changes = sorted(row["error"][1] / row["error"][0] - 1 for row in rows)
    return [
        str(len(rows)),
        *(f"{mean('log_det_of_group', place):.3f}" for place in (0, 1)),
        f"{before:.2%}",
        f"{after:.2%}",
        f"{after / before - 1:+.1%}",
        f"{changes[0]:+.1%} to {changes[-1]:+.1%}",
        f"{max(mean('spread', 0), mean('spread', 1)) / before:.1%}",
    ]


CASES = {"resnet18": "ResNet18", "mobilenet_v2-8": "MobileNetV2", "mobilenet_v2-4": "MobileNetV2"}
TABLES = {"permuted": tabulate}
