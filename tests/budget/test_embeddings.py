"""Embeddings: what their rows cost, in closed form, and tables inside whole models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.budget.embeddings import embedding_moments
from factorpack.budget.sensitivity import Information
from factorpack.decoding import decode
from tests.helpers import assert_close, seeded


def test_the_cost_of_an_error_in_every_row() -> None:
    """sum_r e_r^T G e_r / rows, and what a tied head's outputs change by on top of it."""
    root, inputs, errors = (seeded(*shape, seed=seed) for seed, shape in enumerate([(5, 5), (70, 5), (9, 5)]))
    metric, second = root @ root.T, inputs.T @ inputs / 70
    for tied in ([], [(second, 0.3)]):
        moments, level = embedding_moments(Information(0.0, metric), 9, tied)
        found = level * ((errors @ moments.second[0]) * errors).sum()
        expected = ((errors @ metric) * errors).sum() / 9
        if tied:
            expected = expected + 0.3 * (inputs @ errors.T).square().mean(0).sum()
        assert_close(found, expected)


def test_a_table_that_does_not_matter_has_a_metric_all_the_same() -> None:
    moments, level = embedding_moments(Information(0.0, torch.zeros(3, 3)), 4)
    assert level > 0
    assert moments.second.isfinite().all()


class Reader(nn.Module):
    """Words into a state, and a head that may be the table itself."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.body, self.head = (
            nn.Embedding(200, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 200, bias=False),
        )
        for index, parameter in enumerate(self.parameters()):
            parameter.data.copy_(seeded(*parameter.shape, seed=index) * 0.3)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:  # noqa: ARG002
        return {"logits": self.head(self.words(input_ids) + self.body(self.words(input_ids)).tanh())}


def tokens(seed: int = 0) -> Tensor:
    """Calibrated on the first half of the tokens alone."""
    return torch.randint(0, 100, (32, 8), generator=torch.Generator().manual_seed(seed))


def test_tables_are_planned_with_the_rest_and_unseen_rows_with_them() -> None:
    for tied in (True, False):
        model = Reader(tied).eval()
        batches = [{"input_ids": tokens(seed)} for seed in range(2)]
        packed = fp.compress(model, ratio=5, calibration=batches, progress=False)
        assert packed.aliases == ({"head.weight": "words.weight"} if tied else {})
        before, after = model.words.weight.detach(), decode(packed["words.weight"])
        lost = (after - before).square().sum(1) / before.square().sum(1)
        assert lost[100:].mean() < 1.5 * lost[:100].mean()
        assert lost.max() < 0.5


def test_feedback_on_the_metric_beats_the_rows_alone() -> None:
    """At one size, tables rounded by what their rows cost keep the answers closer than by their numbers."""
    model = Reader(tied=False).eval()
    with torch.no_grad():
        model.head.weight[:, 4:] = 0  # most of what is looked up is never asked for
        model.body.weight.zero_()
    batches = [{"input_ids": tokens(seed)} for seed in range(4)]
    lost = []
    for second_order in (True, False):
        planner = fp.Planner(second_order=second_order)
        packed = fp.compress(model, ratio=8, calibration=batches, planner=planner, progress=False)
        error = decode(packed["words.weight"]) - model.words.weight.detach()
        lost.append(float((error @ model.head.weight.detach().T).square().sum()))
    assert lost[0] < lost[1]
