"""NumPy archives: every kind of number bit for bit, compressed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import factorpack as fp
from factorpack.source import open_source
from tests.helpers import assert_same_tensor, seeded

KINDS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1", "c8", "c16", ">f4", ">i2")
ARRAYS = st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 4), max_size=4), st.booleans())


@given(st.lists(ARRAYS, min_size=1, max_size=5), st.booleans())
def test_what_numpy_wrote_is_read(tmp_path_factory: Any, arrays: list[Any], compressed: bool) -> None:
    path = tmp_path_factory.mktemp("npz") / "net.npz"
    state = {}
    for number, (kind, shape, is_transposed) in enumerate(arrays):
        values = (9 * seeded(*shape, seed=number)).numpy()
        with np.errstate(all="ignore"):
            state[f"layer{number}/kernel"] = np.array(values, kind, order="F" if is_transposed else "C")
    (np.savez_compressed if compressed else np.savez)(path, **state)
    opened = open_source(path)
    assert list(opened.entries) == list(state)
    for name, value in state.items():
        expected = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
        assert (opened.entries[name].shape, opened.entries[name].dtype) == (value.shape, expected.dtype)
        assert_same_tensor(opened.entries[name].load(), expected)


def test_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    objects: Any = np.array([{}, None])
    np.savez(tmp_path / "net.npz", w=np.ones((4, 4)), arch=np.array("resnet"), more=objects)
    opened = open_source(tmp_path / "net.npz")
    assert list(opened.entries) == ["w"]
    assert opened.notes[0].text == "net.npz: left out, because they are no numbers: 'arch', 'more'"


def test_there_and_back(tmp_path: Path) -> None:
    weight = seeded(64, 64)
    np.savez(tmp_path / "net.npz", **{"fc.weight": weight.numpy(), "fc.bias": np.ones(4, np.float16)})
    packed = fp.compress(tmp_path / "net.npz", fp.Keep(), progress=False)
    assert_same_tensor(packed.state_dict()["fc.weight"], weight)


def test_arrays_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factorpack.checkpoints.npz_file._PIECE", 7)
    np.savez(tmp_path / "net.npz", w=seeded(5, 5).numpy())
    assert_same_tensor(open_source(tmp_path / "net.npz").entries["w"].load(), seeded(5, 5))
