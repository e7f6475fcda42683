"""Embeddings: what their rows cost, in closed form, and tables inside whole models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.budget import candidates
from factorpack.budget.embeddings import RARE, embedding_moments, word_information, word_weights
from factorpack.budget.sensitivity import Information, measure_information
from factorpack.calibration.calibrate import calibrate
from factorpack.decoding import decode
from factorpack.solve.layer_problem import LayerProblem
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


def test_what_rows_of_words_count() -> None:
    """Errors that each weight makes equal cost as much as is said, on texts with these words."""
    probabilities = seeded(500).abs().pow(3).double()
    weights, cost = word_weights(probabilities)
    errors = 1 / weights.double()
    share = probabilities / probabilities.mean()
    assert_close(torch.tensor(cost), (share * errors).sum() / 500)
    common, rare = probabilities.argmax(), probabilities.argmin()
    expected = ((1 - RARE) * share[common] + RARE) / ((1 - RARE) * share[rare] + RARE)
    assert_close((weights[common] / weights[rare]).square(), expected)


def test_the_information_of_words_is_what_a_change_of_their_rows_costs() -> None:
    """Of a tied table, both its uses; of another one, its own and its head's, in equal shares."""
    table, head, inputs = seeded(9).abs(), seeded(9, seed=1).abs(), seeded(5, 5)
    found, logits = Information(0.0, None, table), Information(0.0, None, head)
    assert_close(word_information(None, logits, None), head)
    assert_close(word_information(Information(), logits, inputs), head)
    assert_close(word_information(found, logits, inputs), table + head * inputs.diagonal().sum())
    assert_close(word_information(found, logits, None), table / table.sum() + head / head.sum())


def test_gradients_fall_on_the_rows_that_were_looked_up() -> None:
    """p (1 - p) at a head's logits; at a table, what each word's uses add."""
    model = Reader(tied=False).eval()
    batch = {"input_ids": tokens()}
    found = measure_information(model, calibrate(model, [batch], 32), ["words", "head"])
    likely = model(**batch)["logits"].detach().softmax(-1).flatten(0, 1)
    assert found["head"].rows is not None
    spread = (likely * (1 - likely)).mean(0)
    assert float(found["head"].rows.sum() / spread.sum()) == pytest.approx(1.0, rel=0.02)
    assert float(found["head"].rows.mean()) == pytest.approx(found["head"].level, rel=1e-5)
    rows, metric = found["words"].rows, found["words"].metric
    assert rows is not None
    assert metric is not None
    assert_close(rows.sum(), metric.diagonal().sum())
    assert (rows > 0).nonzero().flatten().tolist() == tokens().unique().tolist()


def test_words_that_are_all_as_likely_count_the_same() -> None:
    for channels in (torch.full((7,), 1e-9), torch.full((7,), 3.0)):
        weights, cost = word_weights(channels)
        assert_close(weights, torch.ones(7))
        assert_close(torch.tensor(cost), torch.tensor(1.0))
    assert word_weights(torch.zeros(7))[0].isfinite().all()  # logits that nothing depends on


def test_a_table_that_does_not_matter_has_a_metric_all_the_same() -> None:
    moments, level = embedding_moments(Information(0.0, torch.zeros(3, 3)), 4)
    assert level > 0
    assert moments.second.isfinite().all()


class Reader(nn.Module):
    """Words into a state, and a head that may be the table itself."""

    def __init__(self, tied: bool, width: int = 16, biased: bool = False) -> None:
        super().__init__()
        self.words, self.body, self.head = (
            nn.Embedding(200, width),
            nn.Linear(width, width),
            nn.Linear(width, 200, bias=biased),
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


@pytest.mark.parametrize("tied", [True, False])
def test_common_words_are_kept_better_than_rare_ones(tied: bool) -> None:
    """Half of the words are hardly ever predicted; that costs nothing and saves bytes for the others."""
    model = Reader(tied, 64, biased=True).eval()
    model.head.bias.data[100:] -= 8.0
    batches = [{"input_ids": tokens(seed)} for seed in range(2)]
    rare, lost = [], []
    for by_frequency in (True, False):
        planner = fp.Planner(word_frequencies=by_frequency)
        packed = fp.compress(model, ratio=8, calibration=batches, planner=planner, progress=False)
        head = packed[packed.aliases.get("head.weight", "head.weight")]
        error = (decode(head) - model.head.weight.detach()).square().mean(1)
        rare.append(float(error[100:].mean() / error[:100].mean()))
        assert head.parts["scale"].numel() == (200 if by_frequency else 1)
        other = packed.load_into(Reader(tied, 64, biased=True))
        with torch.inference_mode():
            before, after = (net(tokens(9))["logits"].log_softmax(-1) for net in (model, other))
        lost.append(float((before.exp() * (before - after)).sum(-1).mean()))
    assert rare[0] > 2 * rare[1]
    assert lost[0] < lost[1]


def test_bits_have_no_price_in_tables_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where steps are tried nor in what is coded; elsewhere they have the planner's."""
    prices: dict[int, set[float]] = {}
    alone, together = LayerProblem.round, candidates.round_many

    def round_alone(
        problem: LayerProblem, steps: Tensor, price: float, trellis: int
    ) -> tuple[Tensor, Tensor]:
        prices.setdefault(problem.latent.shape[1], set()).add(price)
        return alone(problem, steps, price, trellis)

    def round_many(
        problems: list[LayerProblem], steps: Tensor, price: float, trellis: int
    ) -> tuple[Tensor, Tensor]:
        prices.setdefault(problems[0].latent.shape[1], set()).add(price)
        return together(problems, steps, price, trellis)

    monkeypatch.setattr(LayerProblem, "round", round_alone)
    monkeypatch.setattr(candidates, "round_many", round_many)
    model = Reader(tied=True, width=64, biased=True).eval()
    model.head.bias.data[100:] -= 8.0  # words that are hardly ever predicted
    fp.compress(model, ratio=8, calibration=[{"input_ids": tokens()}], progress=False)
    assert prices == {200: {0.0}, 64: {fp.Planner().price}}
