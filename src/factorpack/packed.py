"""`Packed`, a compressed model, and its file: save, load, decode and run. Nothing here compresses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from factorpack.batches import evaluating, forward
from factorpack.decoding import decode
from factorpack.errors import PlanError, SourceError, WeightError
from factorpack.format.container import Reader, check_target, write_plain
from factorpack.format.encode_ahead import Streams
from factorpack.format.overwrite import check_output
from factorpack.format.packed_file import write_packed
from factorpack.format.tensor_source import TensorSource
from factorpack.progress import Progress, ProgressOption
from factorpack.record import DTYPES, Encoded
from factorpack.size import SizeReport, size_report

if TYPE_CHECKING:
    from factorpack.budget.curves import Curve
    from factorpack.runtime.apply import Applied, Mode
    from factorpack.tune.best import Tuned


class Packed(Mapping[str, Encoded]):
    """A compressed model: its tensors by name, in memory or still in their file.

    >>> packed = fp.load("model.packed.safetensors")  # doctest: +SKIP
    >>> model.load_state_dict(packed.state_dict())  # doctest: +SKIP
    """

    def __init__(
        self,
        tensors: Mapping[str, Encoded],
        aliases: Mapping[str, str] | None = None,
        reader: Reader | None = None,
        streams: Streams | None = None,
    ) -> None:
        self._tensors = tensors
        self.aliases = dict(aliases or {})
        self._reader = reader
        self._streams = streams  # what was encoded to measure the file is not encoded again
        self.curves: Mapping[str, Curve] = {}
        """Rate-distortion curves of the weights, where a budget was planned on them just now."""
        self.estimated_loss: float | None = None
        """Nats of divergence from the original's predictions, where a budget was planned on calibration data just
        now: an estimate, each weight's measured or predicted alone and added up."""
        self.tuned: Tuned | None = None
        """What fine-tuning did on held-out inputs, where it was done just now."""

    def __getitem__(self, name: str) -> Encoded:
        return self._tensors[self.aliases.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors or name in self.aliases

    def __repr__(self) -> str:
        where = f" in {self._reader.path}" if self._reader is not None else ""
        return f"Packed({len(self)} tensors{where})"

    @property
    def path(self) -> Path | None:
        """The file this was loaded from or last saved to."""
        return self._reader.path if self._reader is not None else None

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of every decoded tensor, aliases included, without decoding any."""
        if isinstance(self._tensors, Reader):
            known = {name: (DTYPES[row.dtype], row.shape) for name, row in self._tensors.rows.items()}
        else:
            known = {name: (encoded.dtype, encoded.shape) for name, encoded in self.items()}
        return known | {alias: known[target] for alias, target in self.aliases.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Plain weights under the names they came with; tied tensors are one tensor again."""
        state = {name: decode(encoded) for name, encoded in self._source().decoded(list(self))}
        return state | {alias: state[target] for alias, target in self.aliases.items()}

    def decode_to(
        self, path: str | Path, progress: ProgressOption = True, dtype: torch.dtype | None = None
    ) -> None:
        """Writes the decoded weights as an ordinary safetensors file, holding one tensor at a time.

        Tied tensors are decoded once and written under each of their names. With a `dtype`, such as
        `torch.bfloat16`, every tensor of floating point numbers is written in it.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise PlanError(f"dtype is {dtype}, expected a floating point type")
        check_output(Path(path), self.path)
        check_target(Path(path))
        shapes, names = self.shapes(), self._names()
        ordered = {name: shapes[name] for own in names.values() for name in own}
        if dtype is not None:
            ordered = {
                name: (dtype if own.is_floating_point else own, shape)
                for name, (own, shape) in ordered.items()
            }
        with Progress("decoding", sum(math.prod(shape) for _, shape in shapes.values()), progress) as bar:
            write_plain(Path(path), ordered, self._decoded(names, bar, dtype))

    def _names(self) -> dict[str, list[str]]:
        """Every tensor, with its name and its aliases."""
        names = {name: [name] for name in self}
        for alias, target in self.aliases.items():
            names[target].append(alias)
        return names

    def _decoded(
        self, names: Mapping[str, Iterable[str]], bar: Progress, dtype: torch.dtype | None
    ) -> Iterator[Tensor]:
        for target, own in names.items():
            weight = decode(self[target])
            if dtype is not None and weight.is_floating_point():
                weight = cast(target, weight, dtype)
            for name in own:
                yield weight
                bar.advance(name, weight.numel())

    def load_into(self, model: nn.Module) -> nn.Module:
        """Decodes straight into a model's tensors, one at a time. Names and shapes must fit exactly."""
        return self.apply(model).model

    def apply(
        self,
        model: nn.Module,
        mode: Mode = "dense",
        example: Any = None,
        slack: float = 0.0,
        max_memory: int | None = None,
        place: Callable[[str], torch.device] | None = None,
    ) -> Applied:
        """Makes a model run on this file, in place. Names and shapes must fit exactly.

        "dense" decodes into the model's tensors and costs nothing afterwards. "packed" leaves codes in
        memory, and each layer rebuilds its weight in every forward. "coded" leaves them entropy-coded, as
        they are in the file: the least memory, and the slowest. "factored" computes with the factors where a
        tile lies inside one output filter, and is "packed" elsewhere. "auto" times dense, packed and factored
        for each layer on `example`, a batch as for calibration, and takes the fastest; with `slack` it may
        give that share of the layers' dense time for less memory.

        `max_memory` limits the bytes that the model holds, in modes "packed" and "auto": weights are then entropy-coded
        where they must be. A layer that runs has its weight in memory in addition. What became of which
        layer, and why, is in the result's `layers`.

        Tensors of a model on the meta device get memory when they are filled, on the CPU or where `place`
        says, by name; packed weights never do.

        >>> print(packed.apply(model, "auto", example=batch))  # doctest: +SKIP
        """
        from factorpack.runtime.apply import Request, apply  # whoever only reads does without
        from factorpack.runtime.fill import on_cpu

        run = None if example is None else partial(_run_once, model, example)
        request = Request(mode, run, slack, max_memory, place or on_cpu)
        self._check_fits(model)
        return apply(model, self._source(), self.aliases, request)

    @property
    def tensors(self) -> Mapping[str, Encoded]:
        """The tensors without aliases: in memory, or read when they are used."""
        return self._tensors

    def _source(self) -> TensorSource:
        return TensorSource(self._tensors, self._streams)

    def _check_fits(self, model: nn.Module) -> None:
        targets = model.state_dict(keep_vars=True)
        names = {*self, *self.aliases}
        if names != set(targets):
            missing, extra = sorted(set(targets) - names), sorted(names - set(targets))
            raise SourceError(f"the model lacks {extra[:5]}, the file lacks {missing[:5]}")
        shapes = self.shapes()
        for name, target in targets.items():
            if shapes[name][1] != tuple(target.shape):
                raise SourceError(
                    f"tensor {name!r} is {shapes[name][1]} in the file, {tuple(target.shape)} in the model",
                    tensor=name,
                    found=shapes[name][1],
                    allowed=tuple(target.shape),
                )

    def replace(self, tensors: Mapping[str, Encoded]) -> None:
        """Takes other tensors under the same names, in memory from now on."""
        if list(tensors) != list(self):
            raise SourceError("a packed model can only be given the tensors it has, in its own order")
        self._tensors, self._reader = dict(tensors), None

    def size(self) -> SizeReport:
        """Where the bits are: the paper's accounting, and the file's bytes once there is a file."""
        if self._reader is None:
            return size_report(self._tensors)
        part_bytes = {
            name: {part: stored.stored_bytes for part, stored in row.parts.items()}
            | {"header": row.filler_bytes}
            for name, row in self._reader.rows.items()
        }
        return size_report(self._tensors, part_bytes, self._reader.file_bytes)


def save(packed: Packed, path: str | Path) -> None:
    """Writes a packed model. The file appears under its name only when it is whole."""
    if not isinstance(packed, Packed):
        raise SourceError(
            f"a {type(packed).__name__} cannot be saved, expected what fp.compress or fp.load returns"
        )
    write_packed(path, packed.items(), packed.aliases, packed._streams)
    packed._reader = Reader(path)


def load(path: str | Path, max_bytes: int | None = None) -> Packed:
    """Opens a packed file. Everything is checked now; tensors are read, and checked again, when they are used.

    A file that would decode to more than `max_bytes`, tied tensors counted under each of their names, is
    refused before any of it is decoded.
    """
    reader = Reader(path, max_bytes)
    return Packed(reader, reader.schema.aliases, reader)


def cast(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in another type; WeightError where one that is finite would become infinite."""
    found = values.to(dtype)
    if dtype.itemsize < values.dtype.itemsize or dtype == torch.float16:
        lost = values.isfinite() & ~found.isfinite()
        if lost.any():
            largest = float(values[lost].abs().max())
            raise WeightError(
                f"tensor {name!r} has values up to {largest:.3g}, and {dtype} ends at {torch.finfo(dtype).max:.3g}: "
                "choose another type",
                tensor=name,
                found=largest,
                allowed=torch.finfo(dtype).max,
            )
    return found


def _run_once(model: nn.Module, example: Any) -> None:
    with evaluating(model), torch.inference_mode():
        forward(model, example)
