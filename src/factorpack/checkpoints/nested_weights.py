"""Finds the state dict in what a torch file holds: alone, or beside optimizers, averages and settings."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from factorpack.checkpoints.entry import Note, list_names
from factorpack.checkpoints.weight_names import plain_name
from factorpack.errors import SourceError

TOP = "."
"""What stands for the file itself where others have a name."""
USUAL = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "net",
    "network",
    "params",
    "weights",
)
"""Names that training programs give the weights, the most common first."""
_AVERAGED = re.compile(r"(^|[._-])ema([._-]|$)", re.IGNORECASE)
_NEVER = re.compile(r"optim|sched|scaler|callback|loops|rng|hyper_?param|hparams|args|config", re.IGNORECASE)
"""Parts of the names under which there are tensors and no weights."""
_DEEPEST = 3
CHOOSE = "choose with --key, or key= in Python"


@dataclass(frozen=True, slots=True)
class Found:
    """Weights, the name they are under, and what is to be said of it."""

    weights: Mapping[str, Tensor]
    key: str
    notes: tuple[Note, ...]


def find_weights(loaded: Mapping[Any, Any], file: str, key: str | None = None) -> Found:
    """The weights under `key`, or those that are usually meant; SourceError where nobody could tell.

    An average over training (EMA) comes before the weights it averages, as in timm, if it has all of them.
    """
    candidates = dict(_candidates(loaded))
    if not candidates:
        raise SourceError("holds no tensors under names, expected a state dict")
    if key is not None and key not in candidates:
        where = "at its top" if list(candidates) == [TOP] else f"under {list_names(list(candidates))}"
        raise SourceError(f"has no weights under {key!r}, only {where}", found=key, allowed=list(candidates))
    chosen = _choose(candidates) if key is None else key
    weights = {name: value for name, value in candidates[chosen].items() if isinstance(value, Tensor)}
    others = [name for name in candidates if name != chosen]
    notes = []
    if others and key is None:
        average = ", an average over training" if _AVERAGED.search(chosen) else ""
        text = (
            f"{file}: the weights under {chosen!r}{average}; others are under {list_names(others)} ({CHOOSE})"
        )
        notes.append(Note(text, logging.WARNING))
    left = _left_out(loaded, chosen, others, candidates[chosen])
    if left:
        place = "the top of the file" if chosen == TOP else repr(chosen)
        notes.append(Note(f"{file}: only the weights under {place} are used; left out: {left}"))
    return Found(weights, chosen, tuple(notes))


def _candidates(loaded: Mapping[Any, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every mapping that may be a state dict, by its place, the outermost first."""
    waiting: list[tuple[tuple[str, ...], Mapping[Any, Any]]] = [((), loaded)]
    seen = {id(loaded)}
    for place, mapping in waiting:  # it grows
        if _holds_weights(place, mapping):
            yield ".".join(place) or TOP, mapping
        if (place and _holds_tensors(mapping)) or len(place) == _DEEPEST:
            continue
        for name, value in mapping.items():
            if isinstance(value, Mapping) and id(value) not in seen and _may_hold_weights(name, value):
                seen.add(id(value))
                waiting.append(((*place, name), value))


def _holds_weights(place: tuple[str, ...], mapping: Mapping[Any, Any]) -> bool:
    """Whether a mapping is a state dict. Beside the tensors of one under an unusual name there is nothing else."""
    if not _holds_tensors(mapping) or not all(isinstance(name, str) for name in mapping):
        return False
    usual = not place or place[-1] in USUAL or bool(_AVERAGED.search(place[-1]))
    return usual or all(isinstance(value, Tensor) for value in mapping.values())


def _holds_tensors(mapping: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in mapping.values())


def _may_hold_weights(name: object, value: Mapping[Any, Any]) -> bool:
    is_optimizer = {"state", "param_groups"} <= set(value)
    return isinstance(name, str) and not is_optimizer and not _NEVER.search(name)


def _choose(candidates: Mapping[str, Mapping[str, Any]]) -> str:
    if len(candidates) == 1:
        return next(iter(candidates))
    last = {name: name.rpartition(".")[2] for name in candidates}
    usual = [name for wanted in USUAL for name in candidates if last[name] == wanted]
    plain = [name for name in usual if not _AVERAGED.search(name)]
    averaged = [name for name in candidates if _AVERAGED.search(name)]
    for name in averaged:
        # Some averages are of the parameters alone: without the statistics of norms they are no model.
        if not plain or _names_in(candidates[name]) >= _names_in(candidates[plain[0]]):
            return name
    if plain:
        return plain[0]
    raise SourceError(f"has weights under {list_names(list(candidates))}: {CHOOSE}")


def _names_in(mapping: Mapping[str, Any]) -> set[str]:
    return {plain_name(name) for name, value in mapping.items() if isinstance(value, Tensor)}


def _left_out(loaded: Mapping[Any, Any], chosen: str, others: list[str], weights: Mapping[str, Any]) -> str:
    """What is in the file beside weights: names, and the bytes of tensors among them."""
    taken = {chosen, *others}
    left = {name: value for name, value in weights.items() if not isinstance(value, Tensor)}
    if chosen != TOP:
        left = {f"{chosen}.{name}": value for name, value in left.items()}
        heads = {name.partition(".")[0] for name in taken} | taken
        left |= {str(name): value for name, value in loaded.items() if str(name) not in heads}
    else:
        left = {name: value for name, value in left.items() if name not in taken}
    words = [
        f"{name!r} ({count:,} bytes)" if (count := _tensor_bytes(left[name])) else repr(name) for name in left
    ]
    shown = ", ".join(words[:6])
    return shown if len(words) <= 6 else f"{shown} and {len(words) - 6} more"


def _tensor_bytes(value: object) -> int:
    """Bytes of all tensors in a value, each counted once, however they are nested."""
    waiting, seen, total = [value], set[int](), 0
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            total += each.numel() * each.element_size()
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple | set):
            waiting += each
    return total
