"""What is read back from a GGUF file is the model that went in, and importance is that of each column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.language_peers import HEAD, TABLE, importance_of, read_llama, write_original
from benchmarks.studies.language import _frontier
from tests.hub.conftest import llama, transformers

__all__ = ["transformers"]


@pytest.fixture
def model(transformers: Any, tmp_path: Path) -> Any:
    found: Any = llama(transformers, tied=True)
    found.save_pretrained(tmp_path / "llama")
    return found


def test_a_file_of_the_original_is_read_back_exactly(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="GGUF files are written by the gguf extra")
    write_original(tmp_path / "llama", tmp_path / "f32.gguf")
    state, types = read_llama(tmp_path / "llama", tmp_path / "f32.gguf")
    expected = model.state_dict()
    assert set(state) == set(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert torch.equal(state[HEAD], state[TABLE])
    assert types == {"F32": 2 * 7 + 1}


def test_importance_is_the_mean_square_of_each_column(model: Any, tmp_path: Path) -> None:
    tokens = torch.arange(24).reshape(2, 12)
    found = importance_of(tmp_path / "llama", model, tokens)
    with torch.inference_mode():
        last = model.model(input_ids=tokens).last_hidden_state.flatten(0, 1).double()
    torch.testing.assert_close(found["token_embd.weight"], last.square().mean(0))
    assert set(found) == {"token_embd.weight"} | {
        f"blk.{layer}.{part}.weight"
        for layer in range(2)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    }


def test_the_frontier_has_no_file_that_another_beats() -> None:
    rows = [{"bytes": size, "divergence": loss} for size, loss in ((9, 0.1), (7, 0.2), (8, 0.3), (9, 0.2))]
    assert _frontier(rows) == [rows[1], rows[0]]
