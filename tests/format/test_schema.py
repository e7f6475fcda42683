from __future__ import annotations

import base64
import json
import math
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from factorpack.errors import FormatError
from factorpack.format import schema as schemas
from factorpack.format.bitpack import bit_string_bytes
from factorpack.format.schema import (
    RESERVED,
    PartRow,
    Schema,
    TensorRow,
    count_filler,
    dump,
    largest_numel,
    parse,
)
from factorpack.format.streams import ANS, PACKED, RAW, raw_size
from factorpack.kinds.base import PartSpec
from factorpack.record import DTYPES, dtype_name

FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: name not in RESERVED
)
SIZES = st.integers(1, 5)
SCALES = st.sampled_from([torch.float16, torch.float32])


def raw_part(shape: tuple[int, ...], dtype: torch.dtype) -> PartRow:
    spec = PartSpec(shape, dtype)
    return PartRow(RAW, spec, raw_size(spec))


@st.composite
def code_parts(draw: st.DrawFn, shape: tuple[int, int], least_bits: int = 2) -> PartRow:
    bits = draw(st.integers(least_bits, 16))
    codec = draw(st.sampled_from([PACKED, ANS]))
    size = bit_string_bytes(math.prod(shape), bits) if codec == PACKED else draw(st.integers(3, 40))
    return PartRow(codec, PartSpec(shape, torch.int8 if bits <= 8 else torch.int16, bits), size)


@st.composite
def keep_rows(draw: st.DrawFn, name: str) -> TensorRow:
    dtype = draw(st.sampled_from(list(DTYPES)))
    stored = draw(st.sampled_from(FLOATS)) if dtype in FLOATS else dtype
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=5)))
    return finished(
        draw, TensorRow(name, "keep", dtype, shape, {"values": raw_part(shape, DTYPES[stored])}, 0)
    )


@st.composite
def constant_rows(draw: st.DrawFn, name: str) -> TensorRow:
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
    return finished(
        draw, TensorRow(name, "constant", dtype, shape, {"value": raw_part((1,), DTYPES[dtype])}, 0)
    )


@st.composite
def scalar_rows(draw: st.DrawFn, name: str) -> TensorRow:
    groups, out, channels, kernel = draw(st.integers(0, 3)), draw(SIZES), draw(SIZES), draw(SIZES)
    shape = (channels * groups, out, kernel) if groups else (out, channels, kernel)
    rows = out * max(groups, 1)
    parts = {
        "codes": draw(code_parts((rows, channels * kernel))),
        "scale": raw_part(draw(st.sampled_from([(rows, 1), (1, 1)])), draw(SCALES)),
    }
    zeros = draw(st.integers(0, rows * channels * kernel))
    return finished(
        draw, TensorRow(name, "scalar", draw(st.sampled_from(FLOATS)), shape, parts, 0, 0, groups, zeros)
    )


@st.composite
def level_rows(draw: st.DrawFn, name: str) -> TensorRow:
    out, rest = draw(SIZES), draw(SIZES)
    codes = draw(code_parts((out, rest), least_bits=1))
    count = draw(st.integers(2, min(1 << codes.spec.bits, 9)))
    parts = {
        "codes": codes,
        "levels": raw_part((draw(st.sampled_from([out, 1])), count), draw(SCALES)),
    }
    return finished(draw, TensorRow(name, "levels", draw(st.sampled_from(FLOATS)), (out, rest), parts, 0))


@st.composite
def spatial_rows(draw: st.DrawFn, name: str) -> TensorRow:
    out, inputs, height, width = (draw(SIZES) for _ in range(4))
    rank, count = draw(st.integers(1, inputs * height)), out * width
    parts = {
        "codebook": draw(code_parts((inputs * height, rank))),
        "codebook_scale": raw_part(draw(st.sampled_from([(1, rank), (1, 1)])), draw(SCALES)),
        "latent": draw(code_parts((rank, count))),
        "latent_scale": raw_part(draw(st.sampled_from([(rank, 1), (1, count), (1, 1)])), draw(SCALES)),
    }
    shape = (out, inputs, height, width)
    return finished(draw, TensorRow(name, "spatial", draw(st.sampled_from(FLOATS)), shape, parts, 0))


@st.composite
def factor_rows(draw: st.DrawFn, name: str) -> TensorRow:
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=4)))
    numel = math.prod(shape)
    tile = draw(st.integers(1, numel))
    rank = draw(st.integers(1, tile))
    count = math.ceil(numel / tile)
    parts = {
        "codebook": draw(code_parts((tile, rank))),
        "codebook_scale": raw_part(draw(st.sampled_from([(1, rank), (1, 1)])), draw(SCALES)),
        "latent": draw(code_parts((rank, count))),
        "latent_scale": raw_part(draw(st.sampled_from([(rank, 1), (1, count), (1, 1)])), draw(SCALES)),
    }
    if draw(st.booleans()):
        parts["mean"] = raw_part((tile, 1), draw(SCALES))
    zeros = draw(st.integers(0, rank * count))
    return finished(
        draw, TensorRow(name, "factors", draw(st.sampled_from(FLOATS)), shape, parts, 0, 0, 0, zeros)
    )


def finished(draw: st.DrawFn, row: TensorRow) -> TensorRow:
    """The row with any checksum and note, and no less filler than it needs."""
    numel = largest_numel(row.shape, [part.spec for part in row.parts.values()])
    filler = count_filler(numel, row.stored_bytes) + draw(st.integers(0, 2))
    crc, note = draw(st.integers(0, 2**32 - 1)), draw(NAMES)
    return TensorRow(
        row.name,
        row.kind,
        row.dtype,
        row.shape,
        row.parts,
        crc,
        filler,
        row.transposed_groups,
        row.extra_zeros,
        note,
    )


@st.composite
def schemata(draw: st.DrawFn) -> Schema:
    names = draw(st.lists(NAMES, unique=True, max_size=5))
    kinds = (keep_rows, constant_rows, scalar_rows, level_rows, factor_rows, spatial_rows)
    rows = {name: draw(st.one_of([rows(name) for rows in kinds])) for name in names}
    aliases = (
        draw(st.dictionaries(NAMES.filter(lambda name: name not in names), st.sampled_from(names)))
        if names
        else {}
    )
    return Schema(rows, aliases)


@given(schemata())
def test_parse_inverts_dump(schema: Schema):
    text = dump(schema)
    found = parse(text)
    assert found == schema
    assert list(found.tensors) == list(schema.tensors)
    assert [list(row.parts) for row in found.tensors.values()] == [
        list(row.parts) for row in schema.tensors.values()
    ]
    assert dump(found) == text


@given(schemata())
def test_what_can_be_read_may_be_written(schema: Schema):
    for row in schema.tensors.values():
        schemas.check_row(row)


def test_the_text_is_the_documented_one():
    row = TensorRow("w", "keep", "float32", (2,), {"values": raw_part((2,), torch.float16)}, 7, note="é")
    envelope = json.loads(dump(Schema({"w": row}, {"v": "w"})))
    assert list(envelope) == ["version", "crc", "schema"]
    packed = base64.b64decode(envelope["schema"])
    assert (envelope["version"], envelope["crc"]) == (1, zlib.crc32(packed))
    assert zlib.decompress(packed).decode() == (
        '{"tensors":[{"name":"w","kind":"keep","dtype":"float32","shape":[2],'
        '"parts":{"values":["raw","float16",[2],4]},"crc":7,"note":"é"}],"aliases":{"v":"w"}}'
    )


def test_usual_values_take_no_room():
    plain = TensorRow("w", "keep", "bool", (), {"values": raw_part((), torch.bool)}, 0)
    fields = schemas._row_to_json(plain)
    assert list(fields) == ["name", "kind", "dtype", "shape", "parts", "crc"]


@pytest.mark.parametrize(
    ("numel", "stored", "filler"),
    [(0, 0, 0), (1, 0, 1), (1024, 0, 1), (1024, 1, 0), (1025, 1, 1), (1 << 20, 3, 1021)],
)
def test_filler_keeps_1024_numbers_a_byte(numel: int, stored: int, filler: int):
    assert count_filler(numel, stored) == filler


def test_a_codebook_larger_than_its_weight_counts():
    parts = [PartSpec((100, 50), torch.int8, 4), PartSpec((50, 1), torch.int8, 4)]
    assert largest_numel((100,), parts) == 5000
    assert largest_numel((100, 100), parts) == 10_000
    assert largest_numel((), []) == 1


@pytest.mark.parametrize("spare", [-1, 0])
def test_a_schema_of_the_largest_size_can_be_read(spare: int, monkeypatch: pytest.MonkeyPatch):
    row = TensorRow("w", "keep", dtype_name(torch.bool), (), {"values": raw_part((), torch.bool)}, 0)
    size = len(zlib.decompress(base64.b64decode(json.loads(dump(Schema({"w": row}, {})))["schema"])))
    text = dump(Schema({"w": row}, {}))
    monkeypatch.setattr(schemas, "MAX_JSON_BYTES", size + spare)
    if spare < 0:
        with pytest.raises(FormatError, match=f"a schema of {size} bytes, allowed are {size - 1}"):
            dump(Schema({"w": row}, {}))
        with pytest.raises(FormatError, match=f"longer than {size - 1} bytes"):
            parse(text)
    else:
        assert parse(dump(Schema({"w": row}, {}))).tensors == {"w": row}
