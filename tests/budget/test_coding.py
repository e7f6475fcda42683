"""Weights coded together are those coded one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.budget import coding, sequential
from factorpack.budget.coding import Aim, encode_with_step, encode_with_steps, meet_together
from factorpack.methods import SecondOrder
from factorpack.record import Encoded
from factorpack.solve.moments import MomentAccumulator
from factorpack.weight import Weight
from tests.helpers import seeded

PLAIN = SecondOrder(step=1.0, try_plain=False)


@pytest.fixture
def _together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(coding, "ALONE", frozenset())


def weight(seed: int, rows: int = 24, size: int = 32, scale: float = 1.0) -> Weight:
    running = MomentAccumulator(nn.Linear(size, rows), 1 << 30)
    running.add(scale * seeded(200, size, seed=seed) @ seeded(size, size, seed=seed + 1))
    return Weight(seeded(rows, size, seed=seed + 2), 0, running.result(), 1.0)


def weights() -> list[Weight]:
    """Four of one shape, one of them with inputs a thousand times smaller, and one of another."""
    return [weight(0), weight(3), weight(6, scale=1e-3), weight(9), weight(12, rows=20)]


METHODS = [PLAIN, replace(PLAIN, tile=16), PLAIN, replace(PLAIN, tile=16), PLAIN]
STEPS = [0.1, 0.2, 0.4, 1e-9, 0.3]
"""The fourth is finer than codes of 16 bits allow."""


def same(found: Encoded, wanted: Encoded) -> bool:
    return found.bits == wanted.bits and all(
        torch.equal(part, wanted.parts[name]) and part.dtype == wanted.parts[name].dtype
        for name, part in found.parts.items()
    )


def count_roundings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each rounding of several has."""
    counts: list[int] = []
    of_several = coding.encode_each_at

    def counted(*given: Sequence[Weight]) -> list[Encoded]:
        counts.append(len(given[0]))
        return of_several(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(coding, "encode_each_at", counted)
    return counts


def test_weights_of_one_shape_and_method_have_the_codes_they_have_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    each_alone = zip(weights(), METHODS, STEPS, strict=True)
    alone = [encode_with_steps([each], [by], [at])[0] for each, by, at in each_alone]
    counts = count_roundings(monkeypatch)
    monkeypatch.setattr(coding, "ALONE", frozenset())
    together = encode_with_steps(weights(), METHODS, STEPS)
    assert counts == [2, 2]
    assert all(map(same, together, alone))
    assert [each.parts["latent"].dtype for each in together if each.kind == "factors"] == [
        torch.int8,
        torch.int16,
    ]


def test_paths_found_together_are_those_found_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    by = replace(PLAIN, trellis=4)
    given = [weight(0, rows=40), weight(3, rows=40), weight(6, rows=40)]
    steps = [0.2, 0.3, 0.2]
    alone = [encode_with_steps([each], [by], [step])[0] for each, step in zip(given, steps, strict=True)]
    counts = count_roundings(monkeypatch)
    monkeypatch.setattr(coding, "ALONE", frozenset())
    found = encode_with_steps(given, [by, by, by], steps)
    assert counts == [3]
    assert [each.trellis for each in found] == [4, 4, 4]
    assert all(map(same, found, alone))


@pytest.mark.usefixtures("_together")
@pytest.mark.parametrize(("rows", "try_plain"), [(40, True), (8, False)], ids=["compared", "too few rows"])
def test_where_a_path_may_lose_or_is_not_there_weights_are_coded_alone(
    rows: int, try_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_roundings(monkeypatch)
    by = replace(PLAIN, trellis=4, try_plain=try_plain)
    found = encode_with_steps([weight(0, rows=rows), weight(3, rows=rows)], [by, by], [0.2, 0.2])
    assert counts == []
    assert {each.trellis for each in found} <= {0, 4}


def test_weights_meet_their_bytes_together_at_the_steps_they_do_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [weight(0, 64, 64), weight(3, 64, 64), weight(6, 48, 64)]
    planned = [encode_with_step(each, PLAIN, 1.0).bytes for each in given]
    aims = [
        Aim(each, PLAIN, size, share * size)
        for each, size, share in zip(given, planned, (0.5, 1.5, 1.0), strict=True)
    ]
    alone = [meet_together([aim], 0.02)[0] for aim in aims]
    counts = count_roundings(monkeypatch)
    monkeypatch.setattr(coding, "ALONE", frozenset())
    together = meet_together(aims, 0.02)
    assert counts[0] == 2
    assert [(each.step, each.bytes) for each in together] == [(each.step, each.bytes) for each in alone]
    for each, aim in zip(together, aims, strict=True):
        assert abs(each.bytes - aim.bytes) <= 0.02 * aim.bytes + 32


class Attention(nn.Module):
    """Three layers of one shape have the same input, and one has theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x))
        return found


def test_a_budget_met_together_is_the_one_met_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention() for _ in range(3)), nn.Linear(32, 10)).eval()
    inputs, met = [seeded(64, 32)], []
    of_several = sequential.meet_together
    monkeypatch.setattr(
        sequential, "meet_together", lambda aims, within: met.append(len(aims)) or of_several(aims, within)
    )

    def compress() -> fp.Packed:
        met.clear()
        return fp.compress(model, ratio=5, calibration=inputs, progress=False)

    alone = compress()
    assert set(met) == {1}
    monkeypatch.setattr(coding, "ALONE", frozenset())
    together = compress()
    assert met == [3, 1] * 3 + [1]
    for name, curve in alone.curves.items():
        found = together.curves[name]
        assert found.tile == curve.tile
        assert found.step_at_unit_slope == pytest.approx(curve.step_at_unit_slope, rel=1e-4)
        assert list(found.bytes) == pytest.approx(list(curve.bytes), rel=1e-3)
