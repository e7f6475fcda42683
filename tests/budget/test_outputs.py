"""Answers of every form a model may give them in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from factorpack.budget.outputs import answer_of
from factorpack.errors import SourceError
from tests.helpers import seeded

MATRIX = seeded(2, 3)
TEXTS = seeded(2, 3, 5)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
REAL = torch.stack([TEXTS[0, 0], TEXTS[0, 1], TEXTS[1, 0]])


@pytest.mark.parametrize("output", [MATRIX, SimpleNamespace(logits=MATRIX), {"loss": None, "logits": MATRIX}])
def test_a_matrix_and_anything_called_so_are_logits(output: Any) -> None:
    answer = answer_of(output)
    assert answer.logits
    assert torch.equal(answer.values, MATRIX)


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
def test_the_tensor_that_an_answer_is_about(output: Any) -> None:
    answer = answer_of(output)
    assert not answer.logits
    assert torch.equal(answer.values, MATRIX)


@pytest.mark.parametrize(("name", "logits"), [("logits", True), ("last_hidden_state", False)])
def test_every_token_is_an_answer_and_padding_is_none(name: str, logits: bool) -> None:
    whole, real = answer_of({name: TEXTS}), answer_of({name: TEXTS}, {"attention_mask": MASK})
    assert whole.logits == real.logits == logits
    assert torch.equal(whole.values, TEXTS.flatten(0, 1))
    assert torch.equal(real.values, REAL)


def test_a_picture_is_one_answer_and_a_single_number_no_choice() -> None:
    assert answer_of(seeded(2, 3, 4, 5)).values.shape == (2, 60)
    for single in (seeded(4, 1), seeded(4), {"logits": seeded(4, 1)}):
        answer = answer_of(single)
        assert not answer.logits
        assert answer.values.shape == (4, 1)


@pytest.mark.parametrize("output", [(), {}, "text", None, SimpleNamespace(logits=None), [1, 2]])
def test_no_tensor(output: Any) -> None:
    with pytest.raises(SourceError, match=f"answers with a {type(output).__name__}, in which there is no"):
        answer_of(output)
