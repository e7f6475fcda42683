"""`factorpack plan`: `fp.plan` in Python."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from factorpack.budget.preview import Preview
from factorpack.commands.compress_request import CompressRequest
from factorpack.commands.console import print_json, print_line, print_table
from factorpack.commands.method_options import MethodOptions
from factorpack.commands.options import (
    Bits,
    Exclude,
    Json,
    Key,
    LatentBits,
    Length,
    MaxBytes,
    MethodName,
    Rank,
    Ratio,
    RecipeName,
    Samples,
    Settings,
    Source,
    Sparsity,
    Stream,
    Top,
)
from factorpack.report.text import human_bytes, plain


def plan(
    source: Source,
    ratio: Ratio = None,
    max_bytes: MaxBytes = None,
    method: MethodName = None,
    settings: Settings = None,
    rank: Rank = None,
    latent_bits: LatentBits = None,
    sparsity: Sparsity = None,
    bits: Bits = None,
    recipe: RecipeName = None,
    exclude: Exclude = None,
    key: Key = None,
    stream: Stream = False,
    samples: Samples = 256,
    length: Length = 128,
    top: Top = None,
    as_json: Json = False,
) -> None:
    """Show what `compress` would do, tensor by tensor, without writing anything.

    Sizes and seconds are estimates: a sample of every weight, 65,536 values or a few more, is encoded, and
    only the first three of the weights that have the same shape. With a budget the estimates are those
    from the weights alone. With --stream, the memory of a calibrated run that reads a Hugging Face folder
    block by block is estimated too: it depends on --samples and --length.

    Examples:

        factorpack plan resnet18.safetensors

        factorpack plan resnet18.safetensors --ratio 20

        factorpack plan folder/ --ratio 8 --stream --samples 128 --length 2048

        factorpack plan model.pt --method second_order --set bits=4 --set tile=9 --json
    """
    shorthands = {"rank": rank, "latent_bits": latent_bits, "sparsity": sparsity, "bits": bits}
    chosen = MethodOptions(method, shorthands, settings or [])
    request = CompressRequest(
        source,
        chosen,
        ratio,
        max_bytes,
        recipe=recipe,
        exclude=exclude or [],
        samples=samples,
        length=length,
        stream=stream,
        key=key,
    )
    request.check(planned_only=True)
    found = request.with_recipe(request.open(), quiet=as_json).preview()
    if as_json:
        print_json(_as_json(found))
        return
    print_table(_table(found, top))
    for line in _totals(found):
        print_line(line)
    if found.budget_bytes is not None:
        print_line("with --model and --calibration the same bytes go where they matter most", style="dim")


def _table(found: Preview, top: int | None) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("tensor", "shape", "encoding"):
        table.add_column(heading, overflow="fold")
    for heading in ("bytes now", "then, about", "of the file"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why", style="dim", overflow="fold")
    lines = list(found.tensors)
    if top is not None:
        lines = sorted(lines, key=lambda line: -line.bytes)[:top]
    for line in lines:
        table.add_row(
            plain(line.name),
            "x".join(map(str, line.shape)) or "-",
            line.words,
            f"{line.source_bytes:,}",
            f"{line.bytes:,}",
            f"{line.bytes / found.file_bytes:.1%}",
            plain(line.note),
        )
    return table


def _totals(found: Preview) -> list[str]:
    """The lines below the table."""
    now = sum(tensor.source_bytes for tensor in found.tensors)
    lines = [
        "",
        f"{human_bytes(now)} -> about {human_bytes(found.file_bytes)}, {found.file_ratio:.2f} times smaller "
        f"than FP32, in about {found.seconds:.1f} s",
        f"memory: about {human_bytes(found.compress_peak_bytes)} to compress, "
        f"{human_bytes(found.load_peak_bytes)} to load and decode, on top of Python and torch themselves",
    ]
    if found.budget_bytes is not None and found.smallest_bytes is not None:
        lines.append(
            f"budget: {found.budget_bytes:,} bytes, never more and at most 1 % less; "
            f"the smallest possible: {found.smallest_bytes:,}"
        )
        lines.append(f"planner: {found.planner}")
    if found.stream is not None:
        lines.append(
            f"streamed, calibrated on {found.stream.samples} texts of {found.stream.length} tokens: about "
            f"{human_bytes(found.stream.device_bytes)} of GPU and {human_bytes(found.stream.host_bytes)} of "
            "host memory (without a GPU, both are host memory)"
        )
    return lines


def _as_json(found: Preview) -> dict[str, Any]:
    document = asdict(found)
    tensors = [line | {"share": line["bytes"] / found.file_bytes} for line in document.pop("tensors")]
    totals = {"file_bytes": found.file_bytes, "file_ratio": found.file_ratio, "seconds": found.seconds}
    return {**totals, **document, "tensors": tensors}
