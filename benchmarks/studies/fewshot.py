"""Distillation on 1,000 ImageNet images alone: what a person without the training set can do."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import factorpack as fp
from benchmarks.data import imagenet_train, imagenet_val, normalized, pretrained, shuffled
from benchmarks.formatting import describe_schedule, format_source, format_table, load_result, qspca_cells
from benchmarks.measure import fidelity, predictions, reloaded
from benchmarks.training import Augmented, case_of, device, run_parallel
from factorpack.comparison.baselines import title_of
from factorpack.comparison.grid import weight_error
from factorpack.comparison.permute import permute_model
from factorpack.methods import METHODS, from_fields
from factorpack.methods.codeword_tiles import Regime, tile_of

HELD_OUT = 200
MEASURED = 125
"""Training images on which a planned file is measured while it is trained, an eighth of all."""
SHOWN = 64
"""Images for methods that look at inputs, unless their `samples` says otherwise."""


def run(
    model: str,
    schedule: dict[str, Any],
    methods: list[dict[str, Any]],
    workers: int,
    measure_on: str = "val",
) -> dict[str, Any]:
    """`measure_on` "train" keeps 200 of the 1,000 images out of training and measures on those.

    A method with `permute` gets the model with its channels in another order, as PQF does. A method "plan" is
    the plan for its `ratio`; the result also has what was measured while it was trained.
    """
    cases = [case_of(method, schedule) for method in methods]
    planned = methods[0]["method"] == "plan"
    work = _one_plan if planned else partial(_one, measure_on=measure_on)
    return {"rows": run_parallel(partial(work, model=model), cases, workers)}


def _one_plan(case: dict[str, Any], model: str) -> dict[str, Any]:
    """A plan from 875 unlabelled images, trained on them; 125 others say which epoch was best."""
    torch.backends.cuda.matmul.allow_tf32 = True
    pixels, labels = shuffled(imagenet_train(256))
    centres = pixels[:, :, 16:240, 16:240]
    held, reference_net = imagenet_val(), pretrained(model).to(device())
    reference = predictions(reference_net, held[0], 250)
    settings, fields = dict(case["schedule"]), dict(case["method"])
    batch = settings.pop("batch", 50)
    calibration = [normalized(part.to(device())) for part in centres[:-MEASURED].split(SHOWN)]
    planner = fp.Planner(samples=len(pixels) - MEASURED, trellis=fields.get("trellis", 0))
    packed = fp.compress(
        reference_net, ratio=fields["ratio"], calibration=calibration, planner=planner, progress=False
    )
    before = fidelity(predictions(_loaded(packed, model), held[0], 250), reference, held[1])
    if fields.get("blocks", 0):
        fp.tune.reconstruct(packed, reference_net, calibration, steps=fields["blocks"], progress=False)
    # Frozen codes keep their size; those that are trained are held to it.
    target = fields["ratio"] if settings.get("codes") != "frozen" else 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing helped is in the result
        fp.finetune(
            packed,
            pretrained(model).to(device()),
            Augmented((pixels[:-MEASURED], labels[:-MEASURED]), batch, crop=224),
            teacher=reference_net,
            schedule=fp.Schedule(target_ratio=target, **settings),
            held_out=[normalized(part.to(device())) for part in centres[-MEASURED:].split(SHOWN)],
            progress=False,
        )
    assert packed.tuned is not None
    tuned = asdict(packed.tuned)
    with tempfile.TemporaryDirectory() as folder:
        loaded = reloaded(packed, folder)
        after = fidelity(predictions(_loaded(loaded, model), held[0], 250), reference, held[1])
        return {**case, "before": before, "tuned": tuned, **after, "file_ratio": loaded.size().file_ratio}


def _one(case: dict[str, Any], model: str, measure_on: str) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = True
    images = shuffled(imagenet_train(256))
    if measure_on == "train":
        held = images[0][-HELD_OUT:, :, 16:240, 16:240], images[1][-HELD_OUT:]
        images = images[0][:-HELD_OUT], images[1][:-HELD_OUT]
    else:
        held = imagenet_val()
    net = pretrained(model).to(device())
    reference = predictions(net, held[0], 250)
    settings = dict(case["schedule"])
    batch = settings.pop("batch", 50)
    fields = dict(case["method"])
    shown = images[0][: fields.get("samples", SHOWN), :, 16:240, 16:240]
    calibration = [normalized(part.to(device())) for part in shown.split(SHOWN)]
    start = net
    if fields.pop("permute", False):
        start, _ = permute_model(net, calibration[0], tile_of=partial(_tile, regime=fields["regime"]))
    packed = fp.compress(start, from_fields(METHODS, fields), calibration=calibration, progress=False)
    error = weight_error(start, packed)
    before = fidelity(predictions(_loaded(packed, model), held[0], 250), reference, held[1])
    normed = _norms_anew(_loaded(packed, model), images[0][:, :, 16:240, 16:240])
    anew = fidelity(predictions(normed, held[0], 250), reference, held[1])
    fp.finetune(
        packed,
        pretrained(model).to(device()),
        Augmented(images, batch, crop=224),
        teacher=net,
        schedule=fp.Schedule(**settings),
        progress=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        loaded = reloaded(packed, folder)
        report = loaded.size()
        after = fidelity(predictions(_loaded(loaded, model), held[0], 250), reference, held[1])
    sizes = {"file_ratio": report.file_ratio, "paper_ratio": report.paper_ratio}
    return {**case, "before": before, "norms_anew": anew, "weight_error": error, **after, **sizes}


def _norms_anew(net: nn.Module, images: Tensor) -> nn.Module:
    """The net with means and variances of its batch norms measured on some images, as training does first."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # plain means over all batches
    net.train()
    with torch.no_grad():
        for part in images.split(100):
            net(normalized(part.to(device())))
    return net.eval()


def _tile(_name: str, shape: tuple[int, ...], regime: Regime) -> int:
    return tile_of(shape, regime=regime)


def _loaded(packed: fp.Packed, model: str) -> nn.Module:
    return packed.load_into(pretrained(model)).to(device()).eval()


def tabulate(model: str) -> str:
    document = load_result("fewshot", model)
    rows = [
        [
            *qspca_cells(row["method"]),
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
        "top-1 before",
        "after",
        "agreement with FP32",
        "KL, nats",
    ]
    note = f"Training: {describe_schedule(document['settings']['schedule'])}.\n"
    return f"{format_table(head, rows)}\n{note}{format_source(document)}"


def tabulate_codewords() -> str:
    """VQ, BGD and PQF in the two regimes of their papers, before and after the same few-shot training."""
    document = load_result("fewshot", "codewords")
    rows = [
        [
            _describe_codewords(row["method"]),
            f"{row['file_ratio']:.1f}",
            f"{row['weight_error'] ** 0.5:.3f}",
            *(f"{row[key]['kl']:.2f}" for key in ("before", "norms_anew")),
            f"{row['kl']:.3f}",
            f"{row['top1']:.1f}",
        ]
        for row in sorted(document["result"]["rows"], key=lambda row: row["file_ratio"] > 36)
    ]
    head = ["method", "file ratio", "weight error", "KL before", "KL, norms measured again", "KL trained"]
    note = f"Training: {describe_schedule(document['settings']['schedule'])}.\n"
    return f"{format_table([*head, 'top-1 trained'], rows)}\n{note}{format_source(document)}"


def _describe_codewords(method: dict[str, Any]) -> str:
    more = [f"{key} {method[key]}" for key in ("samples", "damping", "gram") if key in method]
    return ", ".join([f"{title_of(method['method'])}, {method['regime']} blocks", *more])


TABLES = {
    "fewshot-resnet18": partial(tabulate, "resnet18"),
    "fewshot-mobilenet_v2": partial(tabulate, "mobilenet_v2"),
    "codewords": tabulate_codewords,
}
