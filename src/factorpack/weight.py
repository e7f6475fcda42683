"""`Weight`: what a method compresses. Its values, how they are laid out, and what is known of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, TypeVar

import torch
from torch import Tensor

from factorpack.errors import PlanError, WeightError
from factorpack.record import Encoded, LayerMoments, LayerSample
from factorpack.tiles import Layout

T = TypeVar("T")
_CHECKED = "finite"
"""What is kept of weights that codes can represent."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One weight of a model, ready to be encoded."""

    values: Tensor
    transposed_groups: int = 0
    """0: output channels come first. g > 0: a transposed convolution of g groups, (in, out/g, ...)."""
    inputs: LayerSample | LayerMoments | None = None
    """What calibration data show of the layer's inputs; None without calibration data."""
    sensitivity: float | None = None
    """Fisher information at the layer's outputs; None where it is unknown."""
    is_vocabulary: bool = False
    """An embedding of words, or the head that predicts them."""
    _prepared: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def numel(self) -> int:
        return self.values.numel()

    @property
    def layout(self) -> Layout:
        return Layout(self.shape, self.transposed_groups)

    @property
    def filter_size(self) -> int:
        """Values of one output filter."""
        return self.numel // self.layout.outputs

    @property
    def row_weights(self) -> Tensor | None:
        """How much errors in each row count, (out,); None: all the same."""
        return self.inputs.row_weights if isinstance(self.inputs, LayerMoments) else None

    def finite(self) -> Tensor:
        """The values in working precision, or a WeightError where no code can represent them."""
        values = self.values
        if not values.is_floating_point():
            raise WeightError(f"{values.dtype} values cannot be compressed, only kept")
        if values.numel() == 0:
            raise WeightError(f"an empty tensor of shape {self.shape} cannot be compressed, only kept")
        working = values.detach().to(values.dtype if values.dtype.itemsize >= 4 else torch.float32)
        self.prepare(_CHECKED, lambda: self._check(working))  # once: a GPU is waited for
        return working

    def _check(self, working: Tensor) -> None:
        """A WeightError where no code can represent the values."""
        largest = working.abs().max().item()
        if not isfinite(largest):
            bad = working.numel() - int(working.isfinite().sum())
            raise WeightError(
                f"{bad} of {working.numel()} weights are NaN or infinite; repair or exclude the tensor"
            )
        if largest > 1e36:
            raise WeightError(
                f"weights up to {largest:.3g} leave no room for FP32 arithmetic; exclude the tensor"
            )

    def rows(self) -> Tensor:
        """The values in working precision as a matrix, one row per output channel: (out, rest)."""
        if self.values.dim() == 0:
            raise PlanError("a single value has no channels to quantize: keep it")
        channels = self.layout.out_first(self.finite())
        return channels.reshape(len(channels), -1)

    def tiles(self, tile: int) -> Tensor:
        """The values in working precision, read in the order out, in, h, w, in columns of `tile`: (tile, n)."""
        return self.layout.to_tiles(self.finite(), tile)

    def from_tiles(self, matrix: Tensor) -> Tensor:
        """The inverse of `tiles`, for any values: (tile, n) back to the weight's shape."""
        return self.layout.from_tiles(matrix)

    def spatial(self) -> Tensor:
        """The values in working precision as (in*h, out*w): its factors are one-dimensional filters."""
        return self.layout.to_spatial(self.finite())

    def encoded(
        self,
        kind: str,
        parts: Mapping[str, Tensor],
        bits: Mapping[str, int] | None = None,
        *,
        extra_zeros: int = 0,
        note: str = "",
        trellis: int = 0,
    ) -> Encoded:
        """An `Encoded` of this weight's shape, type and layout."""
        layout = (self.shape, self.values.dtype)
        return Encoded(kind, *layout, parts, bits or {}, self.transposed_groups, extra_zeros, note, trellis)

    def prepare(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, computed once: methods that differ in their step alone share the work."""
        if key not in self._prepared:
            self._prepared[key] = make()
        prepared: T = self._prepared[key]
        return prepared

    def is_prepared(self, key: Hashable) -> bool:
        return key in self._prepared

    def forget(self, *kept: Hashable) -> None:
        """Frees what was prepared, except under these keys."""
        for key in [key for key in self._prepared if key not in kept]:
            del self._prepared[key]
