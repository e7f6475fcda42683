"""Ways to code a weight: their basis, their curve, and sizes that are those of the file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from factorpack.budget import candidates
from factorpack.budget.candidates import (
    Try,
    choose_methods,
    curves_of,
    measure_steps,
    middle_step,
    step_at_unit_slope,
)
from factorpack.budget.coding import encode_with_step
from factorpack.budget.curves import Curve
from factorpack.budget.planner import Planner
from factorpack.decoding import decode
from factorpack.format.container import Reader
from factorpack.format.streams import coded_bytes
from factorpack.methods import SecondOrder
from factorpack.record import Encoded, LayerMoments
from factorpack.solve.code_length import HIGH_RATE
from factorpack.solve.layer_problem import DAMPING
from factorpack.solve.moments import MomentAccumulator
from factorpack.weight import Weight
from tests.helpers import relative_error, seeded, write_packed


def moments_of(layer: nn.Module, inputs: Tensor) -> LayerMoments:
    running = MomentAccumulator(layer, 1 << 30)
    running.add(inputs)
    return running.result()


def smooth_kernels(out: int, inside: int, seed: int = 0) -> Tensor:
    """3x3 kernels that are sums of few patterns, as trained ones are."""
    patterns = seeded(2, 3, 3, seed=seed)
    return torch.einsum("oip,phw->oihw", seeded(out, inside, 2, seed=seed + 1), patterns) + 0.02 * seeded(
        out, inside, 3, 3, seed=seed + 2
    )


PLAIN = SecondOrder(step=1.0, try_plain=False)
"""No basis and no trellis; its step means nothing here."""


def planner(basis: bool = True, trellis: int = 0) -> Planner:
    return Planner(price=HIGH_RATE, damping=DAMPING, basis=basis, trellis=trellis)


def choose_method(weight: Weight, planner: Planner, bits: float) -> SecondOrder:
    return choose_methods([weight], planner, bits)[0]


def curve_of(weight: Weight, method: SecondOrder, bits: float) -> Curve:
    return curves_of([weight], [method], bits)[0]


def measured(weight: Weight, method: SecondOrder, steps: list[float]) -> list[tuple[float, float]]:
    return measure_steps([Try(weight, method, steps)])[0]


def encode_steps(weight: Weight, method: SecondOrder, steps: list[float]) -> list[tuple[Encoded, float]]:
    coded = [encode_with_step(weight, method, step).encoded for step in steps]
    return [
        (encoded, loss) for encoded, (_, loss) in zip(coded, measured(weight, method, steps), strict=True)
    ]


def matrix(rows: int = 64, size: int = 48, sensitivity: float | None = None, seed: int = 2) -> Weight:
    layer = nn.Linear(size, rows)
    inputs = seeded(600, size) @ seeded(size, size, seed=1) / size**0.5
    moments = moments_of(layer, inputs) if sensitivity is not None else None
    return Weight(seeded(rows, size, seed=seed), 0, moments, sensitivity)


@pytest.mark.parametrize("sensitivity", [None, 2.0])
@pytest.mark.parametrize("tile", [1, 9])
@pytest.mark.parametrize("trellis", [0, 8])
def test_bytes_are_those_of_the_file(
    trellis: int, tile: int, sensitivity: float | None, tmp_path: Path
) -> None:
    layer = nn.Conv2d(32, 48, 3)
    moments = moments_of(layer, seeded(4, 32, 9, 9)) if sensitivity is not None else None
    weight = Weight(smooth_kernels(48, 32), 0, moments, sensitivity)
    method = replace(PLAIN, tile=tile, trellis=trellis)
    for step in (0.05, 0.3, 1.0):
        coded = encode_with_step(weight, method, step)
        encoded = coded.encoded
        assert len(encoded.parts["codebook"]) == tile if tile > 1 else encoded.kind == "scalar"
        assert encoded.trellis == trellis
        path = tmp_path / "one.packed.safetensors"
        write_packed(path, {"w": encoded})
        stored = sum(part.stored_bytes for part in Reader(path).rows["w"].parts.values())
        assert abs(coded.bytes - stored) <= 32 * len(encoded.bits) + 0.04 * stored


def test_without_data_the_loss_is_the_relative_error_of_the_weight() -> None:
    weight = matrix()
    for encoded, loss in encode_steps(weight, PLAIN, [0.1, 0.5, 2.0]):
        assert loss == pytest.approx(relative_error(decode(encoded), weight.values) ** 2, rel=1e-3)


def test_with_data_the_loss_is_half_the_sensitivity_times_the_outputs_error() -> None:
    layer, inputs = nn.Linear(24, 40), seeded(800, 24) @ seeded(24, 24, seed=1) / 5
    weight = seeded(40, 24, seed=2)
    known = Weight(weight, 0, moments_of(layer, inputs), 3.0)
    for encoded, loss in encode_steps(known, replace(PLAIN, damping=1e-6), [0.1, 0.5]):
        wrong = inputs.double() @ (decode(encoded) - weight).double().T
        assert loss == pytest.approx(3.0 / 2 * float(wrong.square().sum(1).mean()), rel=1e-2)


@pytest.mark.parametrize("sensitivity", [None, 1.0])
def test_weights_of_one_shape_are_measured_together(
    monkeypatch: pytest.MonkeyPatch, sensitivity: float | None
) -> None:
    weights = [matrix(sensitivity=sensitivity, seed=seed) for seed in range(3)]
    tries = [Try(each, PLAIN, [0.1 * (place + 1), 0.8]) for place, each in enumerate(weights)]
    tries += [Try(matrix(rows=50, sensitivity=sensitivity), PLAIN, [0.3, 0.6])]
    tries += [Try(weights[0], replace(PLAIN, trellis=8), [0.3, 0.6])]
    together = np.array(measure_steps(tries))
    for found, each in zip(together, tries, strict=True):
        assert found == pytest.approx(np.array(measure_steps([each])[0]), rel=1e-5)
    monkeypatch.setattr(candidates, "VALUES_AT_ONCE", 4 * weights[0].numel)  # two at a time
    assert np.array(measure_steps(tries)) == pytest.approx(together, rel=1e-5)


@pytest.mark.parametrize("sensitivity", [None, 1.0])
def test_plans_are_made_on_all_rows_of_a_small_weight_and_some_of_a_large_one(
    monkeypatch: pytest.MonkeyPatch, sensitivity: float | None
) -> None:
    weight, steps = matrix(rows=900, sensitivity=sensitivity), [0.2, 1.0]
    whole = np.array(measured(weight, PLAIN, steps))
    assert list(whole[:, 0]) == pytest.approx(
        [encode_with_step(weight, PLAIN, step).bytes for step in steps], rel=1e-3
    )
    monkeypatch.setattr(candidates, "PLANNED_VALUES", 48 * 100)
    some = np.array(measured(weight, PLAIN, steps))
    assert some == pytest.approx(whole, rel=0.03)
    assert not np.array_equal(some[:, 1], whole[:, 1])


@pytest.mark.parametrize("sensitivity", [None, 0.7])
def test_a_curve_falls_in_bytes_and_rises_in_loss(sensitivity: float | None) -> None:
    weight = matrix(sensitivity=sensitivity)
    found = curve_of(weight, PLAIN, 3.0)
    assert list(found.steps) == sorted(found.steps)
    assert len(found.steps) == 8
    assert not decode(encode_steps(weight, PLAIN, [found.steps[-1]])[0][0]).any()
    assert list(found.bytes) == sorted(found.bytes, reverse=True)
    assert list(found.losses) == sorted(found.losses)
    assert found.numel == 64 * 48


@pytest.mark.parametrize("bits", [2.0, 4.0, 6.0])
def test_the_middle_step_takes_about_the_bits_it_is_for(bits: float) -> None:
    """A Gaussian takes log2 sqrt(2 pi e) bits at a step of its standard deviation, one more per halving."""
    weight, method = Weight(seeded(300, 100)), replace(PLAIN, price=0.0)
    step = middle_step(weight, method, bits)
    assert math.log2(step) == pytest.approx(math.log2(math.sqrt(2 * math.pi * math.e)) - bits, abs=0.02)
    ((encoded, _),) = encode_steps(weight, method, [step])
    assert 8 * coded_bytes(encoded) / 30_000 == pytest.approx(bits, abs=0.2)


def test_steps_of_equal_slope_lose_equally_for_a_bit() -> None:
    """An octave is one bit per weight where steps are fine: what it loses is the same for loud and quiet inputs."""
    losses = []
    for gain, sensitivity in ((1.0, 0.1), (0.03, 20.0)):
        inputs = gain * seeded(900, 32) @ seeded(32, 32, seed=1) / 6
        moments = moments_of(nn.Linear(32, 64), inputs)
        weight, method = Weight(seeded(64, 32, seed=2), 0, moments, sensitivity), replace(PLAIN, price=0.0)
        unit = 0.02 * step_at_unit_slope(weight, method)
        (_, fine), (_, coarse) = encode_steps(weight, method, [unit, 2 * unit])
        losses.append(coarse - fine)
    # Half a sum over codes of step^2 / 12, at twice the step less at the step.
    assert losses == pytest.approx([64 * 32 * 3 * 0.02**2 / 24] * 2, rel=0.1)


def with_white_inputs(values: Tensor) -> Weight:
    size = values[0].numel()
    none = torch.zeros(1, size)
    return Weight(values, 0, LayerMoments(torch.eye(size)[None], none, None, none))


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("rows", [8, 256])
def test_without_data_a_bit_more_gains_as_much_in_any_weight(rows: int, scale: float) -> None:
    """Relative errors add up over layers: at equal slope the steps follow the root of the energy, not the RMS."""
    values = scale * seeded(rows, 64)
    weight = Weight(values)
    unit = step_at_unit_slope(weight, PLAIN)
    assert unit == pytest.approx(float(values.norm()), rel=1e-5)
    fine, coarse = (loss for _, loss in measure_steps([Try(weight, PLAIN, [0.001 * unit, 0.002 * unit])])[0])
    assert (coarse - fine) / values.numel() == pytest.approx(3 * 0.001**2 / 12, rel=0.1)


def test_words_count_more_than_layers() -> None:
    values = seeded(512, 16)
    plain, words = Weight(values), Weight(values, is_vocabulary=True)
    assert step_at_unit_slope(words, PLAIN) == pytest.approx(step_at_unit_slope(plain, PLAIN) / math.sqrt(30))
    losses = [measure_steps([Try(each, PLAIN, [0.1])])[0][0][1] for each in (plain, words)]
    assert losses[1] == pytest.approx(30 * losses[0])


def test_kernels_of_few_patterns_get_a_basis_and_noise_none() -> None:
    smooth, noise = smooth_kernels(64, 32), seeded(64, 32, 3, 3)
    assert choose_method(Weight(smooth), planner(), 3.0).tile == 9
    assert choose_method(with_white_inputs(noise), planner(), 3.0).tile == 1
    assert (
        choose_method(Weight(noise), planner(), 3.0).tile == 9
    )  # neighbouring inputs are expected to be alike
    assert choose_method(Weight(smooth), planner(basis=False), 3.0).tile == 1


@pytest.mark.parametrize("sensitivity", [None, 2.0])
def test_a_trellis_is_taken_where_it_pays(sensitivity: float | None) -> None:
    """Not for few weights, and not where there is next to nothing to code."""
    weight, few = seeded(128, 64), seeded(3, 4)
    known = [moments_of(nn.Linear(size, 1), seeded(500, size)) if sensitivity else None for size in (64, 4)]
    many = Weight(weight, 0, known[0], sensitivity)
    chosen = choose_method(many, planner(trellis=8), 3.0)
    assert chosen.trellis == curve_of(many, chosen, 3.0).trellis == 8
    assert choose_method(Weight(few, 0, known[1], sensitivity), planner(trellis=8), 3.0).trellis == 0
    assert choose_method(many, planner(), 3.0).trellis == 0


def test_one_channel_s_tiles_have_no_rows_to_run_down() -> None:
    chosen = choose_method(Weight(smooth_kernels(1, 512)), planner(trellis=8), 3.0)
    assert (chosen.tile, chosen.trellis) == (9, 0)


def test_the_finest_steps_of_a_path_fit_their_codes() -> None:
    ((encoded, loss),) = encode_steps(Weight(seeded(40, 12)), replace(PLAIN, trellis=8), [1e-9])
    assert encoded.bits["codes"] <= 16
    assert loss < 1e-7


def test_a_basis_is_taken_only_where_it_is_cheap_beside_the_codes() -> None:
    """16 x 16 bytes of C would be more than the whole weight."""
    assert choose_method(Weight(smooth_kernels(4, 2)), planner(), 3.0).tile == 1


def test_the_same_kernels_get_a_basis_only_where_they_are_many() -> None:
    """C takes a hundred bytes whatever it is for."""
    many = smooth_kernels(64, 64) + 0.8 * seeded(64, 64, 3, 3, seed=9)
    few = many[:12, :12].contiguous()
    assert choose_method(Weight(many), planner(), 3.0).tile == 9
    assert choose_method(Weight(few), planner(), 3.0).tile == 1


@pytest.mark.parametrize("tile", [1, 9])
def test_the_best_basis_has_the_least_bytes_at_the_loss_it_has(tile: int) -> None:
    """Against the other choice at the same loss, found by interpolation on its curve."""
    weight = with_white_inputs(smooth_kernels(64, 32) if tile == 9 else seeded(64, 32, 3, 3))
    chosen = choose_method(weight, planner(), 3.0)
    assert chosen.tile == tile
    other = replace(PLAIN, tile=10 - tile)
    best, rival = curve_of(weight, chosen, 3.0), curve_of(weight, other, 3.0)
    for loss, size in list(zip(best.losses, best.bytes, strict=True))[2:5]:
        octave = np.interp(loss, rival.losses, np.log2(rival.steps))
        assert size < rival.bytes_at(2.0**octave)


def test_transposed_convolutions_are_read_by_their_output_channels() -> None:
    weight = smooth_kernels(16, 32)
    ((encoded, _),) = encode_steps(Weight(weight, 2), replace(PLAIN, tile=9), [0.02])
    assert encoded.transposed_groups == 2
    assert relative_error(decode(encoded), weight) < 0.05


def test_a_weight_of_zeros_has_a_curve() -> None:
    for moments, sensitivity in ((None, None), (moments_of(nn.Linear(16, 8), seeded(50, 16)), 1.0)):
        weight = Weight(torch.zeros(8, 16), 0, moments, sensitivity)
        found = curve_of(weight, choose_method(weight, planner(), 3.0), 3.0)
        assert all(math.isfinite(loss) for loss in found.losses)
        assert set(found.losses) == {0.0}


def test_inputs_that_are_all_zero_have_a_curve() -> None:
    weight = Weight(seeded(8, 16), 0, moments_of(nn.Linear(16, 8), torch.zeros(50, 16)), 0.0)
    found = curve_of(weight, choose_method(weight, planner(), 3.0), 3.0)
    assert all(math.isfinite(loss) for loss in found.losses)
    assert math.isfinite(found.step_at_unit_slope)


@pytest.mark.parametrize("bits", [13.0, 16.0, 24.0])
def test_no_step_is_so_fine_that_codes_are_clipped(bits: float) -> None:
    """Codes have at most 16 bits: a budget for more must not make the weight worse."""
    weight = Weight(seeded(64, 48))
    method = choose_method(weight, planner(), bits)
    for encoded, loss in encode_steps(weight, method, list(curve_of(weight, method, bits).steps)):
        assert relative_error(decode(encoded), weight.values) ** 2 == pytest.approx(loss, rel=0.01, abs=1e-8)
