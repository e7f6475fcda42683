"""Small files cost little: work and memory are counted, on files whose checksums are right."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import factorpack as fp
import factorpack.packed as packed_module
from factorpack.decoding import decode
from factorpack.format import (
    blocks,
    entropy,
    float_stream,
    path_reader,
    schema,
    trellis_stream,
    untrusted_json,
)
from factorpack.format import frequency_tables as tables
from factorpack.format.container import Reader
from factorpack.hub.quantizer import _open_file
from factorpack.quantize.mantissas import FLOAT_TYPES
from factorpack.quantize.trellis import levels_of, machine
from factorpack.record import Encoded
from tests.helpers import assert_same_encoded, write_packed
from tests.hostile import costly
from tests.hostile.past_failures import REFUSED

MEGABYTE = 1 << 20


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[bytes], fp.Packed]:
    def open_blob(blob: bytes) -> fp.Packed:
        (tmp_path / "file").write_bytes(blob)
        return fp.load(tmp_path / "file")

    return open_blob


def peak_bytes(work: Callable[[], object]) -> int:
    """What Python and numpy hold at most while something runs."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """The file is opened before there is a folder to decode it into."""
    (tmp_path / "file").write_bytes(REFUSED["aliases of a large tensor"][0]())
    with pytest.raises(fp.FormatError, match="250 aliases"):
        _open_file(tmp_path / "file", {})


def test_names_of_any_length_are_shown_short(opened: Callable[[bytes], fp.Packed]) -> None:
    row, stream = costly.constant([1])
    with pytest.raises(fp.FormatError, match=r"'a{256}'\.\.\. \(90000 characters\): unknown kind") as caught:
        opened(costly.file_of({"a" * 90_000: (row | {"kind": "x"}, stream)}))
    assert len(str(caught.value)) < 500


def test_what_is_just_allowed_opens(opened: Callable[[bytes], fp.Packed]) -> None:
    assert not decode(opened(costly.file_of({"w": costly.factors(256, 256, 256)}))["w"]).any()
    few = {f"a{i}": "w" for i in range(64)}
    assert len(opened(costly.file_of({"w": costly.constant([1])}, few)).state_dict()) == 65


class TestText:
    @pytest.mark.parametrize("cut", range(1, 9))
    def test_pieces_count_as_the_whole(self, cut: int) -> None:
        text = r'{"a\\":[1,{"[,\"{":[]}],"\\\"]":"\\\\","é":{}}'.encode()
        whole, pieces = untrusted_json.Extent(99), untrusted_json.Extent(99)
        whole.add(text)
        for start in range(0, len(text), cut):
            pieces.add(text[start : start + cut])
        assert whole.values == pieces.values == 12  # 5 openings, 4 colons, 3 commas
        assert whole._depth == pieces._depth == 0

    def test_text_of_another_encoding_is_refused(self) -> None:
        """The counts are those of UTF-8; json alone would detect UTF-16."""
        with pytest.raises(fp.FormatError, match="not valid JSON"):
            untrusted_json.parse_json('{"a":1}'.encode("utf-16"), 0)

    def test_brackets_in_names_do_not_count(self, tmp_path: Path) -> None:
        values = Encoded("keep", (1,), torch.int8, {"values": torch.zeros(1, dtype=torch.int8)})
        write_packed(tmp_path / "file", {'[[[[[[[[[[{{{{{"\\': values})
        assert len(Reader(tmp_path / "file")) == 1


@pytest.mark.parametrize("limit", ["values", "text", "aliases"])
def test_every_written_file_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Where tensors or aliases are many for its bytes, a writer adds spaces to the header."""
    values = Encoded("keep", (2,), torch.int8, {"values": torch.ones(2, dtype=torch.int8)})
    model, aliases = {f"{i}": values for i in range(20)}, {f"a{i}": "0" for i in range(20)}
    write_packed(tmp_path / "before", model, aliases)
    small = (tmp_path / "before").read_bytes()
    if limit == "values":
        monkeypatch.setattr(untrusted_json, "FREE_VALUES", 20)
    elif limit == "text":
        monkeypatch.setattr(untrusted_json, "FREE_BYTES", 20)
        monkeypatch.setattr(untrusted_json, "BYTES_PER_BYTE", 2)
    else:
        monkeypatch.setattr(schema, "FREE_ALIASED", 20)
        monkeypatch.setattr(schema, "LEAST_ALIASED", 1 << 17)
    write_packed(tmp_path / "after", model, aliases)
    found = Reader(tmp_path / "after")
    assert len(small) < found.file_bytes < 6 * len(small)
    assert dict(found.schema.aliases) == aliases
    assert (tmp_path / "after").read_bytes().replace(b" ", b"")[8:] == small.replace(b" ", b"")[8:]
    with pytest.raises(fp.FormatError, match=r"allowed are|longer than"):
        Reader(tmp_path / "before")


def test_filler_pays_for_long_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(costly.file_of({"w": costly.factors(16, 16, 16)}))
    encoded = Reader(tmp_path / "file")["w"]
    monkeypatch.setattr(schema, "OPERATIONS", 4)
    with pytest.raises(fp.FormatError, match="takes 4096 multiplications in"):
        Reader(tmp_path / "file")
    write_packed(tmp_path / "again", {"w": encoded})
    assert Reader(tmp_path / "again").rows["w"].stored_bytes == 1024
    assert_same_encoded(Reader(tmp_path / "again")["w"], encoded)


class TestAliases:
    def test_a_tied_tensor_is_decoded_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Encoded] = []

        def counted(encoded: Encoded) -> Tensor:
            calls.append(encoded)
            return decode(encoded)

        monkeypatch.setattr(packed_module, "decode", counted)
        names = {f"a{i}": "w" for i in range(40)}
        (tmp_path / "file").write_bytes(
            costly.file_of({"w": costly.constant([8]), "x": costly.empty()}, names)
        )
        packed = fp.load(tmp_path / "file")
        packed.decode_to(tmp_path / "plain", progress=False)
        state = packed.state_dict()
        assert len(calls) == 4  # two tensors, twice
        assert len({state[name].data_ptr() for name in ("w", *names)}) == 1

    def test_limits_count_every_name(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(
            costly.file_of({"w": costly.constant([8]), "x": costly.constant([2])}, {"a": "w", "b": "w"})
        )
        assert len(fp.load(tmp_path / "file", max_bytes=4 * 26)) == 2
        with pytest.raises(fp.FormatError, match="declares 104 decoded bytes, allowed are 103"):
            fp.load(tmp_path / "file", max_bytes=4 * 26 - 1)

    def test_a_large_codebook_counts(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(costly.file_of({"w": costly.factors(64, 64, 1)}))
        with pytest.raises(fp.FormatError, match="declares 16384 decoded bytes, allowed are 256"):
            fp.load(tmp_path / "file", max_bytes=256)


def random_path(rows: int, columns: int, segment: int) -> NDArray[np.int32]:
    """Levels along random paths through a trellis of 8 states; the first column is quiet."""
    rng, of = np.random.default_rng(0), machine(8)
    quiet = np.arange(columns) == 0
    state, levels = of.start(quiet, -(-rows // segment)), np.empty((rows, columns), np.int32)
    for row in range(min(segment, rows)):
        here = state[: len(range(row, rows, segment))]
        indices = rng.integers(-3, 4, here.shape)
        levels[row::segment] = levels_of(indices, of.quantizer[here])
        here[:] = of.after[here, indices & 1]
    return levels


class TestPaths:
    def test_steps_are_paid_for_in_bytes(self, opened: Callable[[bytes], fp.Packed]) -> None:
        most = 16 * len(costly.path_zeros(1024))
        assert most >= 128  # as many as our writer makes, whatever the codes
        assert not opened(costly.file_of({"w": costly.path(most, 1, 1024)}))["w"].parts["codes"].any()
        with pytest.raises(
            fp.FormatError, match=f"a path of {most + 1} steps in .*, allowed are 16 per byte"
        ):
            opened(costly.file_of({"w": costly.path(most + 1, 1, 1024)})).state_dict()

    @pytest.mark.parametrize("shape", [(1, 1), (40, 3), (130, 2), (300, 5)])
    def test_narrow_paths_take_no_array_per_step(
        self, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        levels = random_path(*shape, max(trellis_stream.segment_rows(shape[0]), 16))
        data = trellis_stream.encode(levels, 8)
        calls: list[int] = []
        by_model = path_reader.by_model

        def counted(models: NDArray[np.uint8]) -> object:
            calls.append(models.size)
            return by_model(models)

        monkeypatch.setattr(path_reader, "by_model", counted)
        assert (trellis_stream.decode(data, *shape, 8) == levels).all()
        assert calls == []
        monkeypatch.setattr(path_reader, "NARROW", 0)
        assert (trellis_stream.decode(data, *shape, 8) == levels).all()
        assert len(calls) == min(trellis_stream.segment_rows(shape[0]), shape[0])

    def test_a_wide_step_is_read_in_slabs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        levels = random_path(40, 60, 40)
        data = trellis_stream.encode(levels, 8)
        monkeypatch.setattr(path_reader, "SLAB", 7)
        assert (trellis_stream.decode(data, 40, 60, 8) == levels).all()

    def test_a_wide_path_takes_16_bytes_per_element(self) -> None:
        data, columns = costly.path_zeros(16), 4 * MEGABYTE
        found = peak_bytes(lambda: trellis_stream.decode(data, 1, columns, 8))
        assert found < 16 * columns + 8 * MEGABYTE


class TestCodes:
    @pytest.mark.parametrize("slab", [7, 1 << 18])
    def test_slabs_give_the_same_codes(self, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = np.random.default_rng(0)
        scales = np.exp(rng.normal(0, 1.5, (1, 200))) * np.exp(rng.normal(0, 1, (20, 1)))
        codes = np.rint(rng.normal(0, 1, (20, 200)) * scales).clip(-99, 99).astype(np.int8)
        data = entropy.encode(codes)
        assert min(data[3], data[4]) > 0  # classes of rows and of columns
        for module in (blocks, entropy, tables):
            monkeypatch.setattr(module, "_SLAB", slab)
        assert (entropy.decode(data, 20, 200) == codes).all()

    def test_a_wide_matrix_takes_16_bytes_per_element(self) -> None:
        """Two classes of columns, both of which occur, and models of two symbols."""
        columns, coder = 2 * MEGABYTE, entropy.constriction.stream.stack.AnsCoder()
        classes, rare = np.arange(columns) == 5, np.array([65535, 1])
        entropy.push(coder, np.zeros(1, np.uint8), rare)
        entropy.push(coder, np.zeros(columns - 1, np.uint8), rare)
        entropy.push(coder, classes, rare)
        table = tables.write_tables([np.array([[65536]]), rare[None]], np.stack([rare, rare]), 16)
        data = struct.pack("<BbBBB", 16, 0, 1, 0, 1) + table + coder.get_compressed().astype("<u4").tobytes()
        found = peak_bytes(lambda: entropy.decode(data, 1, columns))
        assert found < 16 * columns + 8 * MEGABYTE

    @pytest.mark.parametrize("dtype", FLOAT_TYPES)
    def test_floats_take_24_bytes_per_element(self, dtype: torch.dtype) -> None:
        count, kind = 1 << 18, FLOAT_TYPES[dtype]
        mantissas = bytes(count * kind.mantissa_bits // 8)
        data = bytes([kind.mantissa_bits, 9]) + costly.ans_of(3) + mantissas
        assert peak_bytes(lambda: float_stream.decode(data, count, kind)) < 24 * count + len(data) + MEGABYTE

    def test_many_large_tables_take_little(self) -> None:
        """Sixty tables of 8,192 symbols take a bit per symbol in the file, and once took 57 bytes in memory."""
        symbols, even = 8192, np.array([[65536 - 31] + [1] * 31])
        models = np.ones((63, symbols), np.int64)
        models[:, 0] = 65536 - symbols + 1
        data = tables.write_tables([even, even], models, 16)
        found = peak_bytes(lambda: tables.read_tables(data, (32, 32), 63, symbols, 16))
        assert found < 28 * models.size


def test_codes_of_a_scalar_tensor_are_written_again(
    opened: Callable[[bytes], fp.Packed], tmp_path: Path
) -> None:
    row, stream = costly.factors(1, 1, 1)
    packed = opened(costly.file_of({"w": (row | {"shape": []}, stream)}))
    fp.save(packed, tmp_path / "again")
    again = fp.load(tmp_path / "again")
    assert again.state_dict()["w"].shape == ()
    assert again.size().tensors[0].shape == ()
