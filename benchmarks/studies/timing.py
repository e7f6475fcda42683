"""How long compression takes: calibrated budgets beside plain 4-bit rounding of the same data, and saving."""

from __future__ import annotations

import copy
import gc
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import factorpack as fp
from benchmarks.data import imagenet_train, imagenet_val, normalized, pretrained, shuffled
from benchmarks.formatting import format_source, format_table, is_stored, load_result
from benchmarks.llamas import Shape, random_llama, random_tokens, sampled_tokens, stories15m, write_checkpoint
from benchmarks.measure import mean_divergence, peak_bytes, reset_peak
from benchmarks.training import device
from factorpack.methods import METHODS, from_fields

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Data:
    """Batches to calibrate on, and others to measure the divergence on."""

    batches: list[Any]
    held_out: list[Any]


def run(
    ratio: float = 0.0,
    model: str = "",
    llama: dict[str, int] | None = None,
    dtype: str = "float32",
    samples: int = 0,
    length: int = 0,
    batch: int = 50,
    held_out: int = 8,
    streamed: bool = False,
    rounding: bool = True,
    method: dict[str, Any] | None = None,
) -> Row:
    """Compresses "resnet18", "stories15m" or a random Llama into a budget, calibrated on `samples` inputs.

    `length` is the tokens of an input. With `streamed` the source is a sharded checkpoint on disk, and plain
    `rounding` can be left out. With a `method`, only saving what it makes from the weights alone is measured.
    """
    warm_up()
    if llama is not None:
        shape = Shape(**llama)  # type: ignore[arg-type]
        if method is not None:
            return time_saving(random_llama(shape, getattr(torch, dtype)), method)
        data = _texts(random_tokens(shape.vocabulary, samples + held_out, length), samples, batch)
        if streamed:
            return time_stream(shape, ratio, data, rounding)
        return time_model(random_llama(shape, getattr(torch, dtype)), ratio, data)
    if model == "stories15m":
        net = stories15m()
        return time_model(net, ratio, _texts(sampled_tokens(net, samples + held_out, length), samples, batch))
    return time_model(pretrained(model).to(device()), ratio, _images(samples, held_out, batch))


def _texts(tokens: Tensor, samples: int, batch: int) -> Data:
    """The first `samples` to calibrate on; the others one at a time, because logits of many are large."""
    tokens = tokens.to(device())
    calibration, held_out = tokens[:samples].split(batch), tokens[samples:].split(1)
    return Data([{"input_ids": each} for each in calibration], [{"input_ids": each} for each in held_out])


def _images(samples: int, held_out: int, batch: int) -> Data:
    held = [normalized(each.to(device())) for each in imagenet_val()[0][:held_out].split(batch)]
    if not samples:
        return Data([], held)
    images = shuffled(imagenet_train())[0][:samples]
    return Data([normalized(each.to(device())) for each in images.split(batch)], held)


def warm_up() -> None:
    """The first use of a device and of its libraries takes seconds that no later call pays."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 256, 3), nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    inputs = torch.randn(16, 4, 3, 3, device=device())
    fp.compress(net.to(device()).eval(), ratio=3, calibration=[inputs], progress=False)


def time_model(net: nn.Module, ratio: float, data: Data) -> Row:
    """A budget, and beside it rounding of the same data at a fixed width, where there is data."""
    samples = _count(data.batches)
    planner = fp.Planner(samples=samples or 1)

    def plan() -> fp.Packed:
        calibration = data.batches or None
        return fp.compress(net, ratio=ratio, calibration=calibration, planner=planner, progress=False)

    facts = {"parameters": _parameters(net), "samples": samples, "cores": len(os.sched_getaffinity(0))}
    twice = torch.cuda.is_available() and facts["parameters"] < MANY
    found = {**facts, "budget": _measured(net, plan, data.held_out)}
    if twice:
        found["again"] = _timed(plan)[1]
    return _with_rounding(found, net, data, twice) if data.batches else found


def time_stream(shape: Shape, ratio: float, data: Data, rounding: bool) -> Row:
    """As `time_model`, from a sharded checkpoint. Rounding has the model in memory, only the budget streams."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(prefix="factorpack-timing-") as folder:
        source, target = Path(folder) / "model", Path(folder) / "packed.safetensors"
        write_checkpoint(source, shape)
        packed, costs = _timed(lambda: _compress_streamed(source, ratio, data, target))
        net = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(device()).eval()
        facts = {"parameters": _parameters(net), "samples": _count(data.batches), "blocks": shape.layers}
        row = {**costs, **_quality(net, packed, data.held_out)}
        found = {**facts, "cores": len(os.sched_getaffinity(0)), "budget": row}
        return _with_rounding(found, net, data, twice=False) if rounding else found


def _compress_streamed(source: Path, ratio: float, data: Data, target: Path) -> fp.Packed:
    """The one call that reads a checkpoint block by block."""
    planner = fp.Planner(samples=_count(data.batches))
    return fp.compress(
        source, ratio=ratio, calibration=data.batches, planner=planner, to=target, progress=False
    )


def time_saving(net: nn.Module, method: dict[str, Any]) -> Row:
    """Encoding and writing alone. A method from the weights makes codes of the kind that budgets have."""
    packed = fp.compress(net, from_fields(METHODS, method), progress=False)
    with tempfile.TemporaryDirectory(prefix="factorpack-timing-") as folder:
        path = Path(folder) / "packed.safetensors"
        _, costs = _timed(lambda: fp.save(packed, path))
        facts = {"parameters": _parameters(net), "cores": len(os.sched_getaffinity(0))}
        return {**facts, "save": {**costs, "file_bytes": path.stat().st_size}}


def _with_rounding(found: Row, net: nn.Module, data: Data, twice: bool) -> Row:
    """Adds plain GPTQ, four bits with one scale per channel: what the arithmetic itself costs.

    It comes second, on a device that the budget has warmed up. Measured twice, both have had their first call.
    """
    method = fp.SecondOrder(bits=4, samples=_count(data.batches))

    def round_all() -> fp.Packed:
        return fp.compress(net, method, calibration=data.batches, progress=False)

    rounding = _measured(net, round_all, data.held_out)
    found = {**found, "rounding": rounding, "times_rounding": _share(found["budget"], rounding)}
    if twice:
        again = _timed(round_all)[1]
        found |= {"rounding_again": again, "times_rounding_again": _share(found["again"], again)}
    return found


def _share(budget: Row, rounding: Row) -> float:
    return round(budget["seconds"] / rounding["seconds"], 2)


def _measured(net: nn.Module, compressing: Callable[[], fp.Packed], held_out: list[Any]) -> Row:
    packed, costs = _timed(compressing)
    with tempfile.TemporaryDirectory(prefix="factorpack-timing-") as folder:
        path = Path(folder) / "packed.safetensors"
        _, saving = _timed(lambda: fp.save(packed, path))
        return {**costs, "save": saving, **_quality(net, fp.load(path), held_out)}


def _timed(work: Callable[[], Any]) -> tuple[Any, Row]:
    """What some work makes, its wall and CPU seconds, and the most memory there was meanwhile."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    _stop_workers()
    start_bytes = reset_peak()
    started, cpu = time.perf_counter(), _cpu_seconds()
    made = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    _stop_workers()
    row: Row = {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(_cpu_seconds() - cpu, 3),
        "host_peak_bytes": peak_bytes(),
        "host_start_bytes": start_bytes,
    }
    if torch.cuda.is_available():
        row["gpu_peak_bytes"] = torch.cuda.max_memory_allocated()
    return made, row


def _stop_workers() -> None:
    """Each measurement starts its own encoding workers; the CPU seconds of a worker are known once it has ended."""
    with suppress(ImportError):  # earlier versions have none
        from factorpack.format import encode_workers

        encode_workers.stop_idle()


def _cpu_seconds() -> float:
    """This process, and processes it started that have ended."""
    spent = os.times()
    return sum(spent[:4])


def _quality(net: nn.Module, packed: fp.Packed, held_out: list[Any]) -> Row:
    report = packed.size()
    sizes = {"file_bytes": report.file_bytes, "file_ratio": report.file_ratio}
    return {**sizes, "divergence": measure_divergence(net, packed, held_out)}


def measure_divergence(net: nn.Module, packed: fp.Packed, batches: list[Any]) -> float:
    """`mean_divergence` of the packed model's predictions from the original's."""
    return mean_divergence(net, packed.load_into(copy.deepcopy(net)), batches)


def _parameters(net: nn.Module) -> int:
    return sum(value.numel() for value in net.parameters())


def _count(batches: list[Any]) -> int:
    return sum(len(batch["input_ids"] if isinstance(batch, dict) else batch) for batch in batches)


def tabulate() -> str:
    """One row per stored result, with the seconds of the version before where those are stored too."""
    documents = {case: load_result("timing", case) for case in CASES if is_stored("timing", case)}
    rows = [_cells(case, document) for case, document in documents.items() if case != SAVING]
    head = ["work", "on", "million parameters", "seconds", "again, s", "before", "4-bit rounding, s"]
    head += ["rounding again, s", "times rounding", "times, again"]
    head += ["CPU seconds", "peak GPU, GB", "peak host, GB", "save, s", "file ratio", "KL, nats"]
    notes = [describe(documents) for describe in (_describe_depth, _describe_blocks, _describe_saving)]
    return f"{format_table(head, rows)}\n{''.join(notes)}{format_source(*documents.values())}"


def _cells(case: str, document: Row) -> list[str]:
    found, facts = document["result"], document["machine"]
    row, rounding = found["budget"], found.get("rounding")
    saving = row.get("save")
    return [
        CASES[case],
        "GPU" if "gpu" in facts else f"{found['cores']} cores",
        f"{found['parameters'] / 1e6:,.1f}",
        f"{row['seconds']:.1f}",
        f"{found['again']['seconds']:.1f}" if "again" in found else "",
        f"{_before(case)['budget']['seconds']:.1f}" if is_stored(BEFORE, case) else "",
        f"{rounding['seconds']:.1f}" if rounding else "",
        f"{found['rounding_again']['seconds']:.1f}" if "rounding_again" in found else "",
        f"{found['times_rounding']:.1f}" if rounding else "",
        f"{found['times_rounding_again']:.1f}" if "rounding_again" in found else "",
        f"{row['cpu_seconds']:.1f}",
        f"{row['gpu_peak_bytes'] / 1e9:.1f}" if "gpu_peak_bytes" in row else "",
        f"{row['host_peak_bytes'] / 1e9:.1f}",
        f"{saving['seconds']:.1f}" if saving else "",
        f"{row['file_ratio']:.2f}",
        f"{row['divergence']:.4f}",
    ]


def _describe_depth(documents: dict[str, Row]) -> str:
    if not {"llama-12-layers", "llama-24-layers"} <= documents.keys():
        return ""
    shallow, deep = (_seconds(documents[f"llama-{layers}-layers"]) for layers in (12, 24))
    return f"24 layers take {deep / shallow:.2f} times as long as 12.\n"


def _describe_blocks(documents: dict[str, Row]) -> str:
    """Two numbers of blocks give the seconds of one, and those of all."""
    if not {"llama3-4-blocks", "llama3-8-blocks"} <= documents.keys():
        return ""
    four, eight = (_seconds(documents[f"llama3-{blocks}-blocks"]) for blocks in (4, 8))
    block = (eight - four) / 4
    total = four + (LLAMA3_BLOCKS - 4) * block
    return (
        f"Extrapolated from 4 and 8 blocks of Llama 3's shape, {block:.1f} s per block: "
        f"all {LLAMA3_BLOCKS} blocks take {total / 60:.0f} minutes.\n"
    )


def _describe_saving(documents: dict[str, Row]) -> str:
    if SAVING not in documents:
        return ""
    found = documents[SAVING]["result"]
    row = found["save"]
    before = f", {_before(SAVING)['save']['seconds']:.1f} s before" if is_stored(BEFORE, SAVING) else ""
    return (
        f"Saving {found['parameters'] / 1e6:.0f} million weights on {found['cores']} cores takes "
        f"{row['seconds']:.1f} s{before}; {row['cpu_seconds'] / row['seconds']:.1f} cores are busy.\n"
    )


def _seconds(document: Row) -> float:
    return float(document["result"]["budget"]["seconds"])


def _before(case: str) -> Row:
    found: Row = load_result(BEFORE, case)["result"]
    return found


BEFORE = "before/timing"
"""Results of an earlier version, measured on the same machine: `--results benchmarks/results/before`."""
MANY = 500_000_000
"""Models of fewer weights are compressed a second time: the first loads and compiles kernels for their shapes."""
SAVING = "save-110m"
LLAMA3_BLOCKS = 32
CASES = {
    "stories15m": "trained Llama, 256 x 256 tokens, 12x",
    "llama-12-layers": "Llama of width 512, 12 layers, 64 x 256 tokens, 8x",
    "llama-24-layers": "Llama of width 512, 24 layers, 64 x 256 tokens, 8x",
    "tinyllama": "TinyLlama's shape, 128 x 512 tokens, 8x",
    "llama3-4-blocks": "4 blocks of Llama 3 8B's shape, streamed, 128 x 2048 tokens, 8x",
    "llama3-8-blocks": "8 blocks of Llama 3 8B's shape, streamed, 128 x 2048 tokens, 8x",
    "resnet18-images": "ResNet18, 1,000 images, 20x",
    "resnet18-two-cores": "ResNet18, 256 images, 20x",
    "resnet18-alone": "ResNet18, weights alone, 20x",
    SAVING: "saving",
}
TABLES = {"timing": tabulate}
