"""A short run of `python -m tools.flip_bits`."""

from __future__ import annotations

import pytest

from factorpack.format import checked_file
from tools import flip_bits


def test_no_flipped_bit_is_silent() -> None:
    for name, count in flip_bits.run(8 * len(flip_bits.KINDS), 0, resumes=1).items():
        assert count.silent == [], name
        assert count.flips == 8
        assert count.resumed == 1


def test_the_tool_sees_a_silent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_file, "_checksum", lambda _: b"0" * 64)
    monkeypatch.setattr(flip_bits, "KINDS", {"curves": flip_bits.KINDS["curves"]})
    (count,) = flip_bits.run(20, 0, resumes=0).values()
    assert count.silent
