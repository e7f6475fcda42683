"""Codes that stay entropy-coded in memory: their size beside the file's, and how fast a GPU decodes them."""

from __future__ import annotations

import copy
import time
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.formatting import format_source, format_table, is_stored, load_result
from benchmarks.studies.resident.on_cpu import measure_cpu, tabulate_cpu

NOT_RUN = "Not stored yet: `python -m benchmarks.run benchmarks/experiments/resident/h200.toml` on a GPU.\n"
FILED = 1 << 24
"""Codes up to which a file's stream is made too, to compare sizes."""


def run(
    bits: list[int] | None = None,
    shapes: list[list[int]] | None = None,
    layers: list[list[int]] | None = None,
    models: list[str] | None = None,
    ratio: float = 12.0,
    overhead: bool = False,
    cpu_rounds: int = 0,
) -> dict[str, Any]:
    """Sizes of real models and of normal weights, Python's share of a layer, nets on a CPU, or times on a GPU."""
    if cpu_rounds:
        return measure_cpu(models or [], ratio, cpu_rounds)
    bits = bits or []
    if overhead:
        from benchmarks.studies.resident.overhead import time_overhead

        return {"overhead": [time_overhead(width) for width in bits]}
    if models is not None:
        sized = [size_model(name, ratio) for name in models]
        return {"models": sized, "normal": [size_normal([2048, 2048], width) for width in bits]}
    from benchmarks.studies.kernels.timing import copy_bytes_per_s

    bandwidth = copy_bytes_per_s()
    print(f"  copies move {bandwidth / 1e12:.2f} TB/s", flush=True)
    decoded = [time_decoding(shape, width, bandwidth) for shape, width in product(shapes or [], bits)]
    return {
        "copy_bytes_per_s": bandwidth,
        "decoded": decoded,
        "layers": [time_layer(shape, width) for shape, width in product(layers or [], bits)],
    }


def normal_codes(shape: list[int], bits: int) -> np.ndarray:
    """Rounded normal numbers of about `bits` bits of entropy, int8."""
    random = np.random.default_rng(sum(shape) + bits)
    values = random.standard_normal(shape, dtype=np.float32) * np.float32(2 ** (bits - 2.047))
    return np.round(values).clip(-127, 127).astype(np.int8)


def size_normal(shape: list[int], bits: int) -> dict[str, Any]:
    from factorpack.format import entropy
    from factorpack.runtime.lanes import pack_lanes

    codes = normal_codes(shape, bits)
    started = time.process_time()
    packed, layout = pack_lanes(torch.from_numpy(codes), shape[1])
    seconds = time.process_time() - started
    return {
        "shape": shape,
        "bits": bits,
        "resident_bytes": packed.numel(),
        "file_bytes": len(entropy.encode(codes)) if codes.size <= FILED else None,
        "pairs": bool(layout.is_pair),
        "codes_per_s": codes.size / seconds,
    }


def size_model(name: str, ratio: float) -> dict[str, Any]:
    """Bytes of all codes, in the file and as a GPU holds them: in lanes, or at fixed width where that is less."""
    import factorpack as fp
    from benchmarks.data import checkpoint
    from factorpack.runtime import packed_weight
    from factorpack.runtime.packed_weight import PackedWeight

    row: dict[str, Any] = {"model": name, "ratio": ratio, "file": 0, "resident": 0, "fixed": 0, "codes": 0}
    sections: Counter[str] = Counter()
    held, packed_weight.uses_lanes = packed_weight.uses_lanes, lambda _: True
    try:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            fp.save(
                fp.compress(checkpoint(name), ratio=ratio, planner=fp.Planner(trellis=0), progress=False),
                path,
            )
            packed = fp.load(path)
            stored = {line.name: line.stored_bytes for line in packed.size().tensors}
            started = time.perf_counter()
            for weight, encoded in packed.items():
                if not encoded.bits:
                    continue
                found = PackedWeight(encoded, torch.empty(0))
                row["codes"] += sum(encoded.parts[part].numel() for part in encoded.bits)
                row["resident"] += sum(getattr(found, part).numel() for part in encoded.bits)
                row["fixed"] += sum(
                    -(-encoded.parts[part].numel() * width // 8) for part, width in encoded.bits.items()
                )
                row["file"] += sum((stored[weight] or {}).get(item, 0) for item in ("codebook", "latent"))
                for part, layout in found.lanes.items():
                    sections.update(section_bytes(layout, getattr(found, part).numel()))
            row["seconds"] = time.perf_counter() - started
            row["sections"] = dict(sections)
    finally:
        packed_weight.uses_lanes = held
    return row


def section_bytes(layout: Any, total: int) -> dict[str, int]:
    """What the parts of codes in lanes take."""
    ends = [layout.states_at, layout.groups_at, layout.table_at, layout.patches_at, layout.classes_at, total]
    names = ("words", "first states", "groups", "tables", "rare codes", "classes")
    return {name: end - start for name, start, end in zip(names, [0, *ends], ends, strict=False)}


def time_decoding(shape: list[int], bits: int, bandwidth: float) -> dict[str, Any]:
    """Decoding to BF16 from more weights than the cache holds, and whether every bit is right."""
    from benchmarks.studies.kernels.timing import copies_of, graph_us
    from factorpack.runtime.lane_cuda import LaneDecoder
    from factorpack.runtime.lanes import pack_lanes

    codes = normal_codes(shape[::-1], bits)
    packed, layout = pack_lanes(torch.from_numpy(codes), shape[0], free=False)
    scale = torch.rand(1, 1, device="cuda").half()
    calls = [
        LaneDecoder(each, layout, scale, "one", torch.bfloat16, torch.float32)
        for each in copies_of(packed.cuda())
    ]
    out = calls[0]()
    expected = (torch.from_numpy(codes).cuda().float() * scale.float()).bfloat16().view(-1)
    us = graph_us(calls)
    row = {
        "shape": shape,
        "bits": bits,
        "us": us,
        "weights_per_s": codes.size / us * 1e6,
        "share_of_copy_bandwidth": (packed.numel() + out.nbytes) / (us * 1e-6) / bandwidth,
        "resident_bits": 8 * packed.numel() / codes.size,
        "pairs": bool(layout.is_pair),
        "same_bits": bool(torch.equal(out, expected)),
    }
    print(f"  {row}", flush=True)
    return row


def time_layer(shape: list[int], bits: int) -> dict[str, Any]:
    """A Linear layer at batch 1 and 16: from lanes, and cuBLAS on dense weights; in a graph, and as called."""
    from benchmarks.studies.kernels.timing import copies_of, copy_count, eager_us, graph_us
    from factorpack.record import Encoded
    from factorpack.runtime.packed_layers import PackedLinear, hold_packed
    from factorpack.runtime.packed_weight import PackedWeight

    outputs, inputs = shape
    like = torch.empty(0, device="cuda", dtype=torch.bfloat16)
    parts = {
        "codes": torch.from_numpy(normal_codes(shape, bits)),
        "scale": torch.rand(outputs, 1).mul(0.02).half(),
    }
    encoded = Encoded("scalar", (outputs, inputs), torch.bfloat16, parts, {"codes": 8})
    weight = PackedWeight(encoded, like)
    layers = []
    for _ in range(copy_count(weight.codes.nbytes)):
        layer = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=torch.bfloat16)
        hold_packed(layer, PackedLinear, _copied(weight))
        layers.append(layer)
    dense = copies_of(weight().contiguous())
    row: dict[str, Any] = {"shape": shape, "bits": bits, "resident_bytes": weight.codes.nbytes}
    with torch.inference_mode():
        for batch in (1, 16):
            values = torch.randn(batch, inputs, device="cuda", dtype=torch.bfloat16)
            exact = values.double() @ dense[0].double().T
            error = (layers[0](values).double() - exact).norm() / exact.norm()
            ours = [partial(layer, values) for layer in layers]
            theirs = [partial(nn.functional.linear, values, each) for each in dense]
            row[f"batch_{batch}"] = {
                "us": graph_us(ours),
                "bf16_us": graph_us(theirs),
                "eager_us": eager_us(ours),
                "bf16_eager_us": eager_us(theirs),
                "error": float(error),
            }
    print(f"  {row}", flush=True)
    return row


def _copied(weight: Any) -> Any:
    """The same codes elsewhere in memory, without packing them again."""
    other = copy.copy(weight)
    other._buffers = {
        name: each.clone() if isinstance(each, Tensor) else each for name, each in weight._buffers.items()
    }
    return other


def tabulate_sizes() -> str:
    document = load_result("resident", "sizes")
    lines = []
    for row in document["result"]["models"]:
        lines.append(
            [
                f"{row['model']}, {row['ratio']:g} times smaller",
                f"{8 * row['file'] / row['codes']:.2f}",
                f"{row['file']:,}",
                f"{row['resident']:,}",
                f"{row['resident'] / row['file']:.3f}",
                f"{row['fixed'] / row['file']:.2f}",
            ]
        )
    for row in document["result"]["normal"]:
        count = row["shape"][0] * row["shape"][1]
        lines.append(
            [
                f"normal, {row['shape'][0]} x {row['shape'][1]}",
                f"{8 * row['file_bytes'] / count:.2f}",
                f"{row['file_bytes']:,}",
                f"{row['resident_bytes']:,}",
                f"{row['resident_bytes'] / row['file_bytes']:.3f}",
                "-",
            ]
        )
    head = [
        "codes of",
        "bits per code",
        "bytes in the file",
        "resident bytes",
        "resident / file",
        "fixed / file",
    ]
    rates = [row["codes_per_s"] / 1e6 for row in document["result"]["normal"]]
    note = f"One core packs {min(rates):.0f} to {max(rates):.0f} million of the normal codes a second.\n"
    for row in document["result"]["models"]:
        shares = ", ".join(f"{name} {100 * size / row['file']:.1f}" for name, size in row["sections"].items())
        note += f"{row['model']}, percent of the file: {shares}.\n"
    return f"{format_table(head, lines)}\n{note}{format_source(document)}"


def tabulate_decoding() -> str:
    if not is_stored("resident", "h200"):
        return NOT_RUN
    document = load_result("resident", "h200")
    outcome = document["result"]
    lines = [
        [
            f"{row['shape'][0]} x {row['shape'][1]}",
            str(row["bits"]),
            f"{row['resident_bits']:.2f}",
            f"{row['us']:.1f}",
            f"{row['weights_per_s'] / 1e9:.0f}",
            f"{row['share_of_copy_bandwidth']:.0%}",
            "yes" if row["same_bits"] else "no",
        ]
        for row in outcome["decoded"]
    ]
    head = ["weight", "bits of entropy", "resident bits", "us", "billion weights per s"]
    head += ["share of copy bandwidth", "bit for bit"]
    note = f"Copies moved {outcome['copy_bytes_per_s'] / 1e12:.2f} TB/s, read and written.\n"
    return f"{format_table(head, lines)}\n{note}{format_source(document)}"


def tabulate_layers() -> str:
    if not is_stored("resident", "h200"):
        return NOT_RUN
    outcome = load_result("resident", "h200")["result"]
    lines = []
    for row, batch in product(outcome["layers"], (1, 16)):
        found = row[f"batch_{batch}"]
        times = [f"{found[name]:.1f}" for name in ("us", "bf16_us", "eager_us", "bf16_eager_us")]
        lines.append([f"{row['shape'][0]} x {row['shape'][1]}", str(row["bits"]), str(batch), *times])
    head = ["layer", "bits", "batch", "in a graph, us", "cuBLAS BF16, us", "as called, us", "cuBLAS BF16, us"]
    return format_table(head, lines)


def tabulate_overhead() -> str:
    document = load_result("resident", "overhead")
    lines = [
        [
            str(row["bits"]),
            *(f"{row[name]:.1f}" for name in ("coded_us", "decode_us", "packed_us", "dense_8x8_us")),
        ]
        for row in document["result"]["overhead"]
    ]
    head = [
        "bits",
        "entropy-coded, us",
        "decoding alone, us",
        "fixed width, us",
        "dense 8 x 8 on the CPU, us",
    ]
    return f"{format_table(head, lines)}\n{format_source(document)}"


TABLES = {
    "resident-cpu": tabulate_cpu,
    "resident-overhead": tabulate_overhead,
    "resident-sizes": tabulate_sizes,
    "resident": tabulate_decoding,
    "resident-layers": tabulate_layers,
}
