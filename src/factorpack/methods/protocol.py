"""What a method is: settings that turn a weight into an `Encoded`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from factorpack.errors import PlanError, WeightError
from factorpack.record import Encoded, LayerMoments, LayerSample
from factorpack.tiles import out_first


class Method(Protocol):
    """A frozen dataclass with an `encode`. See docs/adding-a-method.md."""

    name: ClassVar[str]

    def encode(
        self, weight: Tensor, transposed_groups: int = 0, sample: LayerSample | LayerMoments | None = None
    ) -> Encoded:
        """Compresses one weight; `transposed_groups` as in `Encoded`.

        A method whose `samples` is above zero is handed a sample of the layer's inputs and outputs where
        the caller has calibration data, or, with `wants_moments`, their second moments; the others may
        ignore it.
        """
        ...


def samples_of(method: Method) -> int:
    """How many calibration samples of a layer a method wants; most want none."""
    return int(getattr(method, "samples", 0))


def wants_moments(method: Method) -> bool:
    """Whether what it wants to know of a layer is the moments of its inputs, not a sample of them."""
    return bool(getattr(method, "wants_moments", False))


def from_fields(methods: Mapping[str, type[Method]], fields: Mapping[str, Any]) -> Method:
    """A method from a recipe's table: `{"method": "qspca", "rank": 64, "latent_bits": 3}`.

    An unknown method or setting is an error that lists the known ones.
    """
    settings = dict(fields)
    name = settings.pop("method", None)
    if not isinstance(name, str) or name not in methods:
        raise PlanError(f"unknown method {name!r}, known are {', '.join(methods)}")
    method: Method = build(methods[name], settings, f"method {name!r}")
    return method


def build(cls: Any, settings: Mapping[str, Any], what: str) -> Any:
    """An instance of a settings dataclass; unknown and missing settings are errors that say what is known."""
    declared = [field for field in dataclasses.fields(cls) if field.init]
    known = [field.name for field in declared]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise PlanError(f"unknown setting {unknown[0]!r} for {what}, known are {', '.join(known)}")
    absent = [
        field.name
        for field in declared
        if field.default is dataclasses.MISSING and field.name not in settings
    ]
    if absent:
        raise PlanError(f"{what} needs the setting {absent[0]!r}")
    return cls(**settings)


def check_type(name: str, value: object, *allowed: type) -> None:
    """Settings come from recipes too, where a string may stand in a number's place."""
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        words = " or ".join(kind.__name__ for kind in allowed)
        raise PlanError(f"{name} is {value!r}, a {type(value).__name__}; expected {words}")


def as_finite(weight: Tensor) -> Tensor:
    """The weight in working precision, or a WeightError where it has numbers no code can stand for."""
    if not weight.is_floating_point():
        raise WeightError(f"{weight.dtype} values cannot be compressed, only kept")
    if weight.numel() == 0:
        raise WeightError(f"an empty tensor of shape {tuple(weight.shape)} cannot be compressed, only kept")
    working = weight.detach().to(weight.dtype if weight.dtype.itemsize >= 4 else torch.float32)
    bad = working.numel() - int(working.isfinite().sum())
    if bad:
        raise WeightError(
            f"{bad} of {working.numel()} weights are NaN or infinite; repair or exclude the tensor"
        )
    largest = working.abs().max().item()
    if largest > 1e36:
        raise WeightError(
            f"weights up to {largest:.3g} leave no room for FP32 arithmetic; exclude the tensor"
        )
    return working


def rows_of(weight: Tensor, transposed_groups: int = 0) -> Tensor:
    """The weight in working precision as a matrix, a row an output channel: (out, rest)."""
    if weight.dim() == 0:
        raise PlanError("a single number has no channels to quantize: keep it")
    channels = out_first(as_finite(weight), transposed_groups)
    return channels.reshape(len(channels), -1)
