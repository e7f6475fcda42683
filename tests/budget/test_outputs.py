"""Answers of every form a model may give them in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from factorpack.budget.outputs import predictions_of
from factorpack.errors import SourceError
from tests.helpers import seeded

MATRIX = seeded(2, 3)
TEXTS = seeded(2, 3, 5)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
REAL = torch.stack([TEXTS[0, 0], TEXTS[0, 1], TEXTS[1, 0]])


@pytest.mark.parametrize("output", [MATRIX, SimpleNamespace(logits=MATRIX), {"loss": None, "logits": MATRIX}])
def test_a_matrix_and_anything_called_so_are_logits(output: Any) -> None:
    found = predictions_of(output)
    assert found.are_logits
    assert torch.equal(found.values, MATRIX)


@pytest.mark.parametrize(
    "output",
    [
        (None, MATRIX),
        (torch.tensor(0.5), MATRIX),
        [MATRIX],
        {"ids": torch.ones(2, dtype=torch.int64), "b": MATRIX},
        {"token_embeddings": TEXTS, "sentence_embedding": MATRIX},
        {"last_hidden_state": TEXTS, "sentence_embedding": MATRIX},
    ],
)
def test_the_tensor_that_holds_the_predictions(output: Any) -> None:
    found = predictions_of(output)
    assert not found.are_logits
    assert torch.equal(found.values, MATRIX)


@pytest.mark.parametrize(("name", "logits"), [("logits", True), ("last_hidden_state", False)])
def test_every_token_is_a_prediction_and_padding_is_not(name: str, logits: bool) -> None:
    whole, real = predictions_of({name: TEXTS}), predictions_of({name: TEXTS}, {"attention_mask": MASK})
    assert whole.are_logits == real.are_logits == logits
    assert torch.equal(whole.values, TEXTS.flatten(0, 1))
    assert torch.equal(real.values, REAL)


def test_an_image_is_one_prediction_and_a_single_value_not_logits() -> None:
    assert predictions_of(seeded(2, 3, 4, 5)).values.shape == (2, 60)
    for single in (seeded(4, 1), seeded(4), {"logits": seeded(4, 1)}):
        found = predictions_of(single)
        assert not found.are_logits
        assert found.values.shape == (4, 1)


@pytest.mark.parametrize("output", [(), {}, "text", None, SimpleNamespace(logits=None), [1, 2]])
def test_no_tensor(output: Any) -> None:
    with pytest.raises(
        SourceError, match=f"the model returns a {type(output).__name__} that holds no tensor of floats"
    ):
        predictions_of(output)
