"""What a model answers: logits or values, answer by answer, padding left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from factorpack.batches import mask_of
from factorpack.errors import SourceError

_LOGITS = "logits"
_BY_TOKEN = "last_hidden_state"
_NAMES = (_LOGITS, "sentence_embedding", _BY_TOKEN)
"""What an answer with several tensors is about: a choice first, then a whole text, then its tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Answers of a batch, one a row: logits of classes, or else the mean of a Gaussian of their own spread."""

    values: Tensor
    """(answers, width)."""
    logits: bool


def answer_of(output: Any, batch: Any = None) -> Answer:
    """The answers in whatever a model returns for a batch.

    A matrix and anything called `logits` are logits, one choice a row; a single number is a value. Of
    anything else a sample is one answer, but each token of a text is one. Tokens that the batch's
    `attention_mask` says are padding are none.
    """
    name, tensor = _named(output)
    width = tensor.shape[-1] if tensor.dim() > 1 else 1
    logits = width > 1 and (name == _LOGITS or (name == "" and tensor.dim() == 2))
    mask = mask_of(batch)
    if mask is not None and tensor.dim() == 3 and tensor.shape[:2] == mask.shape:
        return Answer(tensor[mask.to(tensor.device)], logits)
    if logits or (name == _BY_TOKEN and tensor.dim() > 2):
        return Answer(tensor.flatten(0, -2), logits)
    return Answer(tensor.reshape(len(tensor), -1), logits=False)


def _named(output: Any) -> tuple[str, Tensor]:
    """The tensor that an answer is about, and its name; a lone tensor has none."""
    if isinstance(output, Tensor):
        return "", output
    for name in _NAMES:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return name, value
    values = list(output.values()) if hasattr(output, "values") else output
    for value in values if isinstance(values, list | tuple) else []:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            return "first", value
    raise SourceError(
        f"the model answers with a {type(output).__name__}, in which there is no tensor of floats"
    )
