"""The GPU's kernel for a block of columns against the plain one: on a GPU, or with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

from factorpack.solve.code_length import CodeLengths, fit_lengths
from factorpack.solve.feedback import BLOCK, Nearest, feedback_factor, round_with_feedback
from tests.helpers import seeded

pytest.importorskip("triton", reason="the kernel needs triton, which comes with CUDA builds of torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)


@pytest.mark.parametrize("shape", [(1, 5, 20), (2, 7, 40), (3, 1, 9), (2, 6, BLOCK), (1, 3, 1)])
@pytest.mark.parametrize("price", [0.0, 0.1155, 1.0])
def test_the_kernel_gives_the_codes_and_residues_of_the_plain_loop(
    shape: tuple[int, int, int], price: float
) -> None:
    from factorpack.solve.feedback_triton import round_block

    batch, _, size = shape
    inputs = seeded(batch, 300, size) @ seeded(size, size, seed=1)
    factor = feedback_factor((inputs.transpose(1, 2) @ inputs / 300).to(DEVICE))
    target = (3.0 * seeded(*shape, seed=2)).to(DEVICE)
    step = (0.3 + seeded(batch, 1, seed=3).abs()).to(DEVICE)
    lengths: CodeLengths = fit_lengths(target / step[:, :, None], price)

    def plain(column: int, values: torch.Tensor) -> torch.Tensor:  # not CodeLengths: takes the slow way
        return lengths(column, values)

    wanted, error = round_with_feedback(target, factor, step, plain)
    codes, given = round_block(target, factor, 0, step, lengths)
    assert torch.equal(codes, wanted)
    torch.testing.assert_close(given.square().sum(-1), error, rtol=1e-5, atol=1e-6)  # sums in another order


def test_codes_of_a_fixed_width_stay_within_their_limits() -> None:
    inputs = seeded(2, 300, 40) @ seeded(40, 40, seed=1)
    factor = feedback_factor((inputs.transpose(1, 2) @ inputs / 300).to(DEVICE))
    target = (3.0 * seeded(2, 7, 40, seed=2)).to(DEVICE)
    step = (0.3 + seeded(2, 7, seed=3).abs()).to(DEVICE)
    nearest = Nearest(-3, 2)

    def plain(column: int, values: torch.Tensor) -> torch.Tensor:
        return nearest(column, values)

    wanted, error = round_with_feedback(target, factor, step, plain)
    codes, found = round_with_feedback(target, factor, step, nearest)
    assert (codes.min(), codes.max()) == (-3, 2)
    assert torch.equal(codes, wanted)
    torch.testing.assert_close(found, error, rtol=1e-5, atol=1e-6)


def test_one_factor_serves_consecutive_elements_of_a_batch() -> None:
    inputs = seeded(2, 300, 40) @ seeded(40, 40, seed=1)
    factor = feedback_factor((inputs.transpose(1, 2) @ inputs / 300).to(DEVICE))
    target = (3.0 * seeded(6, 7, 40, seed=2)).to(DEVICE)
    step = (0.3 + seeded(6, 1, seed=3).abs()).to(DEVICE)
    lengths = fit_lengths(target / step[:, :, None], 0.1)

    def plain(column: int, values: torch.Tensor) -> torch.Tensor:
        return lengths(column, values)

    wanted, error = round_with_feedback(target, factor.repeat_interleave(3, 0), step, plain)
    codes, found = round_with_feedback(target, factor, step, lengths)
    assert torch.equal(codes, wanted)
    torch.testing.assert_close(found, error, rtol=1e-5, atol=1e-6)
