"""Tables of models planned into a budget: accuracy, ablation, codes, cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.tables_common import markdown, result, source


def planned(model: str) -> Callable[[], str]:
    """Ours at each ratio, then every other method at the sizes it has, largest files first."""

    def table() -> str:
        document = result("budget", model)
        rows = [
            [
                _name(row),
                f"{row['file_ratio']:.2f}",
                f"{row['top1']:.1f}",
                f"{row['agreement']:.1f}",
                f"{row['kl']:.3f}",
            ]
            for row in sorted(document["result"]["rows"], key=lambda row: (_name(row), row["file_ratio"]))
        ]
        head = ["method", "file ratio", "top-1", "agreement with FP32", "KL, nats"]
        fp32, samples = document["result"]["fp32"], document["settings"]["samples"]
        note = f"FP32 {fp32:.1f} on these 2,000 images; {samples} unlabelled images, no training.\n"
        return f"{markdown(head, rows)}\n{note}{source(document)}"

    return table


def _name(row: dict[str, Any]) -> str:
    if "planner" in row:
        return "**planned**"
    method = row["method"]
    if method["method"] == "qspca":
        return f"the paper's QSPCA, {method['latent_bits']} bits, the rank that fits"
    if method["method"] == "second_order":
        return f"error feedback, {method['bits']} bits a channel"
    return f"rounding to nearest, {method['bits']} bits a channel"


def headline() -> str:
    """Two rows a model, for the README."""
    rows = []
    for model, title in (("resnet18", "ResNet18"), ("mobilenet_v2", "MobileNetV2")):
        document = result("budget", model)
        found = [row for row in document["result"]["rows"] if "planner" in row]
        rows.append(
            [
                f"{title} (FP32 {document['result']['fp32']:.1f})",
                ", ".join(f"{row['file_ratio']:.1f}x" for row in found),
                ", ".join(f"{row['top1']:.1f}" for row in found),
            ]
        )
    note = "1,000 unlabelled images, no training; top-1 on 2,000 ImageNet validation images.\n"
    documents = "".join(source(result("budget", model)) for model in ("resnet18", "mobilenet_v2"))
    return f"{markdown(['model', 'times smaller, bytes on disk', 'top-1'], rows)}\n{note}{documents}"


def ablation_planner() -> str:
    document = result("ablation", "resnet18")
    rows = [
        [row["name"], f"{row['file_ratio']:.2f}", f"{row['top1']:.1f}", f"{row['kl']:.3f}"]
        for row in document["result"]["rows"]
    ]
    return f"{markdown(['ingredients', 'file ratio', 'top-1', 'KL, nats'], rows)}\n{source(document)}"


def choices(case: str) -> Callable[[], str]:
    def table() -> str:
        document = result("budget", case)
        rows = [
            [row["name"], f"{row['file_ratio']:.1f}", f"{row['top1']:.1f}", f"{row['kl']:.4f}"]
            for row in document["result"]["rows"]
        ]
        return f"{markdown(['setting', 'file ratio', 'top-1', 'KL, nats'], rows)}\n{source(document)}"

    return table


def trained(case: str) -> Callable[[], str]:
    """Trained to sizes on CIFAR-10: the paper's settings, and nets planned into a budget."""

    def table() -> str:
        document = result("rate", case)
        outcome = document["result"]
        rows = [
            [
                _trained_name(row["method"]),
                f"{row['schedule']['learning_rate']:g}",
                f"{row['file_ratio']:.1f}",
                f"{row['file_bytes']:,}",
                f"{row['top1_before']:.2f}",
                f"{row['top1']:.2f}",
            ]
            for row in outcome["rows"]
        ]
        head = ["start", "learning rate", "file ratio", "bytes", "before", "trained"]
        schedule = document["settings"]["schedule"]
        words = f"{schedule['epochs']} epochs each in batches of {schedule['batch']}, 10,000 test images"
        note = f"FP32 {outcome['fp32_test_top1']:.2f}; {words}.\n"
        return f"{markdown(head, rows)}\n{note}{source(document)}"

    return table


def _trained_name(method: dict[str, Any]) -> str:
    if method["method"] == "planned":
        start = method.get("start", 1.0)
        size = "" if start == 1 else f" at {start:g} of the ratio"
        return f"**planned**{size}, then a rate term"
    return f"QSPCA, rank {method['rank']}, {method['latent_bits']} bits, {method['sparsity']:.0%} sparse"


CODES = {
    "nearest, ideal, one model a tensor": "nearest rounding, one ideal model a tensor",
    "nearest": "nearest rounding, our stream (two-way classes)",
    "rdo 0.116": "rounding by rate, our stream",
    "rdo + magnitude contexts": "... with contexts of neighbouring magnitudes",
    "rdo + sign contexts": "... with contexts of neighbouring signs",
    "tcq 4": "trellis-coded, 4 states",
    "tcq 8": "trellis-coded, 8 states",
}


def codes() -> str:
    cases = ("resnet18-low", "resnet18-middle", "mobilenet_v2-low", "mobilenet_v2-middle", "gaussian-low")
    documents = {case: result("codes", case) for case in cases}
    outcomes = [document["result"] for document in documents.values()]
    rows = [
        [words, *(f"{outcome['bits_a_weight'][key]:.3f}" for outcome in outcomes)]
        for key, words in CODES.items()
    ]
    bound = "Gaussian classes"
    rows.append(
        ["the Gaussian bound", *(f"{outcome['bounds_bits_a_weight'][bound]:.3f}" for outcome in outcomes)]
    )
    notes = "".join(source(document) for document in documents.values())
    return f"{markdown(['bits a weight at equal error', *cases], rows)}\n{notes}"


def paths() -> str:
    rows, notes = [], ""
    for model in ("resnet18", "mobilenet_v2"):
        document = result("paths", model)
        notes += source(document)
        for row in document["result"]["rows"]:
            saved = [f"{row[f'{count} states']['saved_percent']:.1f}" for count in (4, 8)]
            rows.append([model, row["layer"], str(row["tile"]), f"{row['bits_a_weight']:.2f}", *saved])
        means = document["result"]["mean_saved_percent"]
        rows.append([model, "all of these", "", "", *(f"{means[f'{count} states']:.1f}" for count in (4, 8))])
    head = ["model", "layer", "tile", "bits a weight", "4 states, % saved", "8 states, % saved"]
    return f"{markdown(head, rows)}\n{notes}"


def cost() -> str:
    words = {
        "resnet18-gpu": "ResNet18, 256 images",
        "resnet18-cpu": "ResNet18, 256 images",
        "resnet18-weights": "ResNet18, weights alone",
        "growth": "linear layers, weights alone",
    }
    rows, notes = [], ""
    for case, title in words.items():
        document = result("cost", case)
        notes += source(document)
        where = "GPU" if "gpu" in document["machine"] else f"{document['machine']['cores']} cores"
        found = document["result"]["rows"]
        for row in found if case == "growth" else found[-1:]:
            memory = row.get("gpu_peak_bytes", row["peak_bytes"])
            rows.append(
                [
                    title,
                    where,
                    f"{row['parameters'] / 1e6:.1f}",
                    f"{row['seconds']:.0f}",
                    f"{memory / 1e6:.0f}",
                ]
            )
    head = ["model", "on", "million parameters", "seconds", "peak memory above the start, MB"]
    return f"{markdown(head, rows)}\n{notes}"


def kept() -> str:
    document = result("kept", "weights")
    rows = [
        [
            row["checkpoint"].split(":")[0],
            f"{row['ratio']:.0f}",
            f"{row['budget_bytes']:,}",
            f"{row['file_bytes']:,}",
            f"{row['file_bytes'] / row['budget_bytes']:.2%}",
        ]
        for row in document["result"]["rows"]
    ]
    head = ["checkpoint", "ratio", "budget, bytes", "file, bytes", "of the budget"]
    return f"{markdown(head, rows)}\n{source(document)}"


PLANNED: dict[str, Callable[[], str]] = {
    "planned-resnet18": planned("resnet18"),
    "planned-mobilenet_v2": planned("mobilenet_v2"),
    "headline": headline,
    "ablation-planner": ablation_planner,
    "choices-resnet18": choices("resnet18-choose"),
    "choices-mobilenet_v2": choices("mobilenet_v2-choose"),
    "trellis-mobilenet_v2": choices("mobilenet_v2-trellis"),
    "trained": trained("resnet18"),
    "trained-long": trained("resnet18-long"),
    "codes": codes,
    "paths": paths,
    "cost": cost,
    "kept": kept,
}
