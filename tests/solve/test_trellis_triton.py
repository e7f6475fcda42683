"""The GPU's kernel for paths in a block of columns against the plain one: on a GPU, or with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

from factorpack.solve.feedback import feedback_factor, round_with_feedback
from factorpack.solve.trellis_search import fit_trellis, path_by_rows
from tests.helpers import seeded
from tests.runtime.triton_interpreter import complete

pytest.importorskip("triton", reason="the kernel needs triton, which comes with CUDA builds of torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)


@pytest.mark.parametrize("states", [4, 8])
@pytest.mark.parametrize(("rows", "paths"), [(1, 1), (16, 70), (20, 3)])
def test_all_paths_at_once_are_those_of_the_search_row_by_row(
    states: int, rows: int, paths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from factorpack.solve.trellis_triton import find_paths

    if DEVICE == "cpu":
        complete(monkeypatch)
    costs = seeded(4, rows, paths).square().to(DEVICE)
    assert torch.equal(find_paths(costs, states), path_by_rows(costs, states))


@pytest.mark.parametrize(
    ("batch", "groups", "rows", "size"),
    [(1, 1, 20, 6), (2, 1, 9, 17), (1, 3, 7, 5), (1, 1, 131, 3), (1, 1, 128, 4)],
)
@pytest.mark.parametrize("states", [4, 8])
def test_the_kernel_gives_the_levels_and_residues_of_the_plain_loop(
    batch: int, groups: int, rows: int, size: int, states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from factorpack.solve.trellis_triton import round_block

    if DEVICE == "cpu":
        complete(monkeypatch)
    inputs = seeded(groups, 300, size) @ seeded(size, size, seed=1)
    factor = feedback_factor((inputs.transpose(1, 2) @ inputs / 300).to(DEVICE)).repeat(batch, 1, 1)
    loud = torch.where(torch.arange(size) % 3 == 0, 0.1, 1.0).to(DEVICE)
    target = 3.0 * seeded(batch * groups, rows, size, seed=2).to(DEVICE) * loud
    step = (0.3 + seeded(batch, 1, seed=3).abs()).to(DEVICE)
    unit = target.reshape(batch, groups * rows, size) / step[:, :, None]
    lengths = fit_trellis(unit, 0.1155, states)
    assert lengths.quiet.any()
    step = step.repeat_interleave(groups, 0)

    def plain(column: int, values: torch.Tensor) -> torch.Tensor:  # not TrellisLengths: takes the slow way
        return lengths(column, values)

    wanted, error = round_with_feedback(target, factor, step, plain)
    codes, given = round_block(target, factor, 0, step, lengths)
    assert torch.equal(codes, wanted)
    torch.testing.assert_close(given.square().sum(-1), error)
