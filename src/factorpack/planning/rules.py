"""The default plan: the caller's patterns first, then the paper's conventions, then the requested method.

1. A tensor that matches `exclude` is kept raw.
2. A weight that matches a pattern of `layers` gets that pattern's method; the first match wins.
3. What is no weight is kept: integers, vectors (biases, norms), empty tensors, a single output channel.
   A depthwise convolution and the classifier get a method of their own where the caller names one.
4. Unless the method `suits_anything`: the first convolution is kept, a depthwise convolution gets
   8-bit codes, the classifier 4-bit codes, as in the paper.
5. Unless the method's own paper does otherwise: TTQ and ABC-Net keep the classifier; VQ, BGD and PQF give it
   2048 codewords of 4 values, as the papers of BGD and PQF give ResNet18's; AQ codes it as any other weight.
6. Everything else gets the method.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from factorpack.checkpoints.entry import Entry
from factorpack.checkpoints.weight_names import natural_key
from factorpack.errors import PlanError
from factorpack.methods import Keep, Method, Scalar
from factorpack.record import Encoded, dtype_name
from factorpack.source import HEADS, Source
from factorpack.weight import Weight

CLASSIFIER = Scalar(bits=4)
DEPTHWISE = Scalar(bits=8)


@dataclass(frozen=True, slots=True)
class Choice:
    """A tensor's method, who chose it, and the reason in words."""

    method: Method
    note: str = ""
    """For people; it is stored with the tensor."""
    by_caller: bool = False
    """Whether a pattern of the caller's, or of a recipe's, chose it."""

    def encode(self, weight: Weight) -> Encoded:
        encoded = self.method.encode(weight).noted(self.note)
        return replace(encoded, by_caller=True) if self.by_caller else encoded


@dataclass(frozen=True, slots=True)
class Rules:
    """What the caller requested: a method, exceptions by name, and names to keep raw.

    A pattern is a glob (`layer1.*`), or a regular expression behind `re:`, matched against whole names.
    """

    method: Method
    layers: Mapping[str, Method] = field(default_factory=dict)
    exclude: Sequence[str] = ()
    depthwise: Method | None = None
    """For depthwise convolutions, which are known by their shape and not by their names."""
    classifier: Method | None = None

    def plan(self, source: Source) -> dict[str, Choice]:
        """A choice for every tensor, in the source's order."""
        if isinstance(self.exclude, str):
            raise PlanError(f"exclude is the text {self.exclude!r}, expected a list of patterns")
        for pattern in (*self.layers, *self.exclude):
            if not any(matches(pattern, name) for name in (*source.entries, *source.aliases)):
                some = ", ".join(list(source.entries)[:5])
                raise PlanError(f"the pattern {pattern!r} matches no tensor; there are {some}, ...")
        first, classifier = first_convolution(source), classifier_of(source)
        names = {name: [name] for name in source.entries}  # a tied tensor matches under each of its names
        for alias, target in source.aliases.items():
            names[target].append(alias)
        return {
            name: self._choose(names[name], entry, name == first, name == classifier)
            for name, entry in source.entries.items()
        }

    def _choose(self, names: list[str], entry: Entry, is_first: bool, is_classifier: bool) -> Choice:
        excluded = _first_match(self.exclude, names)
        if excluded is not None:
            return Choice(Keep(), f"excluded by {excluded!r}", by_caller=True)
        reason = not_a_weight(entry)
        matched = _first_match(self.layers, names)
        if matched is not None and (not reason or self.layers[matched].keeps):
            return Choice(self.layers[matched], f"chosen by {matched!r}", by_caller=True)
        if reason:
            return Choice(Keep(), reason)
        if self.depthwise is not None and is_depthwise(entry):
            return Choice(self.depthwise, "depthwise convolution")
        if self.classifier is not None and is_classifier:
            return Choice(self.classifier, "classifier")
        if self.method.suits_anything:
            return Choice(self.method)
        if is_first:
            return Choice(Keep(), "first convolution")
        if is_depthwise(entry):
            return Choice(DEPTHWISE, "depthwise convolution")
        if is_classifier:
            return Choice(self.method.for_classifier() or CLASSIFIER, "classifier")
        return Choice(self.method)


def _first_match(patterns: Iterable[str], names: list[str]) -> str | None:
    return next((pattern for pattern in patterns if any(matches(pattern, name) for name in names)), None)


def matches(pattern: str, name: str) -> bool:
    if not pattern.startswith("re:"):
        return fnmatch.fnmatchcase(name, pattern)
    try:
        return re.fullmatch(pattern[3:], name) is not None
    except re.error as error:
        raise PlanError(f"the pattern {pattern!r} is not a regular expression: {error}") from error


def not_a_weight(entry: Entry) -> str:
    """Why a tensor is kept raw whatever the method; empty for a weight."""
    if not entry.dtype.is_floating_point or entry.dtype.itemsize == 1:
        return f"{dtype_name(entry.dtype)} values"
    if 0 in entry.shape:
        return "empty"
    if len(entry.shape) < 2:
        return "vector"
    return "one output channel" if entry.shape[0] == 1 else ""


def is_depthwise(entry: Entry) -> bool:
    return len(entry.shape) > 2 and entry.shape[1] == 1


def first_convolution(source: Source) -> str | None:
    """The convolution with 3 or 4 input channels, an image's; without one, the first there is."""
    found = [
        name for name, entry in source.entries.items() if len(entry.shape) > 2 and not not_a_weight(entry)
    ]
    images = [name for name in found if source.entries[name].shape[1] in (3, 4)]
    return next(iter(images or found), None)


def classifier_of(source: Source) -> str | None:
    """The last matrix under a name heads go by; in a convolutional net without one, the last matrix."""
    matrices = [
        name for name, entry in source.entries.items() if len(entry.shape) == 2 and not not_a_weight(entry)
    ]
    heads = [name for name in matrices if HEADS & set(name.split("."))]
    if not heads and first_convolution(source) is not None:
        heads = matrices
    return max(heads, key=natural_key, default=None)
