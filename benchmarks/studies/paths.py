"""What a path through a trellis saves under error feedback, layer by layer, and what it costs in time.

Bytes are the format's estimates (within 16 of the file). Errors are those of the layer's outputs under the
moments of training images. A path and plain codes are compared at equal error, on the plain codes' curve.
Seconds are processor time on one thread, so other work on the machine is not in them.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import log2
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.data import imagenet_train, normalized, pretrained, shuffled
from benchmarks.formatting import MODELS, format_source, format_table, load_result
from factorpack.budget.candidates import Try, choose_methods, measure_steps, middle_step
from factorpack.budget.coding import encode_with_step
from factorpack.budget.planner import Planner
from factorpack.calibration.calibrate import calibrate
from factorpack.format import entropy, trellis_stream
from factorpack.format.streams import coded_bytes, split_of
from factorpack.methods import SecondOrder
from factorpack.record import Encoded, LayerMoments
from factorpack.solve.code_length import HIGH_RATE
from factorpack.solve.layer_problem import DAMPING
from factorpack.weight import Weight

OCTAVES = (-0.5, -0.25, 0.0, 0.25, 0.5)
"""Steps of the plain curve; a path is tried at the middle one."""


def run(model: str, samples: int, bits: list[float], states: list[int], layers: list[str]) -> dict[str, Any]:
    """Percent of bytes saved at about `bits` per weight, for every layer and number of states."""
    torch.set_num_threads(1)
    net = pretrained(model)
    images = shuffled(imagenet_train())[0][:samples]
    calibration = calibrate(net, [normalized(batch) for batch in images.split(32)], samples)
    rows = []
    for layer in layers:
        moments = calibration.moments([layer], net)[layer]
        weight = net.get_submodule(layer).weight.detach()
        for rate in bits:
            rows.append({"layer": layer, **_row(weight, moments, rate, states)})
            print(rows[-1], flush=True)
    total = {f"{count} states": _mean(rows, count) for count in states}
    return {"rows": rows, "mean_saved_percent": total}


def _row(weight: Tensor, moments: LayerMoments, rate: float, states: list[int]) -> dict[str, Any]:
    known = Weight(weight, 0, moments, 1.0)
    (method,) = choose_methods([known], Planner(price=HIGH_RATE, damping=DAMPING, trellis=0), rate)
    middle = middle_step(known, method, rate)
    curve = [encode_with_step(known, method, middle * 2.0**octave) for octave in OCTAVES]
    errors, sizes = (
        [log2(_loss(known, method, coded.step)) for coded in curve],
        [log2(coded_bytes(coded.encoded)) for coded in curve],
    )
    plain, seconds = _timed(known, method, middle)
    row: dict[str, Any] = {
        "shape": list(weight.shape),
        "tile": method.tile,
        "bits_a_weight": 8 * coded_bytes(plain[0]) / weight.numel(),
        "plain": {"seconds": seconds, "decode_ns_a_code": _decode_ns(plain[0])},
    }
    for count in states:
        (encoded, loss), seconds = _timed(known, replace(method, trellis=count), middle)
        fair = 2.0 ** float(np.interp(log2(loss), errors, sizes))
        row[f"{count} states"] = {
            "saved_percent": 100 * (1 - coded_bytes(encoded) / fair),
            "error_beside_plain": loss / plain[1],
            "seconds": seconds,
            "decode_ns_a_code": _decode_ns(encoded),
        }
    return row


def _loss(weight: Weight, method: SecondOrder, step: float) -> float:
    (((_, loss),),) = measure_steps([Try(weight, method, [step])])
    return loss


def _timed(weight: Weight, method: SecondOrder, step: float) -> tuple[tuple[Encoded, float], float]:
    started = time.process_time()
    encoded = encode_with_step(weight, method, step).encoded
    seconds = round(time.process_time() - started, 2)
    return (encoded, _loss(weight, method, step)), seconds


def _decode_ns(encoded: Encoded) -> float:
    """Time to read the codes from their stream."""
    name = "latent" if "latent" in encoded.parts else "codes"
    codes, split = encoded.parts[name].numpy(), split_of(encoded, name)
    states = encoded.trellis
    data = trellis_stream.encode(codes, states, split) if states else entropy.encode(codes, split)
    started = time.process_time()
    back = trellis_stream.decode(data, *codes.shape, states) if states else entropy.decode(data, *codes.shape)
    nanoseconds = 1e9 * (time.process_time() - started) / codes.size
    assert (back == codes).all()
    return round(nanoseconds, 1)


def _mean(rows: list[dict[str, Any]], states: int) -> float:
    """The mean over layers, each weighted by its bits."""
    sizes = [np.prod(row["shape"]) * row["bits_a_weight"] for row in rows]
    saved = [row[f"{states} states"]["saved_percent"] for row in rows]
    return float(np.average(saved, weights=sizes))


def tabulate() -> str:
    documents = {model: load_result("paths", model) for model in MODELS}
    rows = []
    for model, document in documents.items():
        for row in document["result"]["rows"]:
            saved = [f"{row[f'{count} states']['saved_percent']:.1f}" for count in (4, 8)]
            rows.append(
                [MODELS[model], row["layer"], str(row["tile"]), f"{row['bits_a_weight']:.2f}", *saved]
            )
        means = document["result"]["mean_saved_percent"]
        rows.append([MODELS[model], "all of these", "", "", *(f"{means[f'{n} states']:.1f}" for n in (4, 8))])
    head = ["model", "layer", "tile", "bits per weight", "4 states, % saved", "8 states, % saved"]
    return f"{format_table(head, rows)}\n{format_source(*documents.values())}"


TABLES = {"paths": tabulate}
