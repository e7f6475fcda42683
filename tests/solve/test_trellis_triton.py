"""The GPU's kernel for paths in a block of columns against the plain one: on a GPU, or with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from factorpack.solve.feedback import feedback_factor, round_with_feedback
from factorpack.solve.trellis_search import fit_trellis
from tests.helpers import seeded
from tests.runtime.triton_interpreter import complete

pytest.importorskip("triton", reason="the kernel needs triton, which comes with CUDA builds of torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)


@pytest.mark.parametrize("states", [4, 8])
@pytest.mark.parametrize(("batch", "rows", "columns"), [(1, 16, 7), (2, 20, 3), (1, 131, 5), (1, 128, 2)])
def test_all_paths_at_once_are_those_of_the_plain_search(
    batch: int, rows: int, columns: int, states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from factorpack.solve import trellis_triton

    if DEVICE == "cpu":
        complete(monkeypatch)
    monkeypatch.setattr(trellis_triton, "PROGRAMS", 4 * batch)  # a program has several columns
    values = 3.0 * seeded(batch, rows, columns) * torch.where(torch.arange(columns) % 3 == 1, 0.1, 1.0)
    lengths = fit_trellis(values, 0.1155, states)
    assert lengths.quiet.any()
    levels, quantizers = lengths.paths(values)
    moved = replace(
        lengths,
        **{
            name: getattr(lengths, name).to(DEVICE)
            for name in ("table", "row_class", "column_class", "quiet")
        },
    )
    found = trellis_triton.follow_paths(values.to(DEVICE), moved)
    assert torch.equal(found[0].cpu(), levels)
    assert torch.equal(found[1].cpu(), quantizers)


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
