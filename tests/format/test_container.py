from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from factorpack.decoding import decode
from factorpack.errors import FormatError, SourceError
from factorpack.format import container
from factorpack.format.container import SAFETENSORS_TYPES, Reader, Writer, write_plain
from factorpack.quantize.uniform import code_range
from factorpack.record import DTYPES, Encoded
from tests.golden.make import tensors as golden_tensors
from tests.helpers import assert_same_encoded, assert_same_tensor, seeded, write_packed
from tests.tampered import take_apart

FLOATS = [dtype for dtype in DTYPES.values() if dtype.is_floating_point]
SIZES = st.integers(1, 6)
SEEDS = st.integers(0, 2**32 - 1)


def generator(draw: st.DrawFn) -> torch.Generator:
    return torch.Generator().manual_seed(draw(SEEDS))


def random_codes(draw: st.DrawFn, rows: int, columns: int, bits: int) -> torch.Tensor:
    """Codes between two bounds, so that some are all the same and some use the whole range."""
    low, high = code_range(bits)
    first = draw(st.integers(low, high))
    last = draw(st.integers(first, high))
    return torch.randint(first, last + 1, (rows, columns), generator=generator(draw), dtype=torch.int8)


def random_scale(draw: st.DrawFn, rows: int, columns: int) -> torch.Tensor:
    dtype = draw(st.sampled_from([torch.float16, torch.float32]))
    return torch.rand(rows, columns, generator=generator(draw)).to(dtype)


@st.composite
def kept(draw: st.DrawFn) -> Encoded:
    """Any bits of any type, NaN and infinities included, in any shape."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    size = math.prod(shape) * dtype.itemsize
    limit = 2 if dtype == torch.bool else 256
    noise = torch.randint(0, limit, (size,), generator=generator(draw), dtype=torch.uint8)
    values = noise.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    decoded = draw(st.sampled_from(FLOATS)) if dtype.is_floating_point else dtype
    return Encoded("keep", shape, decoded, {"values": values}, note=draw(st.text("aé]\n", max_size=3)))


@st.composite
def scalars(draw: st.DrawFn) -> Encoded:
    groups, out, channels, kernel = draw(st.integers(0, 3)), draw(SIZES), draw(SIZES), draw(SIZES)
    shape = (channels * groups, out, kernel) if groups else (out, channels, kernel)
    rows, bits = out * max(groups, 1), draw(st.integers(2, 8))
    parts = {
        "codes": random_codes(draw, rows, channels * kernel, bits),
        "scale": random_scale(draw, rows, 1),
    }
    return Encoded("scalar", shape, draw(st.sampled_from(FLOATS)), parts, {"codes": bits}, groups)


@st.composite
def factored(draw: st.DrawFn) -> Encoded:
    groups, out, channels, kernel = draw(st.integers(0, 3)), draw(SIZES), draw(SIZES), draw(SIZES)
    shape = (channels * groups, out, kernel) if groups else (out, channels, kernel)
    numel = math.prod(shape)
    tile = draw(st.integers(1, numel))
    rank, count = draw(st.integers(1, min(tile, 8))), math.ceil(numel / tile)
    bits = {"codebook": draw(st.integers(2, 8)), "latent": draw(st.integers(2, 8))}
    parts = {
        "codebook": random_codes(draw, tile, rank, bits["codebook"]),
        "codebook_scale": random_scale(draw, 1, rank),
        "latent": random_codes(draw, rank, count, bits["latent"]),
        "latent_scale": random_scale(draw, *draw(st.sampled_from([(rank, 1), (1, count)]))),
    }
    if draw(st.booleans()):
        parts["mean"] = random_scale(draw, tile, 1) - 0.5
    zeros = draw(st.integers(0, rank * count))
    return Encoded("factors", shape, draw(st.sampled_from(FLOATS)), parts, bits, groups, zeros)


MODELS = st.dictionaries(st.text("ab.é ", max_size=4), st.one_of(kept(), scalars(), factored()), max_size=4)


@settings(max_examples=80)
@given(MODELS, st.data())
def test_reader_inverts_writer(
    tmp_path_factory: pytest.TempPathFactory, model: dict[str, Encoded], data: Any
):
    aliases = (
        data.draw(st.dictionaries(st.text("xyz", min_size=1), st.sampled_from(list(model)))) if model else {}
    )
    path = tmp_path_factory.mktemp("pack") / "file"
    write_packed(path, model, aliases)
    reader = Reader(path)
    assert list(reader) == list(model)
    assert dict(reader.schema.aliases) == aliases
    for name, encoded in model.items():
        assert_same_encoded(reader[name], encoded)
        assert_same_tensor(decode(reader[name]), decode(encoded))
    first = path.read_bytes()
    write_packed(path, reader, aliases)
    assert path.read_bytes() == first


def wide(rows: int, columns: int) -> Encoded:
    """Codes that do not compress: a stream of about rows * columns bytes."""
    noise = torch.randint(
        -128, 128, (rows, columns), generator=torch.Generator().manual_seed(3), dtype=torch.int8
    )
    return Encoded(
        "scalar", (rows, columns), torch.float32, {"codes": noise, "scale": torch.ones(rows, 1)}, {"codes": 8}
    )


def test_large_streams_get_entries_of_their_own(tmp_path: Path):
    model = {"a": wide(4, 8), "b": wide(128, 128), "c": wide(4, 9), "d": wide(130, 128)}
    write_packed(tmp_path / "file", model)
    reader = Reader(tmp_path / "file")
    assert sorted(reader._file.entries) == ["b", "d", "factorpack.small"]
    for name, encoded in model.items():
        assert_same_encoded(reader[name], encoded)


@pytest.mark.parametrize("spare", [-1, 0])
def test_the_limit_of_a_small_stream(tmp_path: Path, spare: int):
    values = torch.zeros(container.SMALL_BYTES + spare, dtype=torch.uint8)
    write_packed(
        tmp_path / "file", {"a": Encoded("keep", tuple(values.shape), torch.uint8, {"values": values})}
    )
    assert list(Reader(tmp_path / "file")._file.entries) == (["factorpack.small"] if spare else ["a"])


def test_sizes_add_up_to_the_file(tmp_path: Path):
    write_packed(tmp_path / "file", {"a": wide(4, 8), "b": wide(128, 128)})
    reader = Reader(tmp_path / "file")
    assert reader.file_bytes == (tmp_path / "file").stat().st_size
    assert reader.header_bytes == 8 + int.from_bytes((tmp_path / "file").read_bytes()[:8], "little")


def test_an_empty_model(tmp_path: Path):
    write_packed(tmp_path / "file", {})
    assert dict(Reader(tmp_path / "file")) == {}


def constant(shape: tuple[int, int]) -> Encoded:
    parts = {"codes": torch.zeros(shape, dtype=torch.int8), "scale": torch.zeros(shape[0], 1).half()}
    return Encoded("scalar", shape, torch.float32, parts, {"codes": 2})


@pytest.mark.parametrize(("columns", "filler"), [(4608, 0), (4609, 1), (1 << 19, 1015)])
def test_a_large_tensor_of_zeros_is_filled_up(tmp_path: Path, columns: int, filler: int):
    """Five bytes of codes and four of scales carry 9 * 1024 numbers."""
    encoded = constant((2, columns))
    write_packed(tmp_path / "file", {"zeros": encoded})
    reader = Reader(tmp_path / "file")
    assert reader.rows["zeros"].filler_bytes == filler
    assert_same_encoded(reader["zeros"], encoded)


def test_a_codebook_larger_than_its_weight_is_filled_up(tmp_path: Path):
    """4096 x 64 equal codes for a weight of 4096: the codebook needs 256 bytes, not four."""
    parts = {
        "codebook": torch.ones(4096, 64, dtype=torch.int8),
        "codebook_scale": torch.ones(1, 64).half(),
        "latent": torch.ones(64, 1, dtype=torch.int8),
        "latent_scale": torch.ones(1, 1).half(),
    }
    encoded = Encoded("factors", (4096,), torch.float32, parts, {"codebook": 2, "latent": 2})
    write_packed(tmp_path / "file", {"w": encoded})
    row = Reader(tmp_path / "file").rows["w"]
    assert row.stored_bytes == 256
    assert_same_encoded(Reader(tmp_path / "file")["w"], encoded)


def test_more_extra_zeros_than_numbers_where_the_last_tile_is_not_full(tmp_path: Path):
    encoded = golden_tensors()["conv.weight"]
    parts = encoded.parts | {"latent": torch.zeros(8, 34, dtype=torch.int8)}
    write_packed(tmp_path / "file", {"w": replace(encoded, parts=parts, extra_zeros=8 * 34)})
    assert Reader(tmp_path / "file")["w"].extra_zeros == 272


def broken(name: str) -> Encoded:
    conv, fc = golden_tensors()["conv.weight"], golden_tensors()["fc.weight"]
    nan, minus = torch.full((6, 1), torch.nan), -torch.ones(6, 1)
    return {
        "unknown kind": replace(conv, kind="magic"),
        "missing part": replace(fc, parts={"codes": fc.parts["codes"]}, bits={"codes": 4}),
        "wrong shape": replace(fc, shape=(6, 41)),
        "NaN scale": replace(fc, parts=fc.parts | {"scale": nan}),
        "negative scale": replace(fc, parts=fc.parts | {"scale": minus}),
        "infinite mean": replace(conv, parts=conv.parts | {"mean": torch.full((16, 1), torch.inf)}),
        "code too large": replace(fc, parts=fc.parts | {"codes": torch.full((6, 40), 8, dtype=torch.int8)}),
        "nine dimensions": Encoded("keep", (1,) * 9, torch.float32, {"values": torch.zeros((1,) * 9)}),
        "unknown type": Encoded(
            "keep", (1,), torch.float8_e4m3fnuz, {"values": torch.zeros(1, dtype=torch.float8_e4m3fnuz)}
        ),
        "integer weight": replace(fc, dtype=torch.int8),
        "complex to real": Encoded("keep", (1,), torch.float32, {"values": torch.zeros(1) * 1j}),
        "too many zeros": replace(conv, extra_zeros=273),
        "zeros of no code": Encoded("keep", (1,), torch.float32, {"values": torch.zeros(1)}, extra_zeros=1),
        "half a surrogate": fc.noted("\ud800"),
    }[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unknown kind", "unknown kind 'magic'"),
        ("missing part", "found parts"),
        ("wrong shape", r"'codes' has shape \(6, 40\), expected \(6, 41\)"),
        ("NaN scale", "'scale' holds NaN or infinity"),
        ("negative scale", "'scale' holds a negative scale"),
        ("infinite mean", "'mean' holds NaN or infinity"),
        ("code too large", "codes 8 to 8 do not fit 4 bits"),
        ("nine dimensions", "expected at most 8"),
        ("unknown type", "unknown type 'float8_e4m3fnuz'"),
        ("integer weight", r"torch.float32 values cannot represent a torch.int8 tensor"),
        ("complex to real", r"torch.complex64 values cannot represent a torch.float32 tensor"),
        ("too many zeros", "claims 273 extra zeros among 272 codes"),
        ("zeros of no code", "claims 1 extra zeros among 0 codes"),
        ("half a surrogate", "note is not text"),
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path: Path, name: str, message: str):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FormatError, match=message) as caught:
        write_packed(tmp_path / "file", {"fine": wide(2, 2), "bad": broken(name)})
    assert "while writing tensor 'bad'" in caught.value.__notes__
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.parametrize("name", ["factorpack.small", "__metadata__"])
def test_reserved_names_are_refused(tmp_path: Path, name: str):
    with pytest.raises(SourceError, match="the file format uses that name"):
        write_packed(tmp_path / "file", {name: wide(1, 1)})
    with pytest.raises(FormatError, match=f"a tensor is named '{name}'"):
        write_packed(tmp_path / "file", {"a": wide(1, 1)}, {name: "a"})


def test_a_tensor_is_added_once(tmp_path: Path):
    with Writer(tmp_path / "file") as writer:
        writer.add("a", wide(1, 1))
        with pytest.raises(SourceError, match="'a' has been added already"):
            writer.add("a", wide(1, 2))
    assert Reader(tmp_path / "file")["a"].shape == (1, 1)


@pytest.mark.parametrize("aliases", [{"b": "c"}, {"a": "a"}, {"b": "b"}, {"b": "c", "c": "a"}])
def test_an_alias_of_no_tensor_is_not_written(tmp_path: Path, aliases: dict[str, str]):
    with pytest.raises(FormatError, match="expected a new name for a tensor"):
        write_packed(tmp_path / "file", {"a": wide(1, 1)}, aliases)
    assert list(tmp_path.iterdir()) == []


def test_nowhere_to_write(tmp_path: Path):
    with pytest.raises(SourceError, match="there is no folder"):
        write_packed(tmp_path / "no" / "file", {})
    with pytest.raises(SourceError, match="is a folder"):
        write_packed(tmp_path, {})


def test_the_header_is_aligned_and_small(tmp_path: Path):
    write_packed(tmp_path / "file", golden_tensors())
    blob = (tmp_path / "file").read_bytes()
    size = int.from_bytes(blob[:8], "little")
    assert size % 8 == 0
    assert list(json.loads(blob[8 : 8 + size])) == ["__metadata__", "factorpack.small"]
    assert take_apart(blob).build() == blob


@pytest.mark.parametrize("dtype", SAFETENSORS_TYPES)
def test_plain_files_are_read_by_safetensors(tmp_path: Path, dtype: torch.dtype):
    values = {
        "a": torch.arange(6).reshape(2, 3).to(dtype),
        "b": torch.ones(()).to(dtype),
        "é": torch.empty(0, 2).to(dtype),
    }
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in values.items()}
    write_plain(tmp_path / "file", shapes, values.values())
    found = load_file(tmp_path / "file")
    assert sorted(found) == sorted(values)
    for name, value in values.items():
        assert_same_tensor(found[name], value)


def test_a_type_safetensors_lacks(tmp_path: Path):
    with pytest.raises(SourceError, match="safetensors has no type for 'a'"):
        write_plain(tmp_path / "file", {"a": (torch.complex128, (1,))}, [])
    assert list(tmp_path.iterdir()) == []


def test_raw_streams_are_written_in_order():
    file = io.BytesIO()
    container._write_all(file, [torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)])
    assert file.getvalue() == b"\1\2"


@pytest.mark.parametrize("damaged", [["conv", "late"], ["early", "late"], []])
def test_threads_check_a_large_file_and_name_what_is_damaged_first(
    damaged: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "_WORTH_THREADS", 0)
    monkeypatch.setattr(container, "_RUN_BYTES", 100)
    path = tmp_path / "file"
    values = {name: seeded(9, seed=number) for number, name in enumerate(["early", "conv", "late", "last"])}
    write_packed(
        path, {name: Encoded("keep", (9,), torch.float32, {"values": each}) for name, each in values.items()}
    )
    pieces = take_apart(path.read_bytes())
    for name in damaged:
        pieces.streams[name] = b"\xff" + pieces.streams[name][1:]
    path.write_bytes(pieces.build())
    if not damaged:
        assert list(Reader(path)) == list(values)
        return
    with pytest.raises(FormatError, match=f"tensor '{damaged[0]}': the checksum does not match"):
        Reader(path)


@pytest.mark.parametrize("sizes", [[], [5], [5, 0, 5], [500], [60, 60, 60, 60], [0, 200, 3]])
def test_runs_have_every_stream_once_and_enough_bytes(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "_RUN_BYTES", 100)
    runs = list(container._runs(sizes))
    assert [number for run in runs for number in run] == list(range(len(sizes)))
    assert all(sum(sizes[number] for number in run) >= 100 for run in runs[:-1])
