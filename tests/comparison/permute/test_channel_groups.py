"""Which channels of a model are tied, and which may not move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from factorpack.comparison.permute import Group, Place, find_groups
from factorpack.errors import SourceError
from tests.comparison.permute.nets import BLOCKS, Residual, random_net
from tests.helpers import seeded

IMAGES = seeded(2, 3, 4, 4)


def reasons(net: nn.Module, example: Any = IMAGES) -> dict[tuple[str, int], str]:
    return {
        (place.tensor, place.dimension): group.frozen
        for group in find_groups(net.eval(), example)
        for place in group.places
    }


def test_a_residual_net_has_these_groups() -> None:
    norm = [Place(f"norm.{part}", 0) for part in ("weight", "bias", "running_mean", "running_var")]
    stream = [Place("stem.weight", 0), Place("stem.bias", 0), *norm, Place("inner.weight", 1)]
    stream += [Place("outer.weight", 0), Place("outer.bias", 0), Place("hidden.weight", 1, repeat=4)]
    inside = [Place("inner.weight", 0), Place("depthwise.weight", 0), Place("depthwise.bias", 0)]
    hidden = [Place("hidden.weight", 0), Place("hidden.bias", 0), Place("head.weight", 1)]
    expected = {
        (8, frozenset(stream), ""),
        (12, frozenset([*inside, Place("outer.weight", 1)]), ""),
        (10, frozenset(hidden), ""),
        (3, frozenset([Place("stem.weight", 1)]), "the model's input"),
        (5, frozenset([Place("head.weight", 0), Place("head.bias", 0)]), "the model's output"),
    }
    found = find_groups(Residual().eval(), IMAGES)
    assert {(group.size, frozenset(group.places), group.frozen) for group in found} == expected


@pytest.mark.parametrize(
    "name", ["plain", "residual", "norm", "one group norm", "depthwise", "gate", "tokens"]
)
def test_these_leave_the_stem_free(name: str) -> None:
    assert reasons(random_net([name]).float())["0.weight", 0] == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("group norm", "a norm of 2 groups"),
        ("grouped", "a convolution of 2 groups"),
        ("concatenated", "a concatenation"),
        ("woven", "a reshape splits the channels"),
    ],
)
def test_these_freeze_it_and_say_why(name: str, reason: str) -> None:
    assert reasons(random_net([name]).float())["0.weight", 0] == reason


def test_channels_that_are_sliced_are_frozen() -> None:
    found = reasons(random_net(["halved"]).float())
    assert found["0.weight", 0] == ""
    assert found["1.0.weight", 0] == "a slice takes some of them"


def test_a_multiplied_depthwise_convolution_has_runs_of_channels() -> None:
    groups = find_groups(random_net(["multiplied"]).float(), IMAGES)
    places = {place for group in groups for place in group.places}
    assert {Place("1.0.weight", 0, 2), Place("1.0.bias", 0, 2), Place("1.1.weight", 1, 2)} <= places


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class Normed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = x.norm(dim=1, keepdim=True)
        return x / size


def perceptron(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Linear(8, 4))


def test_an_operation_without_a_rule_freezes_what_reaches_it() -> None:
    found = reasons(perceptron(Unknown()), seeded(2, 6))
    assert found["0.weight", 0].startswith("no rule for the operation cumsum")
    assert found["2.weight", 1].startswith("no rule for the operation cumsum")
    assert reasons(perceptron(Normed()), seeded(2, 6))["0.weight", 0] != ""


class Constants(nn.Module):
    """Numbers a channel that no state dict has: one under a name, one without."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        if named:
            self.register_buffer("scale", seeded(8), persistent=False)
        else:
            self.scale = seeded(8)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.last(self.first(x) * self.scale)
        return answer


@pytest.mark.parametrize("named", [True, False])
def test_numbers_that_are_not_in_the_state_dict_stay_where_they_are(named: bool) -> None:
    assert reasons(Constants(named), seeded(2, 6))["first.weight", 0] != ""


def test_a_weight_used_twice_is_permuted_once() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4))
    net[3].weight = net[1].weight
    free = [group for group in find_groups(net, seeded(2, 6)) if not group.frozen]
    (group,) = free
    assert [place for place in group.places if place.tensor in ("1.weight", "3.weight")] == [
        Place("1.weight", 0),
        Place("1.weight", 1),
    ]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.words(ids)) * mask[:, :, None]
        return {"logits": self.head(x[:, 0])}


def test_named_inputs_and_answers_in_a_dictionary() -> None:
    example = {"ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "mask": torch.ones(2, 3)}
    found = find_groups(Words(), example)
    free = [group for group in found if not group.frozen]
    norm = (Place("norm.weight", 0), Place("norm.bias", 0))
    assert free == [Group(8, (Place("words.weight", 1), *norm, Place("head.weight", 1)))]


def test_the_model_keeps_its_mode() -> None:
    net = perceptron(nn.Dropout())
    net[1].eval()
    find_groups(net, seeded(2, 6))
    assert net.training
    assert not net[1].training


class Undecided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_model_that_cannot_be_traced_is_refused() -> None:
    with pytest.raises(SourceError, match="the model cannot be traced"):
        find_groups(perceptron(Undecided()), seeded(2, 6))


def test_every_block_of_the_random_nets_is_traced() -> None:
    assert all(find_groups(random_net([name]).float(), IMAGES) for name in BLOCKS)
