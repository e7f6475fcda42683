"""Names of weights without what wrappers put before them, and as a model has them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

PARALLEL, COMPILED = "module.", "_orig_mod."
"""What DistributedDataParallel and torch.compile put before every name."""
AVERAGES = "n_averaged"
"""A count that torch's AveragedModel keeps beside the weights it averages, which are under `module.`."""
_COMMON = ("model.", "net.", "module.")


def plain_name(name: str) -> str:
    """A name without what wrappers have added to it.

    >>> plain_name("module._orig_mod.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    name = "".join(f"{part}." for part in name.split(".") if part != COMPILED[:-1])[:-1]
    while name.startswith(PARALLEL):
        name = name.removeprefix(PARALLEL)
    return name


def wrapper_of(names: Iterable[str]) -> str:
    """What wrappers have put before all of the names, possibly nothing.

    >>> wrapper_of(["module._orig_mod.a", "module._orig_mod.b.c"])
    'module._orig_mod.'
    """
    found, left = "", list(names)
    while left:
        first = next((each for each in (PARALLEL, COMPILED) if left[0].startswith(each)), "")
        if not first or not all(name.startswith(first) and name != first for name in left):
            break
        found, left = found + first, [name.removeprefix(first) for name in left]
    return found


def fit_names(found: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """A model's name for each of a file's names; empty where the file does not fit.

    Names are the same but for wrappers, on either side, or for one prefix in the file, as that of the model
    inside a Lightning module. What is not under that prefix has no place in the model.

    >>> fit_names(["net.a.weight", "net.a.bias", "loss.scale"], ["a.weight", "a.bias"])
    {'net.a.weight': 'a.weight', 'net.a.bias': 'a.bias'}
    """
    targets = {plain_name(name): name for name in wanted}
    sources = {plain_name(name): name for name in found}
    if not targets or len(targets) != len(wanted) or len(sources) != len(found):
        return {}
    if targets.keys() == sources.keys():
        return {sources[name]: targets[name] for name in sources}
    longest = max(targets, key=len)
    prefixes = [name.removesuffix(longest) for name in sources if name.endswith(f".{longest}")]
    fitting = [
        prefix for prefix in prefixes if {prefix + name for name in targets} == _under(prefix, sources)
    ]
    if len(fitting) > 1:
        fitting = [prefix for prefix in _COMMON if prefix in fitting][:1]
    if len(fitting) != 1:
        return {}
    return {sources[fitting[0] + name]: target for name, target in targets.items()}


def _under(prefix: str, names: Iterable[str]) -> set[str]:
    return {name for name in names if name.startswith(prefix)}


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """A sort key that puts `layer10` after `layer9`, for numbers of any length."""
    # Every second word is a number: the one with more digits is larger.
    return [
        (1, len(digits := word.lstrip("0")), digits) if place % 2 else (0, 0, word)
        for place, word in enumerate(re.split(r"(\d+)", name))
    ]
