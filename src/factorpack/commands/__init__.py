"""The command line: each command a plain function, all of them in COMMANDS."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import factorpack as fp
from factorpack.commands.bench import bench
from factorpack.commands.compare import compare
from factorpack.commands.demo import demo
from factorpack.commands.engine_options import EngineName, EngineWorkers, engine_of
from factorpack.commands.evaluate import compress_on_text, evaluate
from factorpack.commands.export import export
from factorpack.commands.finetune import compress_into_budget, finetune
from factorpack.commands.plan import asked_method, preview, recipes, say_recipe, with_choices_of
from factorpack.commands.report import report
from factorpack.errors import FactorpackError, PlanError
from factorpack.format.overwrite import check_output
from factorpack.format.packed_file import write_packed
from factorpack.hub.folder import is_model_folder, open_folder
from factorpack.hub.save import write_folder
from factorpack.methods import METHODS
from factorpack.planning.families import DEFAULT_METHOD, recipe_file
from factorpack.report.differences import verify as verify_packed
from factorpack.report.text import human_bytes, plain, printable, size_json, size_table
from factorpack.size import SizeReport

# A pipe has no width: 80 columns would fold every line of a table.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
PackedFile = Annotated[Path, typer.Argument(metavar="FILE", help="A packed file.", show_default=False)]
Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.", show_default=False)]


def compress(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint: .safetensors, .pt/.pth/.bin, a Hugging Face folder or its index.",
            show_default=False,
        ),
    ],
    output: Output,
    ratio: Annotated[
        float | None, typer.Option(help="Make the file this many times smaller than FP32, planned by itself.")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option("--bytes", help="Or: a file of at most this many bytes.")
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option(help="Or: the smallest file whose answers diverge by at most this many nats. Slow."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="What makes the model: module:callable, as torchvision.models:resnet18."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A folder of pictures, no labels needed, or for a Hugging Face folder a text file: keep the "
            "model's outputs close."
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Pictures or texts to calibrate on; more is better, up to 1,000.")
    ] = 256,
    length: Annotated[int, typer.Option(help="Tokens of a text to calibrate on.")] = 128,
    image_size: Annotated[int, typer.Option(help="Side of the square pictures the model takes.")] = 224,
    curves: Annotated[
        Path | None, typer.Option(help="Keep rate-distortion curves here (JSON), for this and later budgets.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(METHODS)}. Default: qspca, rank {DEFAULT_METHOD.rank}, "
            f"{DEFAULT_METHOD.latent_bits} bits.",
            show_default=False,
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="qspca: columns of the codebook, up to the tile.")] = None,
    latent_bits: Annotated[int | None, typer.Option(help="qspca: bits of a latent code, 2 to 8.")] = None,
    sparsity: Annotated[
        float | None, typer.Option(help="qspca: share of latents set to zero on top of rounding's zeros.")
    ] = None,
    codebook_bits: Annotated[int | None, typer.Option(help="qspca: bits of a codebook entry.")] = None,
    tile: Annotated[int | None, typer.Option(help="qspca: numbers in a tile.")] = None,
    latent_scales: Annotated[str | None, typer.Option(help="qspca: a scale a 'row' or a 'column'.")] = None,
    center: Annotated[bool | None, typer.Option(help="qspca: factorize around the mean tile.")] = None,
    bits: Annotated[int | None, typer.Option(help="scalar: bits of a code, 2 to 8.")] = None,
    clip: Annotated[
        str | None, typer.Option(help="Scales by least squared error, 'mse', or 'minmax'.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="keep: the float type to round to.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A TOML file with a method for each group of layers, a family's name (see `factorpack "
            "recipes`), or 'none'. Default: the family's that the names of the tensors tell."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Keep tensors of this name raw: a glob, or a regular expression behind 're:'."),
    ] = None,
    engine: EngineName = None,
    workers: EngineWorkers = 0,
    as_json: Json = False,
) -> None:
    """Compress a checkpoint into one small, safe file.

    With --ratio or --bytes everything is chosen for you, and the file meets the budget: never over it, at
    most 1 % under. That needs no data and no model; with both (--model, --calibration) the same bytes keep
    far more accuracy. A Hugging Face folder has its model in it: --calibration takes a text file then, and
    an output that does not end in .safetensors becomes a folder that opens with fp.hub.from_pretrained, with
    tokenizer, config and a model card. With neither budget nor method a recipe for the model's family is
    followed, where its tensors' names tell one. With a method, biases, norms and the first convolution stay
    raw and the classifier gets 4-bit codes. `factorpack plan` shows beforehand what would come of it.

    With --engine each tensor is a task of its own, finished ones wait in OUTPUT.parts, and a method's file is
    the one made without. A budget is then met from the weights alone: calibrated layers follow each other,
    which only one process can do.

    Examples:

        factorpack compress resnet18.safetensors -o small.safetensors --ratio 12

        factorpack compress resnet18.safetensors -o small.safetensors --ratio 20
        --model torchvision.models:resnet18 --calibration pictures/

        factorpack compress model.pt -o small.safetensors --rank 128 --latent-bits 3 --sparsity 0.2

        factorpack compress folder/ -o small.safetensors --method scalar --bits 4 --exclude 'lm_head.*'

        factorpack compress folder/ -o small-folder --ratio 8 --calibration sentences.txt

        factorpack compress folder/ -o small.safetensors --method scalar --bits 4 --engine local --workers 8
    """
    spread_over = engine_of(engine, workers)
    for written in (output, curves):
        if written is not None:
            check_output(written, source, calibration, recipe_file(recipe))
    if curves is not None:
        check_output(output, curves)
    settings = {
        "rank": rank,
        "latent_bits": latent_bits,
        "sparsity": sparsity,
        "codebook_bits": codebook_bits,
        "tile": tile,
        "latent_scales": latent_scales,
        "center": center,
        "bits": bits,
        "clip": clip,
        "dtype": dtype,
    }
    given = {key: value for key, value in settings.items() if value is not None}
    # Calibration tells what matters, in this very model: no family's habits are needed then.
    unasked = "none" if calibration is not None else None
    recipe = say_recipe(source, method, given, recipe or unasked, quiet=as_json)
    started = time.perf_counter()
    budget = {"ratio": ratio, "max_bytes": max_bytes, "max_loss": max_loss}
    kept = exclude or []
    if any(value is not None for value in budget.values()):
        if method is not None or given:
            raise PlanError("a budget chooses methods and settings itself: give one or the other")
        if spread_over is not None and (model or calibration or curves or max_loss is not None):
            raise PlanError(
                "with --engine a budget is met from the weights alone, its curves kept beside the file while "
                "it works: leave --model, --calibration, --curves and --max-loss out, or --engine"
            )

        def write(path: Path) -> None:
            last = (kept, recipe, curves, not as_json)
            if spread_over is not None:
                fp.compress(
                    source,
                    to=path,
                    ratio=ratio,
                    max_bytes=max_bytes,
                    exclude=kept,
                    recipe=recipe,
                    engine=spread_over,
                    progress=not as_json,
                )
                return
            if model is None and calibration is not None and is_model_folder(source):
                packed = compress_on_text(source, budget, calibration, samples, length, *last)
            else:
                packed = compress_into_budget(source, budget, model, calibration, samples, image_size, *last)
            write_packed(path, packed.items(), packed.aliases)
    else:
        if model is not None or calibration is not None or curves is not None:
            raise PlanError("--model, --calibration and --curves serve a budget: give --ratio or --bytes")

        def write(path: Path) -> None:
            fp.compress(
                source,
                asked_method(method, given),
                to=path,
                exclude=kept,
                recipe=recipe,
                engine=spread_over,
                progress=not as_json,
            )

    if is_model_folder(source) and output.suffix != ".safetensors":
        packed = write_folder(output, open_folder(source), _aside(output, write) if spread_over else write)
    else:
        write(output)
        packed = fp.load(output)
    seconds = time.perf_counter() - started
    report = packed.size()
    if as_json:
        _print_json({"path": str(output), "seconds": seconds, "recipe": recipe, **size_json(report)})
    else:
        out.print(f"{output}: {_summary(report)}, in {seconds:.1f} s")


def inspect(
    file: PackedFile,
    top: Annotated[int | None, typer.Option(help="Only this many tensors, the largest first.")] = None,
    as_json: Json = False,
) -> None:
    """Show where every byte of a packed file went, tensor by tensor."""
    report = fp.load(file).size()
    if as_json:
        _print_json(size_json(report))
        return
    out.print(size_table(report, top))
    out.print(f"\n{file}: {_summary(report)}")
    out.print(f"[dim]by the paper's formula, fixed width: {report.paper_ratio:.2f} times[/dim]")


def decode(file: PackedFile, output: Output, as_json: Json = False) -> None:
    """Write the decoded weights as an ordinary .safetensors checkpoint."""
    check_output(output, file)
    fp.load(file).decode_to(output, progress=not as_json)
    written = output.stat().st_size
    if as_json:
        _print_json({"path": str(output), "bytes": written})
    else:
        out.print(f"{output}: {human_bytes(written)} of plain weights")


def verify(
    file: PackedFile,
    against: Annotated[
        Path | None, typer.Option(help="The checkpoint it was made from: report the error of each tensor.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every checksum, decode every tensor, and compare with the original if there is one.

    The exit code is 1 where a tensor is missing, has another shape, or was kept raw and yet differs.
    """
    checks = list(verify_packed(fp.load(file), against))
    problems = [check for check in checks if check.problem]
    if as_json:
        rows = [
            {key: getattr(check, key) for key in ("name", "relative_error", "largest_error", "problem")}
            for check in checks
        ]
        _print_json({"ok": not problems, "tensors": rows})
    else:
        for check in checks if against else problems:
            outcome = f"[red]{check.problem}[/red]" if check.problem else f"{check.relative_error:.4f}"
            out.print(f"{plain(check.name)}  {outcome}")
        out.print(f"{file}: {len(checks)} tensors, every checksum right, {len(problems)} problems")
    if problems:
        raise typer.Exit(1)


plan = with_choices_of(compress)(preview)

COMMANDS: dict[str, Callable[..., None]] = {
    "compress": compress,
    "plan": plan,
    "recipes": recipes,
    "inspect": inspect,
    "decode": decode,
    "export": export,
    "verify": verify,
    "finetune": finetune,
    "eval": evaluate,
    "bench": bench,
    "compare": compare,
    "report": report,
    "demo": demo,
}

app = typer.Typer(
    name="factorpack",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"factorpack {fp.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and end.", callback=_say_version, is_eager=True),
    ] = False,
) -> None:
    """Makes trained PyTorch models many times smaller, in one safe file."""


def main() -> None:
    try:
        app(prog_name="factorpack")
    except (FactorpackError, OSError) as error:
        lines = [printable(text) for text in (_said(error), *getattr(error, "__notes__", []))]
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(
            "error: " + "\n  ".join(lines)
        )
        sys.exit(2)


def _aside(output: Path, write: Callable[[Path], None]) -> Callable[[Path], object]:
    """Writes beside a folder that is being made, and puts it there: a killed run finds its parts again."""

    def put(path: Path) -> None:
        aside = output.with_name(f"{output.name}.packed.safetensors")
        write(aside)
        aside.replace(path)

    return put


def _said(error: Exception) -> str:
    """What an error says. One from a process that reads pictures brings a traceback, whose last line says it."""
    text = str(error)
    return text.strip().splitlines()[-1].partition(": ")[2] if "Original Traceback" in text else text


def _summary(report: SizeReport) -> str:
    assert report.file_bytes is not None
    text = (
        f"{human_bytes(report.source_bytes)} -> {human_bytes(report.file_bytes)}, "
        f"{report.file_ratio:.2f} times smaller"
    )
    if report.source_bytes != report.original_bytes:
        own = report.source_bytes / report.file_bytes
        text += f" than FP32 ({own:.2f} times than the checkpoint's own types)"
    return text


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))
