"""Linear layers on packed codes on a GPU: every kernel against FP64, then its time beside cuBLAS and int4."""

from __future__ import annotations

import copy
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from factorpack.quantize.uniform import code_range
from factorpack.record import Encoded
from factorpack.runtime import multiply_triton
from factorpack.runtime.code_rows import fields, pack_rows
from factorpack.runtime.factored import FactoredLinear
from factorpack.runtime.multiply import multiply_reference
from factorpack.runtime.multiply_triton import LAUNCHES, Launch, multiply_rows
from factorpack.runtime.packed_layers import PackedLayer, PackedLinear, hold_packed
from factorpack.runtime.packed_weight import PackedWeight

DEVICE = "cuda"
ROTATED_BYTES = 256 << 20
"""Weights that a timing goes through before it meets one again: several times what the cache holds."""
REPLAYS = 11
TAILS = [(256, 4096), (1000, 3000), (33, 515), (257, 4112), (1, 1)]
"""Rows and columns of the checks: whole tiles, and tails of every kind."""
CHECKED_BATCHES = [1, 3, 7, 16, 17, 64]
SEARCHED = ([(4096, 2048), (8192, 4096)], [(8192, 8192), (8192, 14336)])
"""Matrices of codes, small and large, that launches are searched for on."""
BUCKETS = {2: (1, (2, 8)), 4: (4, (4, 8)), 8: (8, (8,)), 16: (16, (8, 16)), 64: (64, (32, 64))}
"""Largest batch of a bucket -> the batch that is timed for it, and the sizes of `Launch.batch` tried."""
MOST_ROOM = 160 << 10
"""Bytes of shared memory that a launch may ask for."""
MOST_ERROR = 2.0**-16
"""Of a sum, beside the sum of its terms' sizes, rounding of the answer apart: one wrong code would be more."""
GROUP, INNER_TILES = 128, 8
"""Of torch's int4 weights."""


def run(
    layers: list[list[int]],
    batches: list[int],
    bits: list[int],
    shares: list[float],
    tile: int,
    search: bool,
    search_bits: list[int],
    search_seconds: float,
    workers: int,
) -> dict[str, Any]:
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"  {time.perf_counter() - started:6.1f} s  {text}", flush=True)

    checks = _sweep()
    candidates = {width: list(_candidates(width)) for width in search_bits} if search else {}
    checks += [
        {"bits": width, "launch": asdict(launch)} for width, tried in candidates.items() for launch in tried
    ]
    say(f"{len(checks)} checks in {workers} processes")
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(_checked, case) for case in checks]
        outcomes = [_outcome(future, case) for future, case in zip(running, checks, strict=True)]
    failed = [outcome for outcome in outcomes if outcome["fault"]]
    for outcome in failed[:12]:
        say(f"FAILED {outcome}"[:300])
    worst = max((outcome["error"] for outcome in outcomes if not outcome["fault"]), default=0.0)
    say(f"{len(checks) - len(failed)} of {len(checks)} are right, largest error {worst:.2e}")
    broken = [outcome["launch"] for outcome in failed if outcome.get("launch")]
    bandwidth = _copy_bytes_per_s()
    say(f"copies move {bandwidth / 1e12:.2f} TB/s")
    found: list[dict[str, Any]] = []
    if search:
        deadline = time.perf_counter() + search_seconds
        for width, tried in candidates.items():
            usable = [launch for launch in tried if asdict(launch) not in broken]
            found += _search(width, usable, deadline, say)
    dense = [_dense_row(shape, batch, say) for shape, batch in product(layers, batches)]
    rows = [
        _packed_row(shape, share, width, batch, tile, bandwidth, dense, say)
        for shape, share, width, batch in product(layers, [*shares, None], bits, batches)
    ]
    crossover = [row for width in bits for row in _crossover(width, say)]
    for width, table in LAUNCHES.items():
        for size, pair in table.items():
            say(f"{width}: {size}: {pair}")
    return {
        "copy_bytes_per_s": bandwidth,
        "checks": {"count": len(checks), "failed": failed, "largest_error": worst},
        "launches": {
            str(width): {str(size): [asdict(launch) for launch in pair] for size, pair in table.items()}
            for width, table in LAUNCHES.items()
        },
        "search": found,
        "dense": dense,
        "packed": rows,
        "crossover": crossover,
    }


def _sweep() -> list[dict[str, Any]]:
    """Cases of the launches in use: widths, types, tails, batches, with and without scales."""
    cases: list[dict[str, Any]] = []
    for width, dtype, batch, shape in product(LAUNCHES, ("bfloat16", "float16"), CHECKED_BATCHES, TAILS):
        if dtype == "bfloat16" or shape in TAILS[:3]:
            scales = len(cases) % 3
            cases.append({"bits": width, "shape": shape, "batch": batch, "dtype": dtype, "scales": scales})
    return cases


def _candidates(bits: int) -> Iterator[Launch]:
    """Launches worth a trial: rows, warps, and those that work side by side."""
    alone = [(64, 4, 1), (128, 4, 1), (32, 2, 1)]
    beside = [(16, 4, 4)]
    if bits in (3, 4):
        alone += [(16, 1, 1), (32, 1, 1), (64, 2, 1)]
        beside += [(16, 2, 2), (32, 4, 4), (16, 8, 8)]
    few, many = {2: (32, 64), 3: (32, 64), 4: (64, 128), 8: (128, 256)}[bits]
    cell_bytes = {3: 6, 8: 1}.get(bits, 2)
    for (rows, warps, side), batch in product([*alone, *beside], (2, 4, 8, 16, 32, 64)):
        for cells, stages in ((few, 3), (few, 2)) if batch > 16 else ((few, 4), (many, 3)):
            room = stages * cells * side * (rows * cell_bytes + 2 * batch * fields(bits))
            if room <= MOST_ROOM and rows * batch * side <= 2048 * warps and (side == 1 or batch <= 16):
                yield Launch(rows, batch, cells, warps, stages, 4, side)


def _outcome(future: Future[dict[str, Any]], case: dict[str, Any]) -> dict[str, Any]:
    """What a check gave, or that its process died."""
    try:
        return future.result()
    except Exception as error:
        return {**case, "error": None, "fault": f"{type(error).__name__}: {error}"[:400]}


def _checked(case: dict[str, Any]) -> dict[str, Any]:
    """One product against FP64, in a process of its own pool: a compiled kernel stays in triton's cache."""
    try:
        launch = Launch(**case["launch"]) if "launch" in case else None
        bits, dtype = case["bits"], getattr(torch, case.get("dtype", "bfloat16"))
        batch = case.get("batch", launch.batch if launch else 1)
        rows, columns = case.get("shape", (256, 2 * fields(bits) * (launch.step if launch else 64)))
        torch.manual_seed(rows + columns + batch + bits)
        codes = _random_codes(bits, rows, columns)
        inputs = torch.randn(batch, columns, device=DEVICE).to(dtype)
        scale = [None, torch.rand(rows, device=DEVICE), torch.rand(1, device=DEVICE).half()][
            case.get("scales", 0)
        ]
        poison = torch.full((batch, rows), math.nan, dtype=dtype, device=DEVICE)
        del poison  # an output that is not written is likely to hold it
        found = multiply_rows(inputs, pack_rows(codes, bits), bits, scale, launch).double()
        factor = 1.0 if scale is None else scale.double()
        expected = inputs.double() @ codes.double().T * factor
        terms = inputs.double().abs() @ codes.double().abs().T * factor
        rounding = torch.finfo(dtype).eps * expected.abs()
        error = float((((found - expected).abs() - rounding) / terms.clamp_min(1e-30)).max())
        fault = "" if error <= MOST_ERROR else f"error {error:.3e}, allowed is {MOST_ERROR:.1e}"
        return {**case, "error": error, "fault": fault}
    except Exception as error:
        return {**case, "error": None, "fault": f"{type(error).__name__}: {error}"[:400]}


def _random_codes(bits: int, *shape: int) -> Tensor:
    low, high = code_range(bits)
    return torch.randint(low, high + 1, shape, dtype=torch.int8, device=DEVICE)


def _search(
    bits: int, candidates: list[Launch], deadline: float, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The launches that are best over small and over large matrices, for each size of batch; used from then on."""
    found = []
    for place, shapes in enumerate(SEARCHED):
        weights = [_copies(pack_rows(_random_codes(bits, *shape), bits)) for shape in shapes]
        for size, (batch, sizes) in BUCKETS.items():
            inputs = [torch.randn(batch, shape[1], device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
            trials = []
            for launch in candidates:
                if launch.batch in sizes and time.perf_counter() < deadline:
                    trials += _trials(launch, bits, inputs, weights, say)
            if not trials:
                continue
            least = [min(times) for times in zip(*(trial["us"] for trial in trials), strict=True)]
            trials.sort(
                key=lambda each: math.prod(us / low for us, low in zip(each["us"], least, strict=True))
            )
            pair = list(LAUNCHES[bits][size])
            pair[place] = Launch(**trials[0]["launch"])
            LAUNCHES[bits][size] = (pair[0], pair[1])
            found.append(
                {"bits": bits, "batch": batch, "shapes": shapes, "least_us": least, "best": trials[:8]}
            )
            say(f"{bits} bits, batch {batch}: {trials[0]}, the best of {len(trials)}; least {least}")
    return found


def _trials(
    launch: Launch, bits: int, inputs: list[Tensor], weights: list[list[Tensor]], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Microseconds of a launch on some matrices, each cut into more and more pieces."""
    trials = []
    for programs in (1.0, 2.0, 4.0, 8.0) if launch.warps >= 4 else (1.0, 4.0, 8.0, 16.0):
        tried = Launch(**{**asdict(launch), "programs": programs})
        try:
            times = [
                _graph_us([partial(multiply_rows, x, w, bits, None, tried) for w in copies], 5)
                for x, copies in zip(inputs, weights, strict=True)
            ]
        except Exception as error:
            say(f"{tried}: {type(error).__name__}: {error}"[:200])
            break
        trials.append({"launch": asdict(tried), "us": times})
    return trials


def _crossover(bits: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Where rebuilding the weight overtakes the kernel as batches grow."""
    rows, columns = SEARCHED[1][-1]
    weights = _copies(pack_rows(_random_codes(bits, rows, columns), bits))
    found = []
    for batch in (64, 128, 256, 512, 1024):
        values = torch.randn(batch, columns, device=DEVICE, dtype=torch.bfloat16)
        row: dict[str, Any] = {"bits": bits, "batch": batch}
        ways = {"kernel_us": multiply_rows, "rebuilt_us": multiply_reference}
        try:
            for name, way in ways.items():
                row[name] = _graph_us([partial(way, values, w, bits, None) for w in weights], 5)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        say(f"crossover {row}")
        found.append(row)
    return found


def _dense_row(shape: list[int], batch: int, say: Callable[[str], None]) -> dict[str, Any]:
    """cuBLAS in BF16 and torch's int4 kernel on a layer of this shape."""
    outputs, inputs = shape
    row: dict[str, Any] = {"shape": shape, "batch": batch}
    values = torch.randn(batch, inputs, device=DEVICE, dtype=torch.bfloat16)
    weights = _copies(torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16))
    calls = [partial(functional.linear, values, one) for one in weights]
    row["bf16_us"] = _graph_us(calls)
    row["bf16_eager_us"] = _eager_us(calls)
    try:
        bytes_ = torch.randint(0, 256, (outputs, inputs // 2), device=DEVICE, dtype=torch.uint8)
        packed = _copies(torch.ops.aten._convert_weight_to_int4pack(bytes_, INNER_TILES))
        scales = torch.rand(inputs // GROUP, outputs, 2, device=DEVICE).bfloat16()
        row["int4_us"] = _graph_us(
            [partial(torch.ops.aten._weight_int4pack_mm, values, one, GROUP, scales) for one in packed]
        )
    except Exception as error:
        row["int4_us"], row["int4_error"] = None, f"{type(error).__name__}: {error}"[:300]
    say(f"dense {row}")
    return row


def _packed_row(
    shape: list[int],
    share: float | None,
    bits: int,
    batch: int,
    tile: int,
    bandwidth: float,
    dense: list[dict[str, Any]],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """A layer of factors of this share of the rank, or of codes alone, as a user calls it."""
    row: dict[str, Any] = {"shape": shape, "share": share, "bits": bits, "batch": batch}
    try:
        layer = _layer(shape, share, bits, tile)
        layers = [copy.deepcopy(layer) for _ in range(_copy_count(_bytes(layer)))]
        values = torch.randn(batch, shape[1], device=DEVICE, dtype=torch.bfloat16)
        with torch.inference_mode():
            calls = [partial(one, values) for one in layers]
            row["us"], row["eager_us"] = _graph_us(calls), _eager_us(calls)
        beside = next(each for each in dense if each["shape"] == shape and each["batch"] == batch)
        row["packed_bytes"] = max(buffer.nbytes for buffer in layer.buffers())  # the codes
        row["faster_than_bf16"] = beside["bf16_us"] / row["us"]
        row["faster_than_int4"] = beside["int4_us"] / row["us"] if beside["int4_us"] else None
        row["share_of_copy_bandwidth"] = row["packed_bytes"] / (row["us"] * 1e-6) / bandwidth
        row["launch"] = asdict(multiply_triton.chosen(bits, batch, round((share or 1) * math.prod(shape))))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    say(_line(row))
    return row


def _line(row: dict[str, Any]) -> str:
    head = f"{row['shape'][0]}x{row['shape'][1]} k/d {row['share']} {row['bits']} bits batch {row['batch']}: "
    if "error" in row:
        return head + row["error"]
    beside = f"x{row['faster_than_bf16']:.2f} bf16, x{row['faster_than_int4'] or math.nan:.2f} int4"
    bandwidth = f"{row['share_of_copy_bandwidth']:.0%} of copies"
    return f"{head}{row['us']:.1f} us, {beside}, {bandwidth}, eager {row['eager_us']:.0f} us"


def _layer(shape: list[int], share: float | None, bits: int, tile: int) -> nn.Module:
    outputs, inputs = shape
    if share is None:
        parts = {
            "codes": _random_codes(bits, outputs, inputs),
            "scale": torch.rand(outputs, 1, device=DEVICE).mul(0.02).half(),
        }
        encoded = Encoded("scalar", tuple(shape), torch.bfloat16, parts, {"codes": bits})
    else:
        rank, count = round(share * tile), outputs * inputs // tile
        parts = {
            "codebook": _random_codes(8, tile, rank),
            "codebook_scale": torch.rand(1, rank, device=DEVICE).mul(0.01).half(),
            "latent": _random_codes(bits, rank, count),
            "latent_scale": torch.rand(rank, 1, device=DEVICE).mul(0.02).half(),
        }
        encoded = Encoded("factors", tuple(shape), torch.bfloat16, parts, {"codebook": 8, "latent": bits})
    layer = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=torch.bfloat16)
    cls: type[PackedLayer] = PackedLinear if share is None else FactoredLinear
    hold_packed(layer, cls, PackedWeight(encoded, torch.empty(0, device=DEVICE, dtype=torch.bfloat16)))
    return layer


def _bytes(layer: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in layer.buffers())


def _copy_count(size: int) -> int:
    return max(math.ceil(ROTATED_BYTES / size), 4)


def _copies(tensor: Tensor) -> list[Tensor]:
    return [tensor, *(tensor.clone() for _ in range(_copy_count(tensor.nbytes) - 1))]


def _graph_us(calls: list[Callable[[], object]], replays: int = REPLAYS) -> float:
    """Median microseconds of a call: all of them captured as one graph, which is replayed."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    torch.cuda.synchronize()
    graph.replay()
    times = _event_ms(graph.replay, replays)
    return 1e3 * statistics.median(times) / len(calls)


def _eager_us(calls: list[Callable[[], object]], replays: int = 5) -> float:
    """Median microseconds of a call as a program without graphs makes it, one after the other."""

    def work() -> None:
        for call in calls[:16]:
            call()

    work()
    return 1e3 * statistics.median(_event_ms(work, replays)) / len(calls[:16])


def _event_ms(work: Callable[[], object], replays: int) -> list[float]:
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)
    ]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def _copy_bytes_per_s() -> float:
    """Read and written by a large copy on the device."""
    source = torch.randint(0, 256, (2 << 30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / (1e-3 * statistics.median(_event_ms(lambda: target.copy_(source), REPLAYS)))
