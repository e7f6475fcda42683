"""The paper's table 1, left half: hard thresholding before fine-tuning, ResNet18 on ImageNet."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import factorpack as fp
from benchmarks.data import imagenet_train, imagenet_val, normalized, pretrained, shuffled
from benchmarks.measure import top1
from benchmarks.training import device


def run(
    model: str, ranks: list[int], latent_bits: int, sparsities: list[float], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """`rows` are the table's: a name, the solver's settings, and the paper's numbers."""
    net = pretrained(model).to(device())
    val = imagenet_val()
    calibration = [normalized(shuffled(imagenet_train())[0][:64].to(device()))]
    table = []
    for rank in ranks:
        for row in rows:
            if rank != ranks[0] and not row.get("rank_search", False):
                continue
            for sparsity, paper in zip(sparsities, row["paper"], strict=True):
                solver = fp.ProjectedGradient(**row["solver"])
                method = fp.QSPCA(rank, latent_bits, sparsity, clip="minmax", solver=solver)
                packed = fp.compress(net, method, calibration=calibration, progress=False)
                found = measured(packed, model, val)
                table.append(
                    {"name": row["name"], "rank": rank, "sparsity": sparsity, "paper": paper, **found}
                )
                print(table[-1], flush=True)
    return {"fp32": top1(net, val), "table": table}


def measured(packed: fp.Packed, model: str, val: Any) -> dict[str, float]:
    """Size and accuracy of a file on disk."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "packed.safetensors"
        fp.save(packed, path)
        loaded = fp.load(path)
        report = loaded.size()
        net = loaded.load_into(pretrained(model)).to(device()).eval()
        return {
            "top1": top1(net, val),
            "file_ratio": report.file_ratio or 0.0,
            "paper_ratio": report.paper_ratio,
        }
