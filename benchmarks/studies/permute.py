"""Is a model easier to vector-quantize once its channels are permuted? Errors of k-means at equal size."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.data import pretrained
from benchmarks.training import device
from factorpack.comparison.permute import Permuted, permute_model
from factorpack.tiles import to_tiles


def run(
    model: str, pointwise: int, kernels: int, codewords: int, passes: int, iterations: int, seeds: int
) -> dict[str, Any]:
    """`pointwise` numbers in a tile of a linear layer or 1x1 convolution, `kernels` kernels in any other's.

    `passes` are k-means', `iterations` the search's; k-means is started from `seeds` different tiles, since
    that alone moves its error.
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
            [_error(to_tiles(state[name], tile).T, codewords, passes, seed) for seed in range(seeds)]
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
    """Each weight that was searched on, and the log det a number of its group before and after."""
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
