"""GGUF files and NumPy archives from anyone: refused, or read as what they say, in little memory."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from factorpack.errors import SourceError
from factorpack.source import open_source
from tests.checkpoints.made_gguf import Info, Made, made, strings, text, uint32
from tests.helpers import assert_same_tensor, little_memory, seeded

WHOLE = made({"a": seeded(4, 6), "b": seeded(3).half()})
HUGE = 1 << 60


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(WHOLE, magic=b"GGUX"), "does not begin as a GGUF file does"),
        (replace(WHOLE, version=1), "is of GGUF version 1, known are 2 and 3"),
        (replace(WHOLE, version=3 << 24), "for machines of the other byte order"),
        (replace(WHOLE, tensor_count=HUGE), "declares 1152921504606846976 tensors"),
        (replace(WHOLE, tensor_count=3), "net.gguf"),
        (replace(WHOLE, value_count=HUGE), r"ends inside its header|has a name of|unknown type"),
        (replace(WHOLE, values=(text("a") + struct.pack("<IIQ", 9, 0, HUGE),)), "ends inside its header"),
        (replace(WHOLE, values=(text("a") + struct.pack("<IIQ", 9, 8, HUGE),)), "ends inside its header"),
        (replace(WHOLE, values=(text("a") + struct.pack("<IIQ", 9, 9, 1),)), "a list of values of type 9"),
        (replace(WHOLE, values=(text("a") + struct.pack("<I", 77),)), "a value of the unknown type 77"),
        (replace(WHOLE, values=(struct.pack("<Q", HUGE),)), "has a name of 1152921504606846976 bytes"),
        (replace(WHOLE, values=(uint32("general.alignment", 0),)), "multiples of 0 bytes"),
        (replace(WHOLE, values=(uint32("general.alignment", 48),)), "multiples of 48 bytes"),
        (replace(WHOLE, values=(uint32("general.alignment", 1 << 31),)), "expected a power of two"),
        (replace(WHOLE, values=(struct.pack("<Q", 1) + b"\xff",)), "is not a whole GGUF file: .* can't decode"),
        (WHOLE.with_info(1, name="a"), "has two tensors named 'a'"),
        (WHOLE.with_info(1, place=0), "'b' and 'a' in the same place|'a' and 'b' in the same place"),
        (WHOLE.with_info(1, place=HUGE), "ends inside its tensors"),
        (WHOLE.with_info(0, dims=(HUGE, 0)), "of the shape"),
        (WHOLE.with_info(0, dims=(1 << 40,)), "ends inside its tensors|in the same place"),
        (WHOLE.with_info(0, dims=(1,) * 9), "of 9 dimensions, allowed are 8"),
        (replace(WHOLE, data=WHOLE.data[:-33]), "ends inside its tensors"),
    ],
)  # fmt: skip
def test_a_header_that_lies(tmp_path: Path, broken: Made, message: str) -> None:
    (tmp_path / "net.gguf").write_bytes(broken.packed())
    with little_memory(), pytest.raises(SourceError, match=message):
        open_source(tmp_path / "net.gguf")


def test_every_cut_is_refused(tmp_path: Path) -> None:
    blob = WHOLE.packed()
    for length in range(0, len(blob) - 32, 5):
        (tmp_path / "net.gguf").write_bytes(blob[:length])
        with pytest.raises(SourceError):
            open_source(tmp_path / "net.gguf")


def test_a_long_list_takes_little_memory(tmp_path: Path) -> None:
    """The package's reader makes objects of a hundred bytes for each of these."""
    many = text("a") + struct.pack("<IIQ", 9, 0, 1 << 22) + bytes(1 << 22)
    words = strings("tokens", *[""] * 20_000)
    (tmp_path / "net.gguf").write_bytes(replace(WHOLE, values=(many, words)).packed())
    with little_memory(python_bytes=1 << 20):
        assert_same_tensor(open_source(tmp_path / "net.gguf").entries["a"].load(), seeded(4, 6))


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (Info("q", (31,), 8, 0), r"\(31,\) of Q8_0, in blocks of 32"),
        (Info("q", (), 8, 0), r"\(\) of Q8_0, in blocks of 32"),
        (Info("q", (32, 1 << 30), 8, 0), "ends inside its tensors"),
        (Info("q", (32,), 9, 0), "of the type Q8_1, which the gguf package does not read"),
        (Info("q", (32,), 4, 0), "of the type 4, which the gguf package does not know"),
        (Info("q", (32,), 1 << 31, 0), "which the gguf package does not know"),
    ],
    ids=lambda given: given.type if isinstance(given, Info) else "",
)
def test_quantized_tensors_that_cannot_be(tmp_path: Path, info: Info, message: str) -> None:
    pytest.importorskip("gguf", reason="quantized types need the gguf extra")
    (tmp_path / "net.gguf").write_bytes(Made((info,), bytes(100)).packed())
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path / "net.gguf")


def test_a_file_that_changes(tmp_path: Path) -> None:
    (tmp_path / "net.gguf").write_bytes(WHOLE.packed())
    np.savez(tmp_path / "net.npz", a=np.ones(3))
    for name in ("net.gguf", "net.npz"):
        entry = open_source(tmp_path / name).entries["a"]
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"\0")
        with pytest.raises(SourceError, match="has changed since it was opened"):
            entry.load()


def npy(shape: object, kind: str = "<f4", data: bytes = b"", order: object = False) -> bytes:
    """An array whose header says anything."""
    header = repr({"descr": kind, "fortran_order": order, "shape": shape}).encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


def archive(path: Path, compression: int = zipfile.ZIP_STORED, **arrays: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in arrays.items():
            file.writestr(f"{name}.npy", content)
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy((2, 2), data=bytes(12)), "has 12 bytes of 'a', whose header declares 16"),
        (npy((1 << 40,)), "has 0 bytes of 'a'"),
        (npy((-1,)), "not a whole"),
        (npy((0, 1 << 62)), "not a whole"),
        (npy((2.0,)), "not a whole"),
        (npy((True,)), "not a whole"),
        (npy("x"), "not a whole"),
        (npy((2,), kind="<Q99"), "not a whole"),
        (npy((2,), kind="|O", data=b"cos\nsystem\n."), "holds no arrays of numbers"),
        (npy((2,), kind="|V2", data=bytes(4)), "holds no arrays of numbers"),
        (b"\x93NUMPY\x09\x00", "is in format"),
        (b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535, "not a whole"),
        (b"\x93NUMPY\x01\x00\xff\x0f" + b"(" * 4095, "not a whole"),
        (b"", "not a whole"),
    ],
)  # fmt: skip
def test_arrays_that_cannot_be(tmp_path: Path, content: bytes, message: str) -> None:
    path = archive(tmp_path / "net.npz", a=content)
    with little_memory(), pytest.raises(SourceError, match=message):
        open_source(path)


def test_what_expands_without_end(tmp_path: Path) -> None:
    """Zeros compressed a thousandfold, and compressions whose expansion has no limit at all."""
    zeros = npy((1 << 22,), data=bytes(1 << 24))
    path = archive(tmp_path / "net.npz", zipfile.ZIP_DEFLATED, a=zeros)
    with little_memory(), pytest.raises(SourceError, match=r"and arrays of 16777216, allowed are 64 times"):
        open_source(path)
    path = archive(tmp_path / "net.npz", zipfile.ZIP_LZMA, a=npy((4,), data=bytes(16)))
    with pytest.raises(SourceError, match="compressed or encrypted in another way than numpy does"):
        open_source(path)


def test_two_arrays_of_one_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "net.npz", "w") as file:
        file.writestr("a.npy", npy((1,), data=bytes(4)))
        file.writestr("a", npy((1,), data=bytes(4)))
    with pytest.raises(SourceError, match="has two arrays named 'a'"):
        open_source(tmp_path / "net.npz")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_damaged_archive_is_refused_or_read_as_it_was(tmp_path: Path, compressed: bool) -> None:
    """Its checksums are compared when an array is read."""
    buffer = io.BytesIO()
    state: dict[str, Any] = {"a": seeded(3, 5).numpy(), "b": np.arange(4)}
    (np.savez_compressed if compressed else np.savez)(buffer, **state)
    blob, path, refused = buffer.getvalue(), tmp_path / "net.npz", 0
    for place in range(0, len(blob), 3):
        path.write_bytes(blob[:place] + bytes([blob[place] ^ 255]) + blob[place + 1 :])
        try:
            opened = open_source(path)
            found = {name: entry.load() for name, entry in opened.entries.items()}
        except SourceError:
            refused += 1
            continue
        for name, value in found.items():
            if name in state:
                assert torch.equal(value, torch.from_numpy(state[name]))
    assert refused > len(blob) // 5
