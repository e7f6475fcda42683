"""Schemas that lie, under checksums that are right: refused when the file is opened, by name and reason."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from factorpack.errors import FormatError
from factorpack.format import schema as schemas
from factorpack.format.container import Reader
from factorpack.format.untrusted_json import most_text
from tests.golden.make import GOLDEN, NORM
from tests.helpers import little_memory
from tests.tampered import Pieces, compact, container_of, envelope_of, take_apart

BLOB = GOLDEN.read_bytes()
Tamper = Callable[[Pieces], None]


def field(tensor: str, name: str, value: object) -> Tamper:
    return lambda pieces: pieces.row(tensor).__setitem__(name, value)


def no_field(tensor: str, name: str) -> Tamper:
    return lambda pieces: pieces.row(tensor).__delitem__(name)


CODEC, KIND, SHAPE, BYTES = range(4)


def part(tensor: str, name: str, *changes: tuple[int, object]) -> Tamper:
    def tamper(pieces: Pieces) -> None:
        for index, value in changes:
            pieces.row(tensor)["parts"][name][index] = value

    return tamper


def whole_part(tensor: str, name: str, value: object) -> Tamper:
    return lambda pieces: pieces.row(tensor)["parts"].__setitem__(name, value)


def both(*tampers: Tamper) -> Tamper:
    def tamper(pieces: Pieces) -> None:
        for each in tampers:
            each(pieces)

    return tamper


def aliases(**table: object) -> Tamper:
    return lambda pieces: pieces.document.__setitem__("aliases", table)


def document(name: str, value: object) -> Tamper:
    return lambda pieces: pieces.document.__setitem__(name, value)


def twice(pieces: Pieces) -> None:
    pieces.document["tensors"].append(pieces.row("fc.weight"))


def renamed(tensor: str, name: object) -> Tamper:
    return field(tensor, "name", name)


def bomb(pieces: Pieces) -> None:
    """A codebook of 2^23 x 4096 equal codes, which entropy coding makes five bytes of."""
    rank, tile = 4096, 1 << 23
    parts = {
        "codebook": ["ans", 4, [tile, rank], 5],
        "codebook_scale": ["raw", "float16", [1, rank], 2 * rank],
        "latent": ["ans", 4, [rank, 1], 5],
        "latent_scale": ["raw", "float16", [1, 1], 2],
    }
    pieces.row("conv.weight").update(shape=[tile], parts=parts, extra_zeros=0)
    pieces.streams["conv.weight"] = bytes(12 + 2 * rank)


Cases = dict[str, tuple[Tamper, str | None, str]]

KINDS: Cases = {
    "unknown kind": (field("fc.weight", "kind", "magic"), "fc.weight", "unknown kind 'magic', known are"),
    "kind no text": (field("fc.weight", "kind", ["keep"]), "fc.weight", "kind or note is not text"),
    "another kind": (field("fc.weight", "kind", "factors"), "fc.weight", "found parts"),
    "unknown type": (field("odd", "dtype", "float31"), "odd", "unknown type 'float31', known are float64"),
    "type a list": (field("odd", "dtype", []), "odd", "unknown type []"),
    "complex as real": (
        field("complex", "dtype", "float32"),
        "complex",
        "torch.complex64 values cannot represent a torch.float32 tensor",
    ),
    "integer factors": (
        field("conv.weight", "dtype", "int8"),
        "conv.weight",
        "cannot represent a torch.int8",
    ),
    "note no text": (field("odd", "note", 1), "odd", "kind or note is not text"),
    "note of half a surrogate": (field("odd", "note", "\ud800"), "odd", "kind or note is not text"),
    "a field more": (field("odd", "more", 1), None, "the tensor row holds"),
    "a field less": (no_field("odd", "crc"), None, "the tensor row holds"),
    "checksum wrong": (field("mask", "crc", 1), "mask", "the checksum does not match, the file is damaged"),
    "checksum negative": (field("mask", "crc", -1), "mask", "checksum is -1"),
    "checksum a float": (field("mask", "crc", 1.0), "mask", "checksum is 1.0"),
    "checksum true": (field("mask", "crc", True), "mask", "checksum is True"),
}

SIZES: Cases = {
    "2^47 numbers": (
        both(field("zeros", "shape", [2, 1 << 46]), part("zeros", "codes", (SHAPE, [2, 1 << 46]))),
        "zeros",
        "claims 140737488355328 elements in 12 bytes, allowed are 1024 per byte",
    ),
    "2^47 kept numbers": (
        both(field("odd", "shape", [1 << 47]), part("odd", "values", (SHAPE, [1 << 47]))),
        "odd",
        "28 bytes for a 'raw' part of shape (140737488355328,)",
    ),
    "one number too many for the filler": (
        both(field("zeros", "shape", [1, 12289]), part("zeros", "codes", (SHAPE, [1, 12289]))),
        "zeros",
        "claims 12289 elements in 12 bytes",
    ),
    "a codebook bomb": (bomb, "conv.weight", "claims 34359738368 elements in 8204 bytes"),
    "more than 2^48": (
        field("odd", "shape", [1 << 25, 1 << 25]),
        "odd",
        "has more than 2^48 elements",
    ),
    "an empty giant": (
        both(
            field("empty", "shape", [0, 1 << 40, 1 << 40]),
            part("empty", "values", (SHAPE, [0, 1 << 40, 1 << 40])),
        ),
        "empty",
        "has more than 2^48 elements",
    ),
    "a dimension of 2^48 + 1": (
        field("odd", "shape", [(1 << 48) + 1]),
        "odd",
        "a dimension is 281474976710657",
    ),
    "a giant integer": (field("odd", "shape", [10**4000]), "odd", "a dimension is 1000"),
    "a negative dimension": (field("odd", "shape", [-7]), "odd", "a dimension is -7"),
    "a fractional dimension": (field("odd", "shape", [7.0]), "odd", "a dimension is 7.0"),
    "a true dimension": (field("odd", "shape", [True]), "odd", "a dimension is True"),
    "nine dimensions": (field("steps", "shape", [1] * 9), "steps", "expected at most 8 whole numbers"),
    "a shape of text": (field("odd", "shape", "7"), "odd", "a shape is '7'"),
    "terabytes in a part": (
        part("odd", "values", (BYTES, 1 << 42)),
        "odd",
        "4398046511104 bytes for a 'raw' part",
    ),
    "terabytes of filler": (
        field("odd", "filler_bytes", 1 << 42),
        "odd",
        "disagree on the entries ['odd']",
    ),
    "negative bytes": (part("odd", "values", (BYTES, -1)), "odd", "bytes is -1"),
    "filler too large for its entry": (
        field("zeros", "filler_bytes", 4),
        "factorpack.small",
        "the schema expects",
    ),
    "filler too small for its entry": (
        both(
            field("zeros", "filler_bytes", 2),
            field("zeros", "shape", [2, 5000]),
            part("zeros", "codes", (SHAPE, [2, 5000])),
        ),
        "factorpack.small",
        "the schema expects",
    ),
    "too many extra zeros": (
        field("conv.weight", "extra_zeros", 273),
        "conv.weight",
        "273 extra zeros among 272 codes",
    ),
    "extra zeros of no latent": (field("odd", "extra_zeros", 1), "odd", "1 extra zeros among 0 codes"),
    "many numbers for a part": (
        whole_part("odd", "values", list(range(100_000))),
        "odd",
        "a part is [0, 1, 2, 3, 4, 5, ...]",
    ),
}

PARTS: Cases = {
    "unknown codec": (part("odd", "values", (CODEC, "zip")), "odd", "a part is ['zip'"),
    "codec a list": (part("odd", "values", (CODEC, [])), "odd", "a part is [[]"),
    "raw codes": (part("fc.weight", "codes", (CODEC, "raw")), "fc.weight", "codec 'raw' cannot hold 4"),
    "packed floats": (part("fc.weight", "scale", (CODEC, "packed")), "fc.weight", "cannot hold 'float16'"),
    "entropy-coded floats": (
        part("fc.weight", "scale", (CODEC, "ans")),
        "fc.weight",
        "cannot hold 'float16'",
    ),
    "floats for codes": (
        part("fc.weight", "codes", (CODEC, "floats")),
        "fc.weight",
        "codec 'floats' cannot hold 4",
    ),
    "floats for integers": (part("steps", "values", (CODEC, "floats")), "steps", "cannot hold 'int64'"),
    "floats of a type they do not have": (
        part(NORM, "values", (KIND, "float64")),
        NORM,
        "codec 'floats' cannot hold 'float64'",
    ),
    "no floats": (
        part("empty", "values", (CODEC, "floats")),
        "empty",
        "0 bytes for a 'floats' part of shape (0, 3)",
    ),
    "too many floats": (
        both(field(NORM, "shape", [1 << 17]), part(NORM, "values", (SHAPE, [1 << 17]))),
        NORM,
        "claims 131072 elements in 117 bytes, allowed are 1024 per byte",
    ),
    "0 bits": (part("zeros", "codes", (KIND, 0)), "zeros", "codec 'ans' cannot hold 0"),
    "1 bit": (part("zeros", "codes", (KIND, 1)), "zeros", "'codes' has 1 bits"),
    "17 bits": (part("zeros", "codes", (KIND, 17)), "zeros", "codec 'ans' cannot hold 17"),
    "wide codes in too few bytes": (
        part("wide.weight", "codes", (KIND, 15)),
        "wide.weight",
        "30 bytes for a 'packed' part",
    ),
    "a constant of another type": (
        part("floor", "value", (KIND, "bfloat16")),
        "floor",
        "torch.bfloat16 values cannot represent a torch.float16 tensor",
    ),
    "a constant of two values": (
        both(part("tracked", "value", (SHAPE, [2]), (BYTES, 16)), field("tracked", "shape", [2])),
        "tracked",
        "'value' has shape (2,), expected (1,)",
    ),
    "a constant of no dimension": (
        part("tracked", "value", (SHAPE, [])),
        "tracked",
        "'value' has shape (), expected (1,)",
    ),
    "a constant code": (
        whole_part("tracked", "value", ["packed", 8, [1], 1]),
        "tracked",
        "a constant is stored as it is",
    ),
    "a constant kept": (field("tracked", "kind", "keep"), "tracked", "found parts ['value']"),
    "one value for too much": (
        field("floor", "shape", [1 << 30]),
        "floor",
        "claims 1073741824 elements in 7 bytes, allowed are 1024 per byte",
    ),
    "one scale in a row of two": (
        part("kernel.weight", "latent_scale", (SHAPE, [1, 2]), (BYTES, 4)),
        "kernel.weight",
        "'latent_scale' has shape (1, 2)",
    ),
    "true bits": (part("zeros", "codes", (KIND, True)), "zeros", "bits is True"),
    "other bits": (part("fc.weight", "codes", (KIND, 5)), "fc.weight", "120 bytes for a 'packed' part"),
    "part type unknown": (part("odd", "values", (KIND, "float")), "odd", "unknown type 'float'"),
    "part type null": (part("odd", "values", (KIND, None)), "odd", "unknown type None"),
    "part a table": (whole_part("odd", "values", {}), "odd", "a part is {}"),
    "part too short": (whole_part("odd", "values", ["raw"]), "odd", "a part is ['raw']"),
    "no parts": (field("empty", "parts", {}), "empty", "found parts [], needed are ['values']"),
    "parts a list": (field("odd", "parts", []), "odd", "parts is not a table"),
    "an extra part": (
        whole_part("odd", "more", ["raw", "int8", [0], 0]),
        "odd",
        "found parts ['more', 'values']",
    ),
    "a missing part": (
        lambda pieces: pieces.row("fc.weight")["parts"].__delitem__("scale"),
        "fc.weight",
        "found parts ['codes']",
    ),
    "kept codes": (
        whole_part("mask", "values", ["packed", 8, [3], 3]),
        "mask",
        "kept values are stored as they are",
    ),
    "other shape of values": (
        part("bf16", "values", (SHAPE, [3, 2])),
        "bf16",
        "'values' has shape (3, 2), expected (2, 3)",
    ),
    "other shape of codes": (part("fc.weight", "codes", (SHAPE, [40, 6])), "fc.weight", "expected (6, 40)"),
    "codes not a matrix": (
        part("fc.weight", "codes", (SHAPE, [240])),
        "fc.weight",
        "expected a matrix of codes",
    ),
    "other shape of scales": (
        part("fc.weight", "scale", (SHAPE, [1, 6])),
        "fc.weight",
        "'scale' has shape (1, 6)",
    ),
    "integer scales": (part("fc.weight", "scale", (KIND, "int16")), "fc.weight", "'scale' is torch.int16"),
    "bfloat16 scales": (
        part("fc.weight", "scale", (KIND, "bfloat16")),
        "fc.weight",
        "'scale' is torch.bfloat16",
    ),
    "no entropy-coded numbers": (
        part("zeros", "codes", (SHAPE, [0, 6000])),
        "zeros",
        "5 bytes for a 'ans' part of shape (0, 6000)",
    ),
    "rank above tile": (
        part("up.weight", "codebook", (SHAPE, [3, 8])),
        "up.weight",
        "a codebook of 3 x 8 does not suit a weight of 192 elements",
    ),
    "rank 0": (
        part("up.weight", "codebook", (SHAPE, [8, 0]), (BYTES, 0)),
        "up.weight",
        "a codebook of 8 x 0 does not suit",
    ),
    "other shape of latents": (
        part("up.weight", "latent", (SHAPE, [24, 3])),
        "up.weight",
        "expected (3, 24)",
    ),
    "other shape of latent scales": (
        part("conv.weight", "latent_scale", (SHAPE, [2, 4])),
        "conv.weight",
        "'latent_scale' has shape (2, 4)",
    ),
    "other shape of the mean": (
        part("conv.weight", "mean", (SHAPE, [1, 16])),
        "conv.weight",
        "expected (16, 1)",
    ),
    "other shape of codebook scales": (
        part("up.weight", "codebook_scale", (SHAPE, [3, 1])),
        "up.weight",
        "'codebook_scale' has shape (3, 1)",
    ),
    "integer mean": (part("conv.weight", "mean", (KIND, "int32")), "conv.weight", "'mean' is torch.int32"),
    "empty factors": (field("up.weight", "shape", [4, 3, 0, 4]), "up.weight", "has no factors"),
    "empty codes": (field("fc.weight", "shape", [6, 0]), "fc.weight", "has no channels to quantize"),
    "codes of one number": (field("fc.weight", "shape", []), "fc.weight", "has no channels to quantize"),
    "groups of a matrix": (
        field("fc.weight", "transposed_groups", 2),
        "fc.weight",
        "not a transposed convolution",
    ),
    "groups that do not divide": (field("up.weight", "transposed_groups", 3), "up.weight", "of 3 groups"),
    "negative groups": (field("up.weight", "transposed_groups", -2), "up.weight", "transposed_groups is -2"),
}

NAMES: Cases = {
    "a tensor twice": (twice, "fc.weight", "appears twice in the schema"),
    "name of the shared entry": (
        renamed("steps", "factorpack.small"),
        "factorpack.small",
        "expected text other than",
    ),
    "name of the metadata": (renamed("steps", "__metadata__"), "__metadata__", "expected text other than"),
    "name a number": (renamed("steps", 5), None, "a tensor is named 5"),
    "name a list": (renamed("steps", ["steps"]), None, "a tensor is named ['steps']"),
    "name of half a surrogate": (renamed("steps", "\udfff"), None, "a tensor is named '\\udfff'"),
    "alias of nothing": (
        aliases(tied="none"),
        None,
        "alias 'tied' of 'none': expected a new name for a tensor",
    ),
    "alias of itself": (aliases(tied="tied"), None, "alias 'tied' of 'tied'"),
    "aliases in a ring": (aliases(a="b", b="a"), None, "alias 'a' of 'b'"),
    "alias of an alias": (aliases(a="mask", b="a"), None, "alias 'b' of 'a'"),
    "alias over a tensor": (aliases(mask="steps"), None, "alias 'mask' of 'steps'"),
    "alias of a list": (aliases(tied=["mask"]), None, "a table or a list besides those of the tensors"),
    "alias of null": (aliases(tied=None), None, "alias 'tied' of None"),
    "alias over the shared entry": (
        aliases(**{"factorpack.small": "mask"}),
        None,
        "named 'factorpack.small'",
    ),
    "aliases a list": (document("aliases", []), None, "its aliases not a table"),
    "tensors a table": (document("tensors", {}), None, "the schema's tensors are not a list"),
    "a row of text": (document("tensors", ["mask"]), None, "the tensor row holds 'str'"),
    "a key more": (document("more", 1), None, "the schema holds ['aliases', 'more', 'tensors']"),
    "an entry missing": (
        both(document("tensors", []), aliases()),
        None,
        "disagree on the entries ['factorpack.small']",
    ),
}


@pytest.mark.parametrize(
    ("tamper", "tensor", "message"),
    [pytest.param(*case, id=name) for cases in (KINDS, SIZES, PARTS, NAMES) for name, case in cases.items()],
)
def test_hostile_schemas(tmp_path: Path, tamper: Tamper, tensor: str | None, message: str):
    pieces = take_apart(BLOB)
    tamper(pieces)
    (tmp_path / "file").write_bytes(pieces.build())
    with (
        little_memory(),
        pytest.raises(FormatError) as caught,
    ):
        Reader(tmp_path / "file")
    found = str(caught.value)
    assert message in found
    assert tensor is None or repr(tensor) in found
    assert len(found) < 400


def written(path: Path, schema_json: bytes) -> Path:
    path.write_bytes(container_of(envelope_of(schema_json), take_apart(BLOB).entries()))
    return path


def schema_json() -> bytes:
    return compact(take_apart(BLOB).document)


TEXTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "no JSON": (lambda: b"{", "not valid JSON"),
    "no UTF-8": (lambda: schema_json().replace(b"mask", b"ma\xffk"), "not valid JSON"),
    "text behind": (lambda: schema_json() + b"{}", "not valid JSON"),
    "deep lists": (lambda: b"[" * 1_000_000, "not valid JSON"),
    "deep tables": (lambda: b'{"a":' * 1_000_000, "not valid JSON"),
    "deep and closed": (lambda: b"[" * 500_000 + b"]" * 500_000, "not valid JSON"),
    "ten thousand digits": (
        lambda: schema_json().replace(b'"shape":[7]', b'"shape":[' + b"9" * 10_000 + b"]"),
        "valid JSON",
    ),
    "infinity": (lambda: schema_json().replace(b'"shape":[7]', b'"shape":[1e999]'), "a dimension is inf"),
    "not a number": (lambda: schema_json().replace(b'"shape":[7]', b'"shape":[NaN]'), "a dimension is nan"),
    "a key twice": (
        lambda: schema_json().replace(b'"kind":"keep"', b'"kind":"keep","kind":"keep"', 1),
        "the key 'kind' appears twice",
    ),
    "a part twice": (
        lambda: schema_json().replace(b'"values":', b'"values":["raw","int8",[],1],"values":', 1),
        "the key 'values' appears twice",
    ),
    "an alias twice": (
        lambda: schema_json().replace(b'"aliases":{', b'"aliases":{"tied.weight":"mask",'),
        "the key 'tied.weight' appears twice",
    ),
    "a list": (lambda: b"[]", "the schema holds 'list'"),
    "null": (lambda: b"null", "the schema holds 'NoneType'"),
}


@pytest.mark.parametrize(("make", "message"), TEXTS.values(), ids=TEXTS)
def test_hostile_text(tmp_path: Path, make: Callable[[], bytes], message: str):
    written(tmp_path / "file", make())
    with little_memory(), pytest.raises(FormatError, match=re.escape(message)):
        Reader(tmp_path / "file")


def test_a_compressed_bomb_stops_at_the_limit(tmp_path: Path):
    """A quarter of a gigabyte is a quarter of a megabyte on disk, and is never unpacked beyond the limit."""
    packer = zlib.compressobj(9)
    bomb = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(256)), packer.flush()])
    metadata = json.dumps({"version": 1, "crc": zlib.crc32(bomb), "schema": base64.b64encode(bomb).decode()})
    (tmp_path / "file").write_bytes(container_of(metadata, {}))
    limit = most_text((tmp_path / "file").stat().st_size)
    assert limit < schemas.MAX_JSON_BYTES
    with (
        little_memory(3 * limit),
        pytest.raises(FormatError, match=f"cut short, or longer than {limit} bytes"),
    ):
        Reader(tmp_path / "file")


@pytest.mark.parametrize("cut", [1, 4, 20])
def test_a_schema_cut_short(cut: int):
    envelope: dict[str, Any] = json.loads(envelope_of(schema_json()))
    packed = base64.b64decode(envelope["schema"])[:-cut]
    with pytest.raises(FormatError, match="cut short"):
        schemas.parse(json.dumps(resigned(envelope, packed)))


def test_bytes_behind_the_schema():
    envelope: dict[str, Any] = json.loads(envelope_of(schema_json()))
    packed = base64.b64decode(envelope["schema"]) + b"more"
    with pytest.raises(FormatError, match="cut short, or longer"):
        schemas.parse(json.dumps(resigned(envelope, packed)))


def resigned(envelope: dict[str, Any], packed: bytes) -> dict[str, Any]:
    return envelope | {"crc": zlib.crc32(packed), "schema": base64.b64encode(packed).decode()}


def test_spare_bits_of_base64_are_not_ignored():
    """QQ== and QR== are the same byte to most decoders."""
    for spare in range(8):
        envelope = json.loads(envelope_of(schema_json() + b" " * spare))
        if envelope["schema"].endswith("="):
            break
    text = envelope["schema"].rstrip("=")
    other = text[:-1] + chr(ord(text[-1]) + 1) + "=" * (len(envelope["schema"]) - len(text))
    with pytest.raises(FormatError, match="checksum does not match"):
        schemas.parse(json.dumps(envelope | {"schema": other}))
