"""Texts as tokens: calibration batches, and a language model's perplexity."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from factorpack.batches import device_of, evaluating
from factorpack.errors import SourceError
from factorpack.progress import Progress, ProgressOption

TEXTS_AT_ONCE = 8

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood of a token, given the tokens before it in its window."""

    perplexity: float
    nats: float
    tokens: int
    """Predicted tokens: all but the first of each window."""


def windows(file: Path, tokenizer: Any, length: int) -> list[Tensor]:
    """Splits a text file into non-overlapping windows of `length` tokens; the last may be shorter."""
    if length < 2:
        raise SourceError(f"windows of {length} tokens, expected 2 or more")
    ids = tokenizer(read_text(file), add_special_tokens=False, verbose=False)["input_ids"]
    tokens = torch.tensor(ids, dtype=torch.int64)
    found = [window for window in tokens.split(length) if len(window) > 1]
    if not found:
        raise SourceError(f"{file} has {len(tokens)} tokens, expected at least 2")
    return found


def line_batches(
    file: Path, tokenizer: Any, length: int, samples: int, at_once: int = TEXTS_AT_ONCE
) -> list[dict[str, Tensor]]:
    """Calibration batches: one text per line of a file, padded, of at most `length` tokens."""
    lines = [line for line in read_text(file).splitlines() if line.strip()]
    if not lines:
        raise SourceError(f"{file} has only empty lines, expected one text per line")
    taken = evenly_spaced(lines, samples)
    return [
        dict(tokenizer(some, padding=True, truncation=True, max_length=length, return_tensors="pt"))
        for some in (taken[start : start + at_once] for start in range(0, len(taken), at_once))
    ]


def token_batches(
    file: Path, tokenizer: Any, length: int, samples: int, at_once: int = TEXTS_AT_ONCE
) -> list[dict[str, Tensor]]:
    """Calibration batches: `samples` full windows, evenly spaced over the text."""
    found = windows(file, tokenizer, length)
    taken = evenly_spaced([window for window in found if len(window) == length] or found, samples)
    return [
        {"input_ids": torch.stack(taken[start : start + at_once])} for start in range(0, len(taken), at_once)
    ]


def evenly_spaced(items: list[Item], count: int) -> list[Item]:
    """`count` evenly spaced items, or all of them if there are fewer."""
    return items if len(items) <= count else [items[index * len(items) // count] for index in range(count)]


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SourceError(f"{file} cannot be read as text: {error}") from error


def perplexity(model: nn.Module, found: list[Tensor], progress: ProgressOption = True) -> Perplexity:
    """Perplexity of a causal language model on windows of tokens."""
    total, count = 0.0, 0
    with (
        Progress("measuring perplexity", len(found), progress) as bar,
        evaluating(model),
        torch.inference_mode(),
    ):
        for window in found:
            nats, tokens = _sum_nats(model, window.to(device_of(model)))
            total, count = total + nats, count + tokens
            bar.advance(f"perplexity {exp(total / count):.3f}", 1)
    return Perplexity(exp(total / count), total / count, count)


def _sum_nats(model: nn.Module, window: Tensor) -> tuple[float, int]:
    logits = getattr(model(input_ids=window[None]), "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != (1, len(window)):
        raise SourceError(f"a {type(model).__name__} returns no logits per token, which perplexity needs")
    nats = nn.functional.cross_entropy(logits[0, :-1].double(), window[1:], reduction="sum")
    return float(nats), len(window) - 1
