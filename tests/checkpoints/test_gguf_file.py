"""GGUF files: plain types bit for bit, quantized ones as the gguf package reads them."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import factorpack as fp
from factorpack.errors import SourceError
from factorpack.source import open_source
from tests.checkpoints.made_gguf import TYPES, Info, Made, made
from tests.helpers import assert_same_tensor, seeded

STATE: dict[str, Tensor] = {
    f"blk.{n}.weight": (9 * seeded(4, 6, seed=n)).to(dtype) for n, dtype in enumerate(TYPES)
}
TENSORS = st.tuples(st.sampled_from(list(TYPES)), st.lists(st.integers(0, 5), max_size=4))


@given(st.lists(TENSORS, max_size=5), st.sampled_from([8, 32, 64]))
def test_what_was_written_is_read(tmp_path_factory: Any, tensors: list[Any], alignment: int) -> None:
    path = tmp_path_factory.mktemp("gguf") / "net.gguf"
    state = {f"t{n}": (9 * seeded(*shape, seed=n)).to(dtype) for n, (dtype, shape) in enumerate(tensors)}
    path.write_bytes(made(state, alignment).packed())
    opened = open_source(path)
    assert (list(opened.entries), opened.notes) == (list(state), ())
    for name, value in state.items():
        assert opened.entries[name].dtype == value.dtype
        assert_same_tensor(opened.entries[name].load(), value)


def test_plain_files_need_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "net.gguf").write_bytes(made(STATE).packed())
    assert set(fp.compress(tmp_path / "net.gguf", fp.Scalar(4), progress=False)) == set(STATE)
    block = Made((Info("q", (32,), 8, 0),), bytes(34))
    (tmp_path / "net.gguf").write_bytes(block.packed())
    with pytest.raises(
        SourceError, match=r"net\.gguf has quantized tensors.*pip install 'factorpack\[gguf\]'"
    ):
        open_source(tmp_path / "net.gguf")


def test_names_are_in_natural_order(tmp_path: Path) -> None:
    names = ["blk.10.a", "blk.9.a", "output.weight", "blk.1.a"]
    (tmp_path / "net.gguf").write_bytes(made({name: torch.ones(2) for name in names}).packed())
    assert list(open_source(tmp_path / "net.gguf").entries) == [
        "blk.1.a",
        "blk.9.a",
        "blk.10.a",
        "output.weight",
    ]


def test_a_model_in_several_files(tmp_path: Path) -> None:
    for number in (1, 2):
        tensors = {f"blk.{number}.a": torch.full((3,), float(number))}
        (tmp_path / f"net-0000{number}-of-00002.gguf").write_bytes(made(tensors).packed())
    for number in (1, 2):
        opened = open_source(tmp_path / f"net-0000{number}-of-00002.gguf")
        assert [float(entry.load()[0]) for entry in opened.entries.values()] == [1, 2]
    (tmp_path / "net-00002-of-00002.gguf").unlink()
    with pytest.raises(SourceError, match=r"one of 2 files, and net-00002-of-00002\.gguf is not beside it"):
        open_source(tmp_path / "net-00001-of-00002.gguf")


QUANTIZED = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "IQ1_S", "MXFP4", "TQ1_0")


@pytest.mark.parametrize("slice_", [256, 1 << 20])
def test_quantized_types_are_read_as_the_package_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_: int
) -> None:
    gguf = pytest.importorskip("gguf", reason="quantized types need the gguf extra")
    monkeypatch.setattr("factorpack.checkpoints.gguf_file._SLICE", slice_)
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(tmp_path / "net.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.add_tensor("norm", np.ones(5, np.float32))
    for name in QUANTIZED:
        kind = gguf.GGMLQuantizationType[name]
        size = gguf.GGML_QUANT_SIZES[kind][1]
        values = 512 // gguf.GGML_QUANT_SIZES[kind][0] * size
        writer.add_tensor(name, rng.integers(0, 60, (3, values), np.uint8), raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    opened = open_source(tmp_path / "net.gguf")
    assert opened.notes[0].text.startswith("net.gguf: 8 of 9 tensors are quantized (1 Q4_0, 1 Q8_0, ")
    for tensor in gguf.GGUFReader(tmp_path / "net.gguf").tensors:
        expected = gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type)
        entry = opened.entries[tensor.name]
        assert (entry.shape, entry.dtype) == (expected.shape, torch.float32)
        assert_same_tensor(entry.load(), torch.from_numpy(expected))


def test_the_gguf_package_writes_what_is_read(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="its own writer is compared with")
    (tmp_path / "net.gguf").write_bytes(made({"a": seeded(4, 6), "b": seeded(3).half()}).packed())
    found = gguf.GGUFReader(tmp_path / "net.gguf")
    assert [(each.name, each.data.shape) for each in found.tensors] == [("a", (4, 6)), ("b", (3,))]
    assert builtins.list(found.tensors[1].data) == seeded(3).half().tolist()
