"""The study of generation runs on a small model without a GPU, so that it runs at the first try on one."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.measure import machine
from benchmarks.studies import generate

pytest.importorskip("transformers", reason="Llamas need the hf extra")
SMALL = {"hidden": 64, "intermediate": 128, "layers": 2, "heads": 4, "kv_heads": 2, "vocabulary": 96}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return generate.run(SMALL, bits=4.0, prompt=5, tokens=6, rounds=1)


def test_every_way_is_measured_and_a_step_at_a_time_gives_the_same_tokens(found: dict[str, Any]) -> None:
    assert [row["way"] for row in found["ways"]] == list(generate.WAYS)
    for row in found["ways"]:
        assert row["same_tokens"]
        assert min(row[name] for name in ("first_token_s", "eager_tokens_per_s", "graph_tokens_per_s")) > 0
    held = {row["way"]: row["resident_bytes"] for row in found["ways"]}
    assert held["packed"] < held["dense"] == held["bf16 file"]
    assert 4 * found["file_bytes"] > found["bf16_bytes"] > 2 * found["file_bytes"]


def test_its_table(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"command": "", "machine": machine(), "result": found}
    monkeypatch.setattr(generate, "is_stored", lambda *_: True)
    monkeypatch.setattr(generate, "load_result", lambda *_: stored)
    lines = generate.tabulate().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:6]] == list(generate.WAYS)
