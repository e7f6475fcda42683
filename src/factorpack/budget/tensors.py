"""The tensors of a source as a budget sees them: weights to code, and everything else as it is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from factorpack.budget.norm_bits import FEWEST_BITS, choose_norm_bits, count_norm_values
from factorpack.budget.norms import small_leftovers
from factorpack.budget.planner import BudgetRequest
from factorpack.checkpoints.entry import Entry
from factorpack.errors import PlanError
from factorpack.format.packed_file import file_bytes
from factorpack.format.schema import EXPANSION
from factorpack.format.streams import raw_bytes
from factorpack.methods import Keep, Scalar
from factorpack.planning.rules import Choice, Rules
from factorpack.quantize.uniform import MAX_STORED_BITS
from factorpack.record import Encoded
from factorpack.source import Source
from factorpack.weight import Weight


@dataclass(frozen=True)
class Tensors:
    """Which tensors a budget codes, and how all others are stored."""

    source: Source
    model: nn.Module | None
    coded: list[str]
    fixed: Mapping[str, Encoded]
    """Tensors that are not weights, or that the caller decided on."""
    fold_norms: bool
    norm_bits: int | None
    """None where they depend on the size of the file: see `for_bytes`."""
    is_calibrated: bool

    @cached_property
    def numel(self) -> int:
        """Elements of all weights that are coded."""
        return sum(self.source.entries[name].numel for name in self.coded)

    def is_fixed_by_caller(self, name: str) -> bool:
        return name in self.fixed and self.fixed[name].by_caller

    def for_bytes(self, max_bytes: int) -> Tensors:
        """The same with as many bits for norms as are worth their bytes in a file of this size, and fit into it."""
        if self.norm_bits is not None:
            return self
        kept = [(name, each.shape) for name, each in self.fixed.items() if not each.by_caller]
        values = count_norm_values(kept, self.model is not None and self.fold_norms)
        bits = choose_norm_bits(values, self.numel, max_bytes, self.is_calibrated)
        found = replace(self, norm_bits=bits)
        while bits > FEWEST_BITS and found.smallest_bytes > max_bytes:
            bits -= 1
            found = replace(self, norm_bits=bits)
        return found

    def join(self, coded: Mapping[str, Encoded], state: Mapping[str, Tensor]) -> dict[str, Encoded]:
        """Every tensor in the source's order; what is kept raw as the compressed network's `state` has it now.

        What has not changed since the last call is the same object, so that its stream is not made again.
        """
        fixed = dict(self._fixed_in_memory)
        for name, encoded in fixed.items():
            # A weight on the meta device was not changed.
            changed = name in state and not state[name].is_meta
            if encoded.kind == "keep" and not encoded.by_caller and changed:
                fixed[name] = Keep().encode(Weight(state[name].cpu())).noted(encoded.note)
        small = small_leftovers(fixed, self.model, self.fold_norms, self.norm_bits or 0)
        for name, encoded in small.items():
            if name not in self._joined or not _is_same(self._joined[name], encoded):
                self._joined[name] = encoded
        return {name: coded[name] if name in coded else self._joined[name] for name in self.source.entries}

    @cached_property
    def _fixed_in_memory(self) -> dict[str, Encoded]:
        """On the CPU: many vectors are looked at, and a GPU would be waited for each time."""
        return {name: encoded.to("cpu") for name, encoded in self.fixed.items()}

    @cached_property
    def _joined(self) -> dict[str, Encoded]:
        """What is kept raw, as `join` gave it last."""
        return {}

    @cached_property
    def empty(self) -> dict[str, Encoded]:
        """The tensors of the smallest possible file: what is kept, and every weight zero."""
        return self.join({name: zero_of(self.source.entries[name]) for name in self.coded}, {})

    @cached_property
    def smallest_bytes(self) -> int:
        """Bytes of the smallest possible file."""
        return file_bytes(self.empty, self.source.aliases)

    def overhead_bytes(self, max_bytes: int) -> int:
        """Bytes of everything but codes; an error where a file without a single code would be too large."""
        return overhead_bytes(self.smallest_bytes, max_bytes, [self.empty[name] for name in self.coded])

    def bits_per_weight(self, left_bytes: int) -> float:
        """What so many bytes allow; more bits than a code may have are of no use."""
        return min(8 * left_bytes / self.numel, MAX_STORED_BITS)


def _is_same(one: Encoded, other: Encoded) -> bool:
    """Whether two forms of a tensor are the same object, or of kind `keep` or `constant` and stored the same."""
    if one is other:
        return True
    if (one.kind, one.note, list(one.parts)) != (other.kind, other.note, list(other.parts)):
        return False
    pairs = [(one.parts[name], other.parts[name]) for name in one.parts]
    return all(a.dtype == b.dtype and raw_bytes(a) == raw_bytes(b) for a, b in pairs)


def split_tensors(request: BudgetRequest) -> Tensors:
    """Encodes what the budget does not touch."""
    choices, coded = choose_fixed(request)
    fixed = {name: choice.encode(request.source.weight(name)) for name, choice in choices.items()}
    planner, is_calibrated = request.planner, request.calibration is not None
    settings = (planner.fold_norms, planner.norm_bits, is_calibrated)
    return Tensors(request.source, request.model, coded, fixed, *settings)


def choose_fixed(request: BudgetRequest) -> tuple[dict[str, Choice], list[str]]:
    """Choices for the tensors that a budget does not touch, and the names of the weights that it codes."""
    plan = Rules(Scalar(8), request.layers, request.exclude).plan(request.source)
    fixed = {name: choice for name, choice in plan.items() if choice.by_caller or choice.method.keeps}
    coded = [name for name in plan if name not in fixed]
    if not coded:
        types = sorted({str(entry.dtype).removeprefix("torch.") for entry in request.source.entries.values()})
        raise PlanError(
            "there is no weight to compress: weights are matrices and kernels of 16 to 64 bits that are not "
            f"excluded, and the tensors are vectors or of other types ({', '.join(types)})"
        )
    return fixed, coded


def overhead_bytes(least: int, max_bytes: int, empty: Iterable[Encoded]) -> int:
    """What everything but codes takes, in a file that has `least` bytes with every weight zero."""
    if least > max_bytes:
        raise PlanError(
            f"{max_bytes} bytes cannot be met: with every weight zero the file would still have {least}, for "
            f"what is kept, headers and the reader's safety margin of one byte per {EXPANSION:,} elements",
            found=max_bytes,
            allowed=least,
        )
    return least - sum(-(-encoded.numel // EXPANSION) for encoded in empty)


def zero_of(entry: Entry) -> Encoded:
    """A weight of zeros."""
    return Encoded("constant", entry.shape, entry.dtype, {"value": torch.zeros(1, dtype=entry.dtype)})
