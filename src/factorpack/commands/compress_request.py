"""What `compress` and `plan` are told, in one object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from factorpack.budget.planner import STATES, Planner
from factorpack.budget.preview import Preview, plan
from factorpack.calibration.model_folder import is_model_folder, open_folder
from factorpack.calibration.synthetic import SYNTHETIC, Synthetic
from factorpack.commands.console import print_line
from factorpack.commands.method_options import MethodOptions
from factorpack.compression import compress
from factorpack.engine import Engine
from factorpack.errors import PlanError
from factorpack.format.container import check_ending, check_target
from factorpack.format.overwrite import check_output
from factorpack.hub.load import from_pretrained, tokenizer_of
from factorpack.hub.resumed_folder import identify_run, resume_folder
from factorpack.hub.texts import TEXTS_AT_ONCE, line_batches, token_batches
from factorpack.model_reference import import_model
from factorpack.packed import Packed
from factorpack.per_tensor import parts_folder
from factorpack.planning.families import AUTO, DEFAULT_METHOD, NONE, named_recipe, recipe_file
from factorpack.source import Source, open_source
from factorpack.tune.images import unlabelled_batches
from factorpack.tune.models import default_device, load_weights

_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""How the names of classes end that predict the next token."""
MEASURED = "docs/results/synthetic.md"
"""Where it stands what synthetic calibration gains."""


@dataclass(frozen=True, slots=True)
class CompressRequest:
    """A checkpoint, and a budget or a method, with all that goes with them."""

    source: Path
    method: MethodOptions = field(default_factory=MethodOptions)
    ratio: float | None = None
    max_bytes: int | None = None
    max_loss: float | None = None
    recipe: str | None = None
    """As the user names it; `with_recipe` settles which one it is."""
    exclude: Sequence[str] = ()
    model: str | None = None
    calibration: Path | Synthetic | None = None
    """A folder of images, a text file for a model that has a folder, or how inputs are made."""
    samples: int = 256
    length: int = 128
    """Tokens per text."""
    image_size: int = 224
    curves: Path | None = None
    engine: Engine | None = None
    stream: bool = False
    """Whether a folder's model is read block by block."""
    trellis: int | None = None
    """States of the trellis that a budget's codes may follow; None: the planner's default."""
    key: str | None = None
    """Which weights of a torch file that has several."""

    @property
    def data(self) -> Path | None:
        """Calibration data on disk."""
        return None if isinstance(self.calibration, Synthetic) else self.calibration

    @property
    def has_budget(self) -> bool:
        return any(budget is not None for budget in (self.ratio, self.max_bytes, self.max_loss))

    def check(self, planned_only: bool = False) -> None:
        """Refuses what does not go together, before any work is done; a plan needs no calibration data."""
        if sum(budget is not None for budget in (self.ratio, self.max_bytes, self.max_loss)) > 1:
            raise PlanError("there are several budgets: give one of --ratio, --max-bytes and --max-loss")
        if self.has_budget and self.method.given:
            raise PlanError("a budget chooses methods and settings itself: give one or the other")
        if self.method.given and self.recipe not in (None, NONE):
            raise PlanError("a recipe states methods and settings itself: give one or the other")
        uses_model = self.model is not None or self.calibration is not None
        if self.engine is not None:
            self._check_engine()
        serves_budget = (
            self.curves is not None or self.trellis is not None or (uses_model and not self.method.given)
        )
        if not self.has_budget and serves_budget:
            raise PlanError(
                "--model, --calibration, --curves and --trellis serve a budget: give --ratio or --max-bytes "
                "(a --method takes --model and --calibration too, and a trellis with --set trellis=8)"
            )
        if self.method.given and self.model is not None and self.calibration is None:
            raise PlanError("with a method, --model serves --calibration: give both")
        budget = self.ratio is not None or self.max_bytes is not None
        if self.stream and (not (self.calibration or planned_only) or self.model is not None or not budget):
            raise PlanError(
                "--stream reads the model of a Hugging Face folder block by block, to calibrate it: give "
                "--calibration and one of --ratio and --max-bytes, and leave out --model and --method"
            )
        if self.calibration is not None and self.model is None and not is_model_folder(self.source):
            raise PlanError("--calibration runs the model: say what makes it with --model module:callable")
        self.method.make()

    def _check_engine(self) -> None:
        if self.calibration is None and (self.model or self.curves or self.max_loss is not None):
            raise PlanError(
                "without --calibration, --engine works on the weights alone: leave out --model, --curves and "
                "--max-loss, or --engine"
            )
        if self.calibration is not None and (self.method.given or self.stream):
            raise PlanError(
                "with --calibration, --engine measures for a budget: a method and --stream go layer by layer in one "
                "process, so leave them out, or --engine"
            )

    def check_outputs(self, output: Path) -> None:
        """No file that is read may be written over."""
        for written in (output, self.curves):
            if written is not None:
                check_output(written, self.source, self.data, recipe_file(self.recipe))
        if self.curves is not None:
            check_output(output, self.curves)
        if not self._makes_folder(output):
            check_target(output)
            check_ending(output)

    def advise(self) -> None:
        """Says what a model that has no calibration data could have."""
        if self.calibration is None and self.has_budget and self.engine is None and self._has_model():
            print_line(
                "no calibration data: --calibration synthetic makes inputs from the model itself, usually for less "
                f"divergence at the same size (measured: {MEASURED})"
            )

    def _has_model(self) -> bool:
        """Whether a model is named, or its folder names one that writes texts."""
        if self.model is not None or not is_model_folder(self.source):
            return self.model is not None
        folder = open_folder(self.source)
        return folder.library == "transformers" and folder.architecture.endswith(_CAUSAL)

    def with_recipe(self, source: Source, quiet: bool = False) -> CompressRequest:
        """The request with the recipe it will follow, by name; one that nobody named is announced."""
        if self.method.given:
            return replace(self, recipe=None)
        # With calibration, what matters in this very model is measured: no family's habits are needed.
        wanted = self.recipe or (NONE if self.calibration is not None else AUTO)
        found = named_recipe(wanted, source, DEFAULT_METHOD)
        if found is not None and self.recipe is None and not quiet:
            print_line(f"recipe {found[0]}: {found[1].about} (--recipe none goes without)")
        return replace(self, recipe=None if found is None else found[0])

    def open(self) -> Source:
        """What is to be compressed."""
        return open_source(self.source, self.key)

    def preview(self) -> Preview:
        """What `run` would come to."""
        return plan(
            self.source,
            self.method.make(),
            key=self.key,
            ratio=self.ratio,
            max_bytes=self.max_bytes,
            exclude=self.exclude,
            recipe=self.recipe,
            samples=self.samples if self.stream else None,
            length=self.length,
        )

    def run(self, output: Path, progress: bool = True) -> Packed:
        """Writes a packed file, or a folder for a model's folder."""
        if not self._makes_folder(output):
            return self._write(output, progress)

        def write(path: Path) -> Packed:
            return self._write(path, progress)

        folder = open_folder(self.source)
        inputs = (self.data, recipe_file(self.recipe))
        return resume_folder(output, folder, write, lambda: identify_run(folder, self, inputs=inputs))

    def _makes_folder(self, output: Path) -> bool:
        return is_model_folder(self.source) and output.suffix != ".safetensors"

    def _write(self, path: Path, progress: bool) -> Packed:
        if progress and parts_folder(path).is_dir():
            print_line(f"resuming from what {parts_folder(path)} has")
        source, batches = self._model_and_batches()
        states = STATES if self.trellis is None else self.trellis
        return compress(
            source,
            self.method.make(),
            key=None if isinstance(source, nn.Module) else self.key,
            ratio=self.ratio,
            max_bytes=self.max_bytes,
            max_loss=self.max_loss,
            exclude=self.exclude,
            recipe=self.recipe,
            calibration=batches,
            planner=Planner(samples=self.samples, trellis=states) if self.has_budget else None,
            curves=self.curves,
            to=path,
            engine=self.engine,
            progress=progress,
        )

    def _model_and_batches(self) -> tuple[Path | nn.Module, Iterable[Any] | Synthetic | None]:
        """What is compressed, and what it is calibrated on: images, a text, inputs to be made, or nothing."""
        if self.model is None and self.calibration is None:
            return self.source, None
        if self.model is not None:
            net = load_weights(import_model(self.model), self.source, self.key).to(default_device())
            if self.calibration is None or isinstance(self.calibration, Synthetic):
                return net, self.calibration
            return net, unlabelled_batches(self.calibration, self.samples, self.image_size)
        texts = self._texts(self.calibration) if isinstance(self.calibration, Path) else self.calibration
        return self.source if self.stream else from_pretrained(self.source).to(default_device()), texts

    def _texts(self, file: Path) -> Iterable[Any]:
        """A model that predicts the next token reads windows without a gap; any other reads line by line."""
        folder = open_folder(self.source)
        batches = token_batches if folder.architecture.endswith(_CAUSAL) else line_batches
        at_once = 1 if self.stream else TEXTS_AT_ONCE  # the logits of several texts may not fit a GPU
        return batches(file, tokenizer_of(folder), self.length, self.samples, at_once)


def calibration_of(given: str | None, length: int, image_size: int) -> Path | Synthetic | None:
    """What --calibration names: data on disk, or inputs to be made. `./synthetic` is a path."""
    if given == SYNTHETIC:
        return Synthetic(image_size, length)
    return None if given is None else Path(given)
