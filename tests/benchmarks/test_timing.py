"""The study of compression times runs on small models, and reads what it says it reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import llamas
from benchmarks.measure import machine
from benchmarks.studies import timing

pytest.importorskip("transformers", reason="Llamas need the hf extra")
SMALL = {"hidden": 32, "intermediate": 64, "layers": 1, "heads": 2, "kv_heads": 1, "vocabulary": 64}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return timing.run(ratio=4.0, llama=SMALL, samples=4, length=16, batch=2, held_out=2)


def test_a_budget_is_measured_beside_plain_rounding(found: dict[str, Any]) -> None:
    assert found["samples"] == 4
    for row in (found["budget"], found["rounding"]):
        assert row["seconds"] > 0
        assert row["host_peak_bytes"] >= row["host_start_bytes"] > 0
        assert row["divergence"] > 0
    assert found["budget"]["file_ratio"] >= 4


def test_on_a_gpu_both_are_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of each loads kernels, and the budget's comes first."""
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: True)
    seconds = iter([6.0, 5.0, 2.0, 1.0])

    def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        return work(), {"seconds": next(seconds)}

    monkeypatch.setattr(timing, "_timed", timed)
    monkeypatch.setattr(timing, "_measured", lambda _net, work, _held_out: timed(work)[1])
    net, data = nn.Linear(70, 60), timing.Data([torch.randn(64, 70)], [])
    found = timing.time_model(net, 3.0, data)
    assert (found["times_rounding"], found["times_rounding_again"]) == (3.0, 5.0)
    assert (found["again"]["seconds"], found["rounding_again"]["seconds"]) == (5.0, 1.0)


def test_saving_alone_is_measured() -> None:
    saved = timing.run(llama=SMALL, method={"method": "second_order", "step": 0.005})
    assert saved["save"]["file_bytes"] > 0


def test_a_checkpoint_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamas, "SHARD_ELEMENTS", 4096)
    shape = SMALL | {"layers": 2}
    row = timing.run(ratio=4.0, llama=shape, samples=4, length=16, batch=1, held_out=1, streamed=True)
    assert row["blocks"] == 2
    assert row["budget"]["file_ratio"] >= 4
    assert row["budget"]["divergence"] > 0


@pytest.mark.parametrize("warm", [False, True])
def test_every_experiment_is_in_the_table(
    found: dict[str, Any], warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of before know of one call of rounding."""
    calls = {"rounding_again": found["rounding"], "times_rounding_again": 2.51} if warm else {}
    result = found | {"save": found["budget"]["save"]} | calls
    stored = {"command": "", "machine": machine(), "result": result}
    monkeypatch.setattr(timing, "load_result", lambda _folder, _case: stored)
    monkeypatch.setattr(timing, "is_stored", lambda _folder, _case: True)
    table = timing.tabulate()
    head, _, row = (line.split("|")[1:-1] for line in table.splitlines()[:3])
    assert len(head) == len(row)
    again = [cell.strip() for cell in row][[cell.strip() for cell in head].index("times, again")]
    assert again == ("2.5" if warm else "")
    assert all(label in table for case, label in timing.CASES.items() if case != timing.SAVING)
    assert "24 layers take 1.00 times as long as 12." in table
    assert "0.0 s per block" in table
    experiments = Path(timing.__file__).parents[1] / "experiments" / "timing"
    assert {path.stem for path in experiments.iterdir()} == set(timing.CASES)


def test_transformers_opens_the_checkpoint_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(llamas, "SHARD_ELEMENTS", 4096)
    shape = llamas.Shape(**SMALL)  # type: ignore[arg-type]
    llamas.write_checkpoint(tmp_path / "model", shape)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in opened.items()} == shape.tensors()
    assert opened["model.norm.weight"].eq(1).all()


def test_the_format_of_llama2c() -> None:
    """Kinds of weights follow each other, and a head's pairs of neighbours become its two halves."""
    header = np.array([4, 2, 2, 1, 1, 3, 8], np.int32)
    values = np.arange(2 * (4 + 4 * 16 + 4 + 3 * 8) + 3 * 4 + 4, dtype=np.float32)
    shape, tensors = llamas.read_llama2c(
        np.frombuffer(header.tobytes() + values.tobytes() + b"rest", np.uint8)
    )
    assert (shape.hidden, shape.layers, shape.vocabulary, shape.tied) == (4, 2, 3, True)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shape.tensors()
    embedding, norms, query = 12, 8, torch.arange(16.0).view(4, 4)
    assert tensors["model.embed_tokens.weight"][0, 1] == 1
    assert tensors["model.layers.1.input_layernorm.weight"][0] == embedding + 4
    expected = (query + embedding + norms)[[0, 2, 1, 3]]
    assert torch.equal(tensors["model.layers.0.self_attn.q_proj.weight"], expected)
    assert tensors["model.norm.weight"][-1] == values[-1]


def test_a_model_writes_texts_of_the_requested_length() -> None:
    model = llamas.random_llama(llamas.Shape(**SMALL), torch.float32)  # type: ignore[arg-type]
    drawn = llamas.sampled_tokens(model, 3, 7)
    assert drawn.shape == (3, 7)
    assert drawn[:, 0].eq(llamas.BEGIN).all()
