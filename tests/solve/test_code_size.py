"""Estimated sizes: against real streams, and against the entropy of a known source."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from factorpack.format.streams import encode_part
from factorpack.quantize.trellis import indices_of, segment_rows
from factorpack.solve import code_size
from factorpack.solve.code_size import estimate_bytes, path_quantizers
from factorpack.solve.trellis_search import fit_trellis
from tests.helpers import seeded


def uneven(rows: int, columns: int, size: float, seed: int = 0) -> Tensor:
    """Gaussian values whose rows and columns differ in scale, as those of trained weights do."""
    scales = torch.exp(0.6 * seeded(rows, 1, seed=seed + 1)) * torch.exp(
        0.4 * seeded(1, columns, seed=seed + 2)
    )
    return size * scales * seeded(rows, columns, seed=seed)


def stream_bytes(codes: Tensor, states: int = 0) -> int:
    bits = int(codes.abs().max()).bit_length() + 1
    whole = codes.to(torch.int16 if bits > 8 else torch.int8)
    return len(encode_part(whole, max(bits, 2), states=states)[1])


@pytest.mark.parametrize("size", [0.2, 1.0, 4.0, 60.0])
@pytest.mark.parametrize(("shape", "within"), [((512, 700), 0.01), ((64, 576), 0.03), ((128, 100), 0.06)])
def test_an_estimate_is_close_to_the_stream(shape: tuple[int, int], within: float, size: float) -> None:
    codes = uneven(*shape, size).round()
    (estimate,) = estimate_bytes(codes[None]).tolist()
    assert estimate == pytest.approx(stream_bytes(codes), rel=within, abs=24)


@pytest.mark.parametrize("states", [4, 8])
@pytest.mark.parametrize("size", [0.5, 6.0])
def test_paths_through_a_trellis_are_estimated_by_their_indices(size: float, states: int) -> None:
    values = uneven(160, 300, size)[None]
    levels = fit_trellis(values, 0.1, states).round_all(values)
    (estimate,) = estimate_bytes(levels, states).tolist()
    assert estimate == pytest.approx(stream_bytes(levels[0], states), rel=0.05, abs=40)


@pytest.mark.parametrize("rows", [40, 128, 300])
def test_quantizers_of_paths_are_those_the_format_finds(rows: int) -> None:
    values = uneven(rows, 50, 2.0)[None]
    levels = fit_trellis(values, 0.1, 8).round_all(values)
    _, expected = indices_of(levels[0].numpy().astype(np.int32), 8, segment_rows(rows))
    assert np.array_equal(path_quantizers(levels, 8)[0].numpy(), expected)


def test_codes_of_a_known_source_take_its_entropy() -> None:
    probabilities = torch.tensor([0.05, 0.2, 0.5, 0.2, 0.05])
    drawn = torch.multinomial(probabilities, 600 * 500, True, generator=torch.Generator().manual_seed(0))
    codes = (drawn - 2).float().reshape(1, 600, 500)
    entropy = float(-(probabilities * probabilities.log2()).sum())
    assert 8 * estimate_bytes(codes).item() / codes.numel() == pytest.approx(entropy, rel=2e-3)


def test_several_matrices_at_once_are_estimated_one_by_one() -> None:
    codes = torch.stack([uneven(90, 70, size).round() for size in (0.3, 2.0, 50.0)])
    alone = [estimate_bytes(each[None]).item() for each in codes]
    assert estimate_bytes(codes).tolist() == pytest.approx(alone, rel=1e-9)


def test_a_sample_of_rows_or_columns_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = uneven(600, 800, 1.5).round()[None]
    whole = estimate_bytes(codes).item()
    some = torch.arange(0, 600, 3)
    assert estimate_bytes(codes[:, some], rows=600).item() == pytest.approx(whole, rel=0.03)
    monkeypatch.setattr(code_size, "SAMPLED", 600 * 200)
    assert estimate_bytes(codes).item() == pytest.approx(whole, rel=0.03)


def test_zeros_take_next_to_nothing() -> None:
    assert estimate_bytes(torch.zeros(1, 400, 500)).item() < 32
    assert math.isfinite(estimate_bytes(torch.full((1, 2, 2), 30000.0)).item())
