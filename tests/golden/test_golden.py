"""The golden file: a format change that is not meant, or that forgets old files, fails here."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from factorpack.decoding import decode
from factorpack.format.container import Reader
from factorpack.packed import load
from factorpack.record import DTYPES, Encoded
from tests.format.reference import read_packed, weight_of
from tests.golden.make import ALIASES, BIASES, GAINS, GOLDEN, NORM, tensors, write
from tests.helpers import assert_same_encoded, assert_same_tensor, raw
from tests.tampered import compact, take_apart

TENSORS = tensors()


def exact(encoded: Encoded) -> Tensor:
    """The weight by whole-number and fraction arithmetic, from the formulas W = CZ + mu and W = qs."""
    if encoded.kind == "keep":
        return encoded.parts["values"].to(encoded.dtype)
    if encoded.kind == "constant":
        return torch.full(encoded.shape, encoded.parts["value"].item(), dtype=encoded.dtype)
    parts = {
        name: [[Fraction(x) for x in row] for row in part.tolist()] for name, part in encoded.parts.items()
    }
    bits = encoded.bits.get("indices", 0)
    flat = weight_of(encoded.kind, encoded.shape, encoded.transposed_groups, bits, parts)
    values = torch.tensor([float(value) for value in flat], dtype=torch.float64)
    assert [Fraction(value) for value in values.float().tolist()] == flat
    return values.reshape(encoded.shape).to(encoded.dtype)


def test_names_and_aliases():
    reader = Reader(GOLDEN)
    assert list(reader) == list(TENSORS)
    assert dict(reader.schema.aliases) == ALIASES


@pytest.mark.parametrize("name", TENSORS)
def test_reader_gives_the_parts(name: str):
    assert_same_encoded(Reader(GOLDEN)[name], TENSORS[name])


@pytest.mark.parametrize("name", TENSORS)
def test_weights_are_exact(name: str):
    assert_same_tensor(decode(Reader(GOLDEN)[name]), exact(TENSORS[name]))


def test_state_dict_ties_the_alias():
    state = load(GOLDEN).state_dict()
    assert state["tied.weight"] is state["fc.weight"]


def test_writer_writes_the_same_schema_and_data(tmp_path: Path):
    """Not the same bytes: two builds of zlib may compress the schema differently."""
    write(tmp_path / "new")
    new, old = take_apart((tmp_path / "new").read_bytes()), take_apart(GOLDEN.read_bytes())
    assert compact(new.document) == compact(old.document)
    assert new.entries() == old.entries()


def test_every_oddity_is_in_it():
    document = take_apart(GOLDEN.read_bytes()).document
    rows = document["tensors"]
    codecs = {part[0] for row in rows for part in row["parts"].values()}
    assert codecs == {"raw", "floats", "packed", "ans", "trellis"}
    assert {row["kind"] for row in rows} == {
        "factors",
        "spatial",
        "codewords",
        "scalar",
        "levels",
        "keep",
        "constant",
    }
    assert any(row.get("filler_bytes") for row in rows)
    assert {row.get("transposed_groups", 0) for row in rows} == {0, 1, 2}
    assert any(row.get("extra_zeros") for row in rows)
    assert {bits for row in rows for _, bits, *_ in row["parts"].values() if isinstance(bits, int)} >= {
        1,
        9,
        16,
    }


def test_every_oddity_of_the_entropy_coder_is_in_it():
    pieces = take_apart(GOLDEN.read_bytes())
    rows_alone = pieces.part("conv.weight", "latent")
    assert (rows_alone[0] >> 5, rows_alone[3] > 0, rows_alone[4]) == (0, True, 0)
    both = pieces.part("kernel.weight", "latent")
    assert both[0] >> 5 == 3, "wide and split"
    assert int.from_bytes(both[7:11], "little") == 24
    assert both[5] > 0
    assert both[6] > 0


def test_floats_of_every_type_and_of_long_and_short_mantissas_are_in_it():
    pieces = take_apart(GOLDEN.read_bytes())
    used = {name: pieces.part(name, "values")[0] for name in (NORM, GAINS, BIASES)}
    assert used == {NORM: 6, GAINS: 23, BIASES: 6}
    assert pieces.row(GAINS)["parts"]["values"][1] == "float32"
    assert pieces.row(BIASES)["parts"]["values"][1] == "bfloat16"


def test_an_independent_reader_agrees():
    document, found = read_packed(GOLDEN.read_bytes())
    assert document["aliases"] == ALIASES
    for row in document["tensors"]:
        encoded = TENSORS[row["name"]]
        assert tuple(row["shape"]) == encoded.shape
        assert DTYPES[row["dtype"]] == encoded.dtype
        for name, part in encoded.parts.items():
            expected = part.tolist() if name in encoded.bits else raw(part)
            assert found[row["name"]][name] == expected
