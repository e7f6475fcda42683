"""`factorpack export --safetensors`, and `packed.decode_to` in another type."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import factorpack as fp
from factorpack.errors import PlanError, WeightError
from tests.commands.running import printed, run
from tests.helpers import assert_same_tensor, seeded

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def state() -> dict[str, Tensor]:
    shared = seeded(6, 6)
    return {
        "fc.weight": seeded(16, 16),
        "half": seeded(8).half(),
        "odd": torch.tensor([float("nan"), float("inf"), 1e-30]),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "embed": shared,
        "head": shared,
    }


@pytest.mark.parametrize("dtype", [*TYPES, None])
def test_plain_weights_in_any_type(
    dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small, back = tmp_path / "small.safetensors", tmp_path / "back.safetensors"
    fp.save(fp.compress(state(), fp.Scalar(4), progress=False), small)
    given = [] if dtype is None else ["--dtype", dtype]
    assert run(monkeypatch, "export", small, "--safetensors", back, *given, "--json") == 0
    assert printed(capsys) == {"path": str(back), "bytes": back.stat().st_size}
    found, decoded = load_file(back), fp.load(small).state_dict()
    assert set(found) == set(decoded)
    for name, value in decoded.items():
        is_cast = dtype is not None and value.is_floating_point()
        assert_same_tensor(found[name], value.to(TYPES[dtype]) if is_cast and dtype else value)


def test_16_bits_decode_as_they_were(tmp_path: Path) -> None:
    half = {name: value.to(torch.bfloat16) for name, value in state().items() if value.dtype == torch.float32}
    packed = fp.compress({name: value.float() for name, value in half.items()}, fp.Keep(), progress=False)
    packed.decode_to(tmp_path / "back.safetensors", progress=False, dtype=torch.bfloat16)
    for name, value in load_file(tmp_path / "back.safetensors").items():
        assert_same_tensor(value, half[name])


def test_a_type_that_does_not_hold_a_value(tmp_path: Path) -> None:
    packed = fp.compress({"a": seeded(3), "b": torch.tensor([1.0, -7e4])}, fp.Keep(), progress=False)
    with pytest.raises(
        WeightError, match=r"'b' has values up to 7e\+04, and torch\.float16 ends at 6\.55e\+04"
    ):
        packed.decode_to(tmp_path / "back", progress=False, dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PlanError, match=r"dtype is torch\.int8, expected a floating point type"):
        packed.decode_to(tmp_path / "back", progress=False, dtype=torch.int8)
