"""The paper's table 1, left half: hard thresholding before fine-tuning, ResNet18 on ImageNet."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

import factorpack as fp
from benchmarks.data import imagenet_train, imagenet_val, normalized, pretrained, shuffled
from benchmarks.formatting import format_source, format_table, load_result
from benchmarks.measure import reloaded, top1
from benchmarks.training import device, run_parallel
from factorpack.quantize.uniform import from_codes
from factorpack.record import Encoded
from factorpack.solve.threshold import extra_zero_mask


def run(
    model: str,
    ranks: list[int],
    latent_bits: int,
    sparsities: list[float],
    rows: list[dict[str, Any]],
    workers: int,
    latent_scales: str = "row",
    sort: str = "value",
    when: str = "layer by layer",
    sequential: bool = True,
) -> dict[str, Any]:
    """`rows` are the table's: a name, the solver's settings, and the paper's numbers.

    With `when` = "after all layers" nothing is thresholded until the whole network has been optimised, so
    that no layer can compensate for what the threshold does to the layers before it. Without `sequential`
    a layer is given the original network's inputs, not those that the layers compressed before it produce.
    """
    if when == "after all layers":
        return _thresholded_last(model, ranks[0], latent_bits, sparsities, rows, latent_scales, sort)
    cases = [
        {"name": row["name"], "rank": rank, "sparsity": sparsity, "paper": paper, "solver": row["solver"]}
        for rank in ranks
        for row in rows
        if rank == ranks[0] or row.get("rank_search", False)
        for sparsity, paper in zip(sparsities, row["paper"], strict=True)
    ]
    work = partial(
        _cell,
        model=model,
        latent_bits=latent_bits,
        latent_scales=latent_scales,
        sort=sort,
        sequential=sequential,
    )
    table = run_parallel(work, cases, workers)
    return {"fp32": top1(pretrained(model).to(device()), imagenet_val()), "table": table}


def _cell(
    case: dict[str, Any],
    model: str,
    latent_bits: int,
    latent_scales: Literal["row", "column"],
    sort: Any,
    sequential: bool,
) -> dict[str, Any]:
    net = pretrained(model).to(device())
    calibration = [normalized(shuffled(imagenet_train())[0][:64].to(device()))]
    method = fp.QSPCA(
        case["rank"],
        latent_bits,
        case["sparsity"],
        latent_scales=latent_scales,
        clip="minmax",
        solver=fp.methods.ProjectedGradient(**case["solver"], sort=sort),
    )
    packed = fp.compress(net, method, calibration=calibration, sequential=sequential, progress=False)
    described = {field: value for field, value in case.items() if field != "solver"}
    return {**described, **measured(packed, model, imagenet_val())}


def _thresholded_last(
    model: str,
    rank: int,
    latent_bits: int,
    sparsities: list[float],
    rows: list[dict[str, Any]],
    latent_scales: Any,
    sort: str,
) -> dict[str, Any]:
    net = pretrained(model).to(device())
    calibration = [normalized(shuffled(imagenet_train())[0][:64].to(device()))]
    table = []
    for row in rows:
        solver = fp.methods.ProjectedGradient(**row["solver"])
        method = fp.QSPCA(rank, latent_bits, latent_scales=latent_scales, clip="minmax", solver=solver)
        dense = fp.compress(net, method, calibration=calibration, progress=False)
        for sparsity, paper in zip(sparsities, row["paper"], strict=True):
            sparse = fp.Packed({name: _sparsified(each, sparsity, sort) for name, each in dense.items()})
            cell = {"name": row["name"], "rank": rank, "sparsity": sparsity, "paper": paper}
            table.append(cell | measured(sparse, model, imagenet_val()))
            print(table[-1], flush=True)
    return {"fp32": top1(net, imagenet_val()), "table": table}


def _sparsified(encoded: Encoded, sparsity: float, sort: str) -> Encoded:
    """Extra zeros in a latent whose real values are gone: ties are broken at random."""
    if encoded.kind != "factors":
        return encoded
    codes = encoded.parts["latent"]
    size = codes.float() if sort == "code" else from_codes(codes, encoded.parts["latent_scale"])
    chance = torch.rand(codes.shape, generator=torch.Generator().manual_seed(0))
    keep = extra_zero_mask(size, chance, sparsity)
    parts = {**encoded.parts, "latent": codes * keep}
    return replace(encoded, parts=parts, extra_zeros=int(keep.numel() - keep.sum()))


def measured(packed: fp.Packed, model: str, val: Any) -> dict[str, float]:
    """Size and accuracy of a file on disk."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = reloaded(packed, folder)
        report = loaded.size()
        net = loaded.load_into(pretrained(model)).to(device()).eval()
        return {
            "top1": top1(net, val),
            "file_ratio": report.file_ratio or 0.0,
            "paper_ratio": report.paper_ratio,
        }


def tabulate() -> str:
    document = load_result("thresholding", "resnet18")
    outcome = document["result"]
    rows = [
        [str(rank), name, *(f"{cell['top1']:.1f} ({cell['paper']:.1f})" for cell in cells)]
        for (rank, name), cells in _grouped(outcome["table"]).items()
    ]
    head = ["rank", "solver", *(f"{cell['sparsity']:.0%}" for cell in outcome["table"][:3])]
    note = f"FP32 {outcome['fp32']:.2f} on these 2,000 images; the paper's numbers in parentheses.\n"
    return f"{format_table(head, rows)}\n{note}{format_source(document)}"


def tabulate_variants() -> str:
    documents = {suffix: load_result("thresholding", f"resnet18{suffix}") for suffix in VARIANTS}
    rows = []
    for suffix, document in documents.items():
        for (rank, name), cells in _grouped(document["result"]["table"]).items():
            if rank == 128 or (suffix == "" and name not in SHOWN):
                continue
            scores = [f"{cell['top1']:.1f} ({cell['top1'] - cell['paper']:+.1f})" for cell in cells]
            rows.append([VARIANTS[suffix], str(rank), name, *scores, *["-"] * (3 - len(scores))])
    head = ["variant", "rank", "solver", "10%", "20%", "30%"]
    note = "In parentheses the difference from the paper.\n"
    return f"{format_table(head, rows)}\n{note}{format_source(*documents.values())}"


def _grouped(cells: list[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Cells of one rank and solver together, in their order."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for cell in cells:
        found.setdefault((cell["rank"], cell["name"]), []).append(cell)
    return found


VARIANTS = {
    "": "one scale per row, sorted by value",
    "-columns": "one scale per column, sorted by value",
    "-codes": "one scale per row, sorted by code",
    "-columns-codes": "one scale per column, sorted by code",
    "-last": "the same, one-shot after all layers",
    "-columns-codes-100": "one scale per column, sorted by code",
    "-few": "one scale per row, sorted by value",
    "-original-few": "one scale per column, sorted by code, original inputs",
    "-original": "one scale per column, sorted by code, original inputs",
}
"""The end of a result's name -> what was done."""
SHOWN = ("no data-aware optimisation", "one-shot, validation set", "iterative, 30 steps")
"""Rows of the first table that are in the second one too."""
TABLES = {"thresholding": tabulate, "thresholding-variants": tabulate_variants}
