"""What a model predicts: logits or values, one prediction per row, padding left out."""

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
"""Which tensor of several counts: logits first, then one vector per text, then one per token."""


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """Predictions for a batch, one per row: logits of classes, or else the mean of a Gaussian."""

    values: Tensor
    """(predictions, width)."""
    are_logits: bool


def predictions_of(output: Any, batch: Any = None) -> Predictions:
    """The predictions in whatever a model returns for a batch.

    A matrix and anything called `logits` are logits, one choice per row; a single value is a value. Anything
    else is one prediction per sample, or one per token of a text. Tokens that the batch's `attention_mask`
    marks as padding do not count.
    """
    return predictions_in(*main_tensor(output), batch)


def predictions_in(name: str, tensor: Tensor, batch: Any = None) -> Predictions:
    """The same of the tensor that counts, by the name that `main_tensor` has for it."""
    width = tensor.shape[-1] if tensor.dim() > 1 else 1
    are_logits = width > 1 and (name == _LOGITS or (name == "" and tensor.dim() == 2))
    mask = mask_of(batch)
    if mask is not None and tensor.dim() == 3 and tensor.shape[:2] == mask.shape:
        return Predictions(tensor[mask.to(tensor.device)], are_logits)
    if are_logits or (name == _BY_TOKEN and tensor.dim() > 2):
        return Predictions(tensor.flatten(0, -2), are_logits)
    return Predictions(tensor.reshape(len(tensor), -1), are_logits=False)


def main_tensor(output: Any) -> tuple[str, Tensor]:
    """The tensor that holds the predictions, and its name; a lone tensor has none."""
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
    raise SourceError(f"the model returns a {type(output).__name__} that holds no tensor of floats")
