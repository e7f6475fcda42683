"""From the weights alone, at the bytes of the real NNCodec's bitstreams: ours beside it, on validation images."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import factorpack as fp
from benchmarks.data import Images, centred, imagenet_val, normalized, pretrained
from benchmarks.formatting import MODELS, format_source, format_table, is_stored, load_result
from benchmarks.measure import fidelity, predictions
from benchmarks.training import device
from factorpack.budget.goals import original_bytes
from factorpack.comparison import Point
from factorpack.comparison.nncodec import NNCodec
from factorpack.source import open_source

PREPARE = {"efficientnet_lite0": centred}
TITLES = {**MODELS, "efficientnet_lite0": "EfficientNet-Lite0"}
STUDY = "weights_alone"
HEAD = ["NNCodec, bytes", "ours, bytes", "NNCodec, top-1", "ours, top-1", "NNCodec, KL", "ours, KL"]
Row = dict[str, Any]


def run(model: str, qps: list[float], tuned_qps: list[float]) -> dict[str, Any]:
    """NNCodec with its own defaults at `qps`, and at its best settings at `tuned_qps`.

    Its points are taken from the stored result where that has them, so that ours alone can be run again,
    without its package. Remove the result to make them again.
    """
    judge = _Judge(model)
    wanted = [{"qp": qp, "tuned": tuned} for tuned in (False, True) for qp in (tuned_qps if tuned else qps)]
    stored = _stored(model)
    rows = []
    for point in wanted:
        known = [row for row in stored if {key: row[key] for key in point} == point]
        row = {**point, **(_peer_half(judge, **point) if not known else _peer_fields(known[0]))}
        row["factorpack"] = judge.measure_ours(row["nncodec"]["bytes"])
        print(row, flush=True)
        rows.append(row)
    return {"original_bytes": original_bytes(open_source(judge.net)), "fp32": judge.fp32, "rows": rows}


def _stored(model: str) -> list[Row]:
    rows: list[Row] = load_result(STUDY, model)["result"]["rows"] if is_stored(STUDY, model) else []
    return rows


def _peer_fields(row: Row) -> Row:
    return {key: row[key] for key in ("version", "nncodec")}


def _peer_half(judge: _Judge, qp: float, tuned: bool) -> Row:
    peer = NNCodec(judge.net, tuned)
    started = time.perf_counter()
    stream = peer.encode(qp)
    seconds = time.perf_counter() - started
    return {"version": peer.version(), "nncodec": judge.measure(peer.decode(stream), len(stream), seconds)}


class _Judge:
    """A model, and the comparison of other weights with its own."""

    def __init__(self, model: str) -> None:
        self.net: nn.Module = pretrained(model)
        self.original = {name: value.clone() for name, value in self.net.state_dict().items()}
        self.net.to(device(), memory_format=torch.channels_last)
        self.prepare = PREPARE.get(model, normalized)
        self.images: Images = imagenet_val()
        self.reference: Tensor = self._predict(self.original)
        self.fp32 = fidelity(self.reference, self.reference, self.images[1])["top1"]

    def _predict(self, state: dict[str, Tensor]) -> Tensor:
        try:
            self.net.load_state_dict(state)
            is_on_gpu = device().type == "cuda"
            net, batch = (
                (self.net, 50) if is_on_gpu else (_fused(self.net, self.prepare(self.images[0][:8])), 8)
            )
            return predictions(net, self.images[0], batch, self.prepare)
        finally:
            self.net.load_state_dict(self.original)

    def measure(self, state: dict[str, Tensor], size: int, seconds: float) -> dict[str, float]:
        found = fidelity(self._predict(state), self.reference, self.images[1])
        return {"bytes": size, "top1": found["top1"], "kl": found["kl"], "seconds": round(seconds, 1)}

    def measure_ours(self, max_bytes: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "packed.safetensors"
            started = time.perf_counter()
            fp.save(fp.compress(self.original, max_bytes=max_bytes, progress=False), path)
            seconds = time.perf_counter() - started
            return self.measure(dict(fp.load(path).state_dict()), path.stat().st_size, seconds)


def _fused(net: nn.Module, images: Tensor) -> nn.Module:
    """The same function with norms and activations inside convolutions: a CPU takes less than half as long."""
    with torch.no_grad():
        fused: nn.Module = torch.jit.optimize_for_inference(torch.jit.trace(net, images))
    return fused


def tabulate(model: str) -> str:
    """One row per bitstream, the largest first."""
    if not is_stored(STUDY, model):
        return f"{TITLES[model]}: not measured yet.\n"
    document = load_result(STUDY, model)
    result = document["result"]
    rows = sorted(result["rows"], key=lambda row: -row["nncodec"]["bytes"])
    head = [f"{TITLES[model]}, NNCodec's settings", "times smaller", *HEAD]
    versions = ", ".join(sorted({row["version"] for row in rows}))
    note = f"FP32 {result['fp32']:.1f}. NNCodec {versions}. KL in nats.\n"
    lines = [_line(row, result["original_bytes"]) for row in rows]
    return f"{format_table(head, lines)}\n{note}{format_source(document)}"


def _line(row: Row, original: int) -> list[str]:
    theirs, ours = row["nncodec"], row["factorpack"]
    return [
        f"{'best' if row['tuned'] else 'defaults'}, qp {row['qp']:g}",
        f"{original / theirs['bytes']:.1f}",
        f"{theirs['bytes']:,}",
        f"{ours['bytes']:,}",
        f"{theirs['top1']:.1f}",
        f"{ours['top1']:.1f}",
        f"{theirs['kl']:.3f}",
        f"{ours['kl']:.3f}",
    ]


def _frontier(model: str) -> list[Row]:
    """NNCodec's points that none of its others beats in bytes and in top-1, the largest first."""
    best: list[Row] = []
    for row in sorted(_stored(model), key=lambda row: row["nncodec"]["bytes"]):
        if not best or row["nncodec"]["top1"] > best[-1]["nncodec"]["top1"]:
            best.append(row)
    return best[::-1]


def peer_points(model: str) -> list[Point]:
    """NNCodec's frontier, as a comparison has it."""
    if not is_stored(STUDY, model):
        return []
    original = load_result(STUDY, model)["result"]["original_bytes"]
    return [
        Point(
            "nncodec",
            0.0,
            f"qp {row['qp']:g}",
            "stored",
            row["nncodec"]["bytes"],
            original / row["nncodec"]["bytes"],
            measured={"top1": row["nncodec"]["top1"] / 100},
            version=row["version"],
        )
        for row in _frontier(model)
    ]


def tabulate_headline() -> str:
    """Both at the bytes of NNCodec's frontier, with at least half of FP32's top-1."""
    documents = {model: load_result(STUDY, model) for model in TITLES if is_stored(STUDY, model)}
    lines, versions = [], set()
    for model, document in documents.items():
        result = document["result"]
        versions |= {row["version"] for row in result["rows"]}
        rows = [row for row in _frontier(model) if row["nncodec"]["top1"] > result["fp32"] / 2]
        sizes = [f"{result['original_bytes'] / row['nncodec']['bytes']:.1f}x" for row in rows]
        scores = [[f"{row[who]['top1']:.1f}" for row in rows] for who in ("factorpack", "nncodec")]
        name = f"{TITLES[model]} (FP32 {result['fp32']:.1f})"
        lines.append([name, *(", ".join(each) for each in (sizes, *scores))])
    peer = f"NNCodec {', '.join(sorted(versions))}, top-1"
    head = ["from the weights alone", "times smaller", "factorpack, top-1", peer]
    return f"{format_table(head, lines)}\n{format_source(*documents.values())}"


def tabulate_first(model: str = "resnet18") -> str:
    """One net on the first screen: every other point of NNCodec's frontier."""
    document = load_result(STUDY, model)
    result = document["result"]
    rows = [row for row in _frontier(model) if row["nncodec"]["top1"] > result["fp32"] / 2][::2]
    lines = [
        [
            f"{row['nncodec']['bytes'] / 1e6:.2f}",
            f"{result['original_bytes'] / row['nncodec']['bytes']:.1f}",
            *(f"{row[who]['top1']:.1f}" for who in ("nncodec", "factorpack")),
        ]
        for row in rows
    ]
    peer = f"NNCodec {rows[0]['version']}, top-1"
    head = [f"{TITLES[model]} (FP32 {result['fp32']:.1f}), MB", "times smaller", peer, "factorpack, top-1"]
    return f"{format_table(head, lines)}\n{format_source(document)}"


TABLES = {f"weights-alone-{model}": partial(tabulate, model) for model in TITLES}
TABLES |= {"weights-alone-first": tabulate_first, "weights-alone-headline": tabulate_headline}
