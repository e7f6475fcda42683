"""The study of synthetic calibration: its shares of the way, and the tokens of real stories."""

from __future__ import annotations

import pytest
from torch import nn

import factorpack as fp
from benchmarks.llamas import encode_text
from benchmarks.studies import synthetic


def test_shares_of_the_way_are_in_the_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {None: 0.8, "real": 0.05, "made": 0.2}

    def compress(_net: nn.Module, calibration: str | None, **_: object) -> str | None:
        return calibration

    monkeypatch.setattr(fp, "compress", compress)
    made = {4: ("made", 1.5)}
    rows = synthetic._compress_all(
        nn.Linear(1, 1),
        [8.0],
        9,
        "real",  # type: ignore[arg-type]
        made,  # type: ignore[arg-type]
        lambda packed: {"divergence": found[packed]},  # type: ignore[index]
    )
    assert [(row["inputs"], row["count"], row["making"]) for row in rows] == [
        ("weights alone", 0, 0.0),
        ("real", 9, 0.0),
        ("synthetic", 4, 1.5),
    ]
    assert [row["share"] for row in rows] == pytest.approx([0.0, 1.0, 0.5])


def test_pairs_with_the_best_score_are_joined_first() -> None:
    pieces = {each: (300 + place, 0.0) for place, each in enumerate((b" ", b"a", b"b", b"c"))}
    pieces |= {b" a": (310, -3.0), b"ab": (311, -1.0), b" ab": (312, -4.0), b"bc": (313, -2.0)}
    assert encode_text("abc", pieces) == [312, 303]
    assert encode_text("c\n", pieces) == [300, 303, 13], "a byte that is no piece has a token of its own"
