"""What a method is: settings that turn a `Weight` into an `Encoded`, and what others need to know of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from factorpack.errors import PlanError
from factorpack.methods.settings import build_settings
from factorpack.record import Encoded, LayerMoments, LayerSample
from factorpack.weight import Weight


class Method(ABC):
    """Base of every method: a frozen dataclass whose fields are its settings. See docs/adding-a-method.md.

    All but `name`, `title` and `encode` have defaults that suit most methods.
    """

    __slots__ = ()

    name: ClassVar[str]
    """In recipes and on the command line."""
    title: ClassVar[str]
    """In tables and figures."""
    keeps: ClassVar[bool] = False
    """Whether tensors stay values, and never become codes."""
    suits_anything: ClassVar[bool] = False
    """Whether it codes first convolutions, depthwise convolutions and classifiers like any other weight."""
    wants_moments: ClassVar[bool] = False
    """Whether it takes second moments of the layer's inputs, and not a sample of them."""
    permutes: ClassVar[bool] = False
    """Whether a comparison first reorders channels, which changes no output."""
    peak_factor: ClassVar[float] = 12.0
    """Peak bytes of memory for each byte of the weight in FP32, as measured on 2 to 8 million values."""

    @property
    def samples(self) -> int:
        """Calibration samples a layer needs; most methods need none."""
        return 0

    @abstractmethod
    def encode(self, weight: Weight) -> Encoded:
        """Compresses one weight. It never changes `weight.values`.

        `weight.inputs` is what calibration data show of the layer's inputs, where there are any and
        `samples` is above zero: a sample, or with `wants_moments` second moments.
        """

    def moments_of(self, weight: Weight) -> LayerMoments | None:
        """The moments of a layer's inputs, for a method that wants them."""
        if isinstance(weight.inputs, LayerSample):
            raise PlanError(f"{type(self).__name__} takes moments of a layer's inputs, not a sample of them")
        return weight.inputs

    @classmethod
    def ladders(cls) -> Sequence[Sequence[Method]]:
        """Settings for a comparison, in ladders along which files grow; none: it is not compared."""
        return []

    def for_classifier(self) -> Method | None:
        """What a classifier gets instead, by the method's own paper; None for the 4-bit codes of our paper."""
        return None

    def without_data(self) -> Method:
        """The method as far as it goes on the weights alone."""
        return self

    def for_sizing(self) -> Method:
        """The same settings with only as much work as it takes to know the size of the file."""
        return self.without_data()

    def excerpt_values(self, numel: int) -> int:
        """Values of a weight that this method treats as it would treat all `numel` of them."""
        return min(numel, EXCERPT_VALUES)

    def for_excerpt(self, rows: int, columns: int) -> tuple[Method, bool]:
        """The settings for an excerpt of a (rows, columns) weight, and whether columns are left out like rows."""
        del rows, columns
        return self, False


EXCERPT_VALUES = 1 << 16
"""Values of the excerpt that represents a whole weight in `plan`."""


def from_fields(methods: Mapping[str, type[Method]], fields: Mapping[str, Any]) -> Method:
    """A method from a recipe's table: `{"method": "qspca", "rank": 64, "latent_bits": 3}`.

    An unknown method or setting is an error that lists the known ones.
    """
    settings = dict(fields)
    name = settings.pop("method", None)
    if not isinstance(name, str) or name not in methods:
        raise unknown_method(name, methods)
    method: Method = build_settings(methods[name], settings, f"method {name!r}")
    return method


def unknown_method(name: object, methods: Iterable[str]) -> PlanError:
    """Says that there is no such method, and what an earlier version's is called now."""
    now = "; nncodec is called rdoq now" if name == "nncodec" else ""
    known = list(methods)
    return PlanError(f"unknown method {name!r}, known are {', '.join(known)}{now}", found=name, allowed=known)
