"""The facts of a report: they sum to the file, and errors are those of float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import factorpack as fp
from factorpack import size
from factorpack.budget.curves import Curve
from factorpack.budget.norms import small_leftovers
from factorpack.comparison.grid import weight_error
from factorpack.decoding import decode
from factorpack.kinds import KINDS
from factorpack.report.differences import BIN_WIDTH, BINS, error_histogram
from factorpack.report.facts import ITEMS, Facts, gather
from factorpack.report.name_groups import groups_of
from tests.helpers import seeded, write_packed

STATE = {
    "conv1.weight": seeded(8, 3, 3, 3),
    "body.0.weight": seeded(64, 32, 3, 3, seed=1),
    "body.0.bias": seeded(64, seed=2),
    "fc.weight": seeded(10, 64, seed=3),
    "steps": torch.tensor(7),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> fp.Packed:
    path = tmp_path_factory.mktemp("facts") / "net.packed.safetensors"
    fp.save(fp.compress(STATE, fp.QSPCA(16, 3, tile=64)), path)
    return fp.load(path)


@pytest.fixture(scope="module")
def facts(packed: fp.Packed) -> Facts:
    return gather(packed, STATE)


def test_every_kind_and_stream_has_words() -> None:
    assert all(kind.title for kind in KINDS.values())
    assert {item for kind in KINDS.values() for item in kind.items.values()} <= set(ITEMS)
    assert set(ITEMS) == set(size.ITEMS)


def test_lines_sum_to_the_file(packed: fp.Packed, facts: Facts) -> None:
    assert packed.path is not None
    assert facts.file == "net.packed.safetensors"
    assert facts.file_bytes == packed.path.stat().st_size == sum(tensor.bytes for tensor in facts.tensors)
    assert all(sum(tensor.stored_bytes.values()) == tensor.bytes for tensor in facts.tensors)
    assert facts.numbers == sum(tensor.numel() for tensor in STATE.values())
    assert facts.bits == 8 * facts.file_bytes / facts.numbers


def test_zeros_and_bits_of_a_tensor(packed: fp.Packed, facts: Facts) -> None:
    body = next(tensor for tensor in facts.tensors if tensor.name == "body.0.weight")
    latent = packed["body.0.weight"].parts["latent"]
    assert body.zeros == float((latent == 0).double().mean())
    assert f"{body.zeros:.0%} zeros" in body.words
    assert body.bits == 8 * (body.bytes - body.stored_bytes["header"]) / (64 * 32 * 9)
    assert all(tensor.zeros is None for tensor in facts.tensors if tensor.kind == "keep")


def test_errors_are_those_of_float64(packed: fp.Packed, facts: Facts) -> None:
    for tensor in facts.tensors:
        original = STATE[tensor.name].double()
        difference = decode(packed[tensor.name]).double() - original
        assert tensor.error == pytest.approx(float(difference.norm() / original.norm()))
        assert tensor.largest_error == pytest.approx(float(difference.abs().max()))
        if tensor.kind != "keep":
            assert sum(tensor.histogram) == original.numel()


def test_the_error_of_all_weights_is_the_comparisons(packed: fp.Packed, facts: Facts) -> None:
    kept = {
        "conv1.weight"
    }  # a weight, and kept without error: in the comparison's energy, not in the report's
    coded = {name: tensor for name, tensor in STATE.items() if name not in kept}
    assert facts.error == pytest.approx(math.sqrt(weight_error(coded, packed)))


def test_without_an_original_there_are_no_errors(packed: fp.Packed) -> None:
    facts = gather(packed)
    assert facts.error is None
    assert all(tensor.error is None and tensor.histogram == () for tensor in facts.tensors)


def test_what_does_not_fit_the_original_is_a_problem_and_no_number(packed: fp.Packed) -> None:
    facts = gather(packed, {**STATE, "fc.weight": seeded(10, 63)})
    fc = next(tensor for tensor in facts.tensors if tensor.name == "fc.weight")
    assert fc.error is None
    assert "the original" in fc.problem


def test_a_folded_norm_is_no_problem_and_a_tensor_that_says_so_is(tmp_path: Path) -> None:
    """A note is for people: whether a norm is folded is read off its tensors."""
    net = nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm2d(8)).eval()
    for norm, deviation in zip(net, (0.01, 1.0), strict=True):
        norm.bias.data.copy_(seeded(8, seed=1))
        norm.running_mean.copy_(seeded(8))
        norm.running_var.fill_(deviation**2)
    folded = small_leftovers(fp.compress(net, fp.Keep(), progress=False), net)
    other = fp.compress({"fc.bias": -3 * seeded(8)}, fp.Keep(), progress=False)["fc.bias"]
    original = {**net.state_dict(), "fc.bias": seeded(8)}
    write_packed(tmp_path / "folded.safetensors", folded | {"fc.bias": other.noted("folded batch norm")})
    facts = {each.name: each for each in gather(fp.load(tmp_path / "folded.safetensors"), original).tensors}
    assert facts["0.weight"].error == pytest.approx(1 / math.sqrt(0.01**2 + 1e-5) - 1, rel=1e-3)
    assert {name for name, each in facts.items() if each.problem} == {"fc.bias"}


def test_a_report_needs_a_file() -> None:
    with pytest.raises(fp.PlanError, match="save"):
        gather(fp.compress(STATE, fp.Scalar(4)))


class TestHistogram:
    def test_bins_are_a_twentieth_of_the_deviation_around_zero(self) -> None:
        original = torch.tensor([-2.0, 2.0, -2.0, 2.0])  # a deviation of 2: bins of 0.1
        counts = error_histogram(original, torch.tensor([0.0, 0.04, -0.06, 0.16]))
        assert (len(counts), sum(counts)) == (BINS, 4)
        middle = BINS // 2
        assert {place - middle: count for place, count in enumerate(counts) if count} == {-1: 1, 0: 2, 2: 1}

    def test_what_lies_beyond_is_in_the_outermost(self) -> None:
        counts = error_histogram(torch.tensor([-1.0, 1.0]), torch.tensor([-9.0, 9.0]))
        assert counts[0] == counts[-1] == 1

    def test_a_gaussian_error_has_its_shape(self) -> None:
        original, error = seeded(200_000), 0.3 * seeded(200_000, seed=5)
        counts = error_histogram(original, error)
        middle = math.erf(BIN_WIDTH / 2 / (0.3 * math.sqrt(2)))
        expected, deviation = 200_000 * middle, math.sqrt(200_000 * middle)
        assert abs(counts[BINS // 2] - expected) < 5 * deviation

    @pytest.mark.parametrize(
        ("original", "difference"),
        [
            (torch.ones(3), torch.ones(3)),
            (torch.zeros(0), torch.zeros(0)),
            (torch.tensor([1.0, math.inf]), torch.zeros(2)),
            (torch.tensor([1.0, 2.0]), torch.tensor([0.0, math.nan])),
        ],
        ids=["no spread", "empty", "infinite", "not a number"],
    )
    def test_none_where_errors_have_no_unit(self, original: torch.Tensor, difference: torch.Tensor) -> None:
        assert error_histogram(original, difference) == ()


class TestGroups:
    def test_a_part_with_most_of_the_bytes_is_told_apart(self) -> None:
        sizes = {f"model.layers.{place}.w": 10 for place in range(9)} | {"model.embed.w": 20, "head.w": 5}
        found = groups_of(sizes)
        assert found["model.layers.3.w"] == "model.layers.3"
        assert (found["model.embed.w"], found["head.w"]) == ("model.embed", "head")

    @pytest.mark.parametrize("name", ["weight", "", ".", "a..b", "a." * 5000 + "w", ".w"])
    def test_any_name_has_a_group(self, name: str) -> None:
        assert set(groups_of({name: 1})) == {name}

    def test_nothing_has_none(self) -> None:
        assert groups_of({}) == {}
        assert groups_of({"a.b": 0}) == {"a.b": "a"}


class TestCurves:
    CURVE = Curve([1, 2, 3], [2304, 1152, 0], [1e-4, 1e-2, 1.0], 64 * 32 * 9, 9, 1.0)

    def test_in_bits_a_number_from_the_smallest(self, packed: fp.Packed) -> None:
        (curve,) = gather(packed, curves={"body.0.weight": self.CURVE, "gone": self.CURVE}).curves
        assert curve.bits == (0.0, 0.5, 1.0)
        assert curve.losses == (1.0, 1e-2, 1e-4)

    def test_the_file_lies_on_the_curve_straight_in_the_logarithm(self, packed: fp.Packed) -> None:
        body = next(tensor for tensor in gather(packed).tensors if tensor.name == "body.0.weight")
        ends = Curve([1, 2], [18432, 0], [1e-4, 1.0], 18432, 9, 1.0)  # 8 bits and none
        (curve,) = gather(packed, curves={"body.0.weight": ends}).curves
        assert curve.here == body.bits
        assert curve.loss_here == pytest.approx(10 ** (-4 * body.bits / 8))

    def test_of_another_model(self, packed: fp.Packed) -> None:
        with pytest.raises(fp.PlanError, match="another model"):
            gather(packed, curves={"gone": self.CURVE})

    @pytest.mark.parametrize(
        "curve",
        [
            Curve([1], [1, 2], [0.5], 9, 9, 1.0),
            Curve([], [], [], 9, 9, 1.0),
            Curve([1], [1], [0.5], 0, 9, 1.0),
            Curve([1], [1], [math.nan], 9, 9, 1.0),
            Curve([1], ["1"], [0.5], 9, 9, 1.0),  # type: ignore[list-item]
        ],
    )
    def test_that_is_none(self, packed: fp.Packed, curve: Curve) -> None:
        with pytest.raises(fp.PlanError, match="expected the same count of finite numbers"):
            gather(packed, curves={"body.0.weight": curve})


def test_a_path_is_not_told(packed: fp.Packed, facts: Facts) -> None:
    assert packed.path is not None
    assert str(Path(packed.path).parent) not in repr(facts)


def test_grouping_adds_bytes_up_once_per_word() -> None:
    class Counted(int):
        added = 0

        def __add__(self, other: int) -> Counted:
            Counted.added += 1
            return Counted(int(self) + int(other))

        __radd__ = __add__

    groups_of({f"layer{number}.weight": Counted(1) for number in range(300)})
    assert Counted.added < 20 * 300
