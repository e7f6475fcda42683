"""The command line. Every command is a function in a module of its own, imported when the command runs."""

from __future__ import annotations

import importlib
import io
import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import cleandoc
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from factorpack.commands.shared_options import with_shared_options
from factorpack.errors import EngineError, FactorpackError
from factorpack.printable import printable
from factorpack.version import __version__


@dataclass(frozen=True, slots=True)
class Command:
    """A command's module, which has a function of the same name, and its line in `factorpack --help`."""

    module: str
    summary: str

    def load(self) -> Callable[..., None]:
        """The function; its module is imported now."""
        found = importlib.import_module(f"factorpack.commands.{self.module}")
        function: Callable[..., None] = getattr(found, self.module)
        return function


COMMANDS: dict[str, Command] = {
    "compress": Command("compress", "Compress a checkpoint into one small, safe file."),
    "plan": Command("plan", "Show what `compress` would do, tensor by tensor, without writing anything."),
    "methods": Command("methods", "List the methods of compression with their settings and defaults."),
    "recipes": Command("recipes", "List the recipes that come with factorpack, or print one to start from."),
    "inspect": Command("inspect", "Show where every byte of a packed file went, tensor by tensor."),
    "decode": Command("decode", "Decode a packed file into an ordinary .safetensors checkpoint."),
    "export": Command(
        "export", "Write a packed file for other programs: ONNX, GGUF, or safetensors in 16 bits."
    ),
    "verify": Command("verify", "Check a packed file, and compare it with the original checkpoint."),
    "finetune": Command("finetune", "Train a packed model end to end in its packed form, and save it."),
    "eval": Command("evaluate", "Measure accuracy on an image folder, or perplexity on a text."),
    "bench": Command("bench", "Measure latency, memory and load time of a packed file in each mode."),
    "compare": Command(
        "compare", "Compress a model with every method at the same sizes, and measure each file."
    ),
    "report": Command(
        "report", "Write an HTML page about a packed file: where the bytes are and what they cost."
    ),
    "demo": Command("demo", "Plan a small net to byte budgets, beside plain rounding at the same sizes."),
}


class LazyGroup(TyperGroup):
    """The overview is made from COMMANDS alone; a command's module is imported when that command is run."""

    def __init__(self, **settings: Any) -> None:
        stubs = {name: TyperCommand(name=name, help=known.summary) for name, known in COMMANDS.items()}
        super().__init__(**{**settings, "commands": stubs})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, stub if name is None else command_line(name), rest

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        with _printable_messages():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _printable_messages():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            from factorpack.commands.console import print_note

            print_note("interrupted")
            sys.exit(130)  # as a shell says it, whatever the parser's version


@contextmanager
def _printable_messages() -> Iterator[None]:
    """The parser's messages repeat arguments, which a shell may have made from names of files."""
    try:
        yield
    except Exception as error:
        if isinstance(getattr(error, "message", None), str):
            error.message = printable(error.message)  # type: ignore[attr-defined]
            if _wants_json():
                from factorpack.commands.console import print_json_error

                print_json_error("UsageError", str(error.format_message()))  # type: ignore[attr-defined]
        raise


def _wants_json() -> bool:
    """Whether the command line says so; where it cannot be parsed there is nothing else to ask."""
    return "--json" in sys.argv[1:]


def command_line(name: str) -> Any:
    """A command as the parser sees it, with its options."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    function = COMMANDS[name].load()
    alone.command(name, help=_flowing(function.__doc__ or ""))(with_shared_options(function))
    return typer.main.get_command(alone)


def _flowing(text: str) -> str:
    """A docstring whose paragraphs break where the terminal ends; examples, which are indented, keep their lines."""
    parts = cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else part.replace("\n", " ") for part in parts)


app = typer.Typer(
    name="factorpack",
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"factorpack {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Makes trained PyTorch models many times smaller, in one safe file."""


def exit_on_sigterm() -> None:
    """SIGTERM ends a command as Ctrl+C does, with all that is cleaned up on the way out."""

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one would end the cleaning up
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


class _Notes(logging.Handler):
    """Prints what the library says about what it reads and does."""

    def emit(self, record: logging.LogRecord) -> None:
        from factorpack.commands.console import print_note

        print_note(record.getMessage())


@contextmanager
def _printed_notes() -> Iterator[None]:
    logger, handler = logging.getLogger("factorpack"), _Notes()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def main() -> None:
    """Runs a command. The exit code is 0, 1 where `verify` finds a problem, 2 for an error, 130 after Ctrl+C."""
    exit_on_sigterm()
    _escape_what_the_terminal_lacks()
    try:
        with warnings.catch_warnings(), _printed_notes():
            warnings.showwarning = _show_warning
            app(prog_name="factorpack")
    except (FactorpackError, OSError) as error:
        _fail(error)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        _fail(EngineError(f"memory ran out: {OUT_OF_MEMORY}"))


OUT_OF_MEMORY = (
    "use fewer --samples or a smaller --batch-size, --threads 1, or --stream for a Hugging Face folder; "
    "`factorpack plan` says what compressing takes"
)


def _is_out_of_memory(error: Exception) -> bool:
    """torch raises a RuntimeError of its own for a GPU, and a plain one for a CPU."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("out of memory", "can't allocate memory", "not enough memory")
    )


def _fail(error: Exception) -> NoReturn:
    from factorpack.commands.console import print_error, print_json_error  # `--help` does without

    if _wants_json():
        print_json_error(type(error).__name__, error)
    print_error(error)
    sys.exit(2)


def _escape_what_the_terminal_lacks() -> None:
    r"""A name that has letters which the terminal's encoding lacks is printed with escapes, as `\u5c42`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    from factorpack.commands.console import print_warning

    print_warning(message)
