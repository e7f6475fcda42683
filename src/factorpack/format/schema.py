"""The schema: what the file declares about every tensor, all checked before a byte of data is read."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from factorpack.decoding import check
from factorpack.errors import FormatError
from factorpack.format.bitpack import bit_string_bytes
from factorpack.format.stored_rows import MAX_ROW_BYTES, StoredRows, cut_rows
from factorpack.format.streams import CODECS, FLOATS, PACKED, RAW, TRELLIS, raw_size
from factorpack.format.untrusted_json import (
    Extent,
    inflate,
    least_file_bytes,
    most_text,
    most_values,
    parse_json,
    short,
    shown,
)
from factorpack.kinds import KINDS
from factorpack.kinds.base import PartSpec, Specs
from factorpack.quantize.mantissas import FLOAT_TYPES
from factorpack.quantize.trellis import MEMORY
from factorpack.quantize.uniform import MAX_STORED_BITS, code_dtype
from factorpack.record import DTYPES, dtype_name
from factorpack.tiles import Layout

VERSION = 1
MAX_JSON_BYTES = 1 << 25
MAX_DIMENSIONS = 8
EXPANSION = 1024
"""A tensor of m elements takes at least m / EXPANSION bytes, so that no small file can request much memory."""
OPERATIONS = 1 << 18
"""A tensor that takes m multiplications to decode takes at least m / OPERATIONS bytes: no file takes long."""
FREE_ALIASED, LEAST_ALIASED = 1 << 20, 1 << 14
"""Elements of aliases that any file may have; EXPANSION holds for the others. An alias counts as some at least."""
SMALL = "factorpack.small"
RESERVED = (SMALL, "__metadata__")
"""Names the container uses itself."""
_MAX_INT = 1 << 48


@dataclass(frozen=True, slots=True)
class PartRow:
    """One part's stream."""

    codec: str
    spec: PartSpec
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Everything about a tensor except its data. The parts follow each other in the tensor's stream."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    parts: Mapping[str, PartRow]
    crc: int
    filler_bytes: int = 0
    transposed_groups: int = 0
    extra_zeros: int = 0
    note: str = ""
    trellis: int = 0
    stored_bytes: int = field(init=False)
    """Size of the whole stream."""

    @property
    def specs(self) -> dict[str, PartSpec]:
        return {name: part.spec for name, part in self.parts.items()}

    @property
    def declared_bytes(self) -> int:
        """Bytes of the decoded tensor, or of its largest part in the same type."""
        return DTYPES[self.dtype].itemsize * largest_numel(self.shape, self.specs.values())

    def __post_init__(self) -> None:
        parts = sum(part.stored_bytes for part in self.parts.values())
        object.__setattr__(self, "stored_bytes", parts + self.filler_bytes)


@dataclass(frozen=True, slots=True)
class Schema:
    tensors: Mapping[str, TensorRow]
    aliases: Mapping[str, str]

    @property
    def declared_bytes(self) -> int:
        """Bytes of all decoded tensors, under all their names.

        Where a tensor has a part with more elements than itself, these count in its place.
        """
        own = sum(row.declared_bytes for row in self.tensors.values())
        return own + sum(count * row.declared_bytes for row, count in self._aliased())

    @property
    def aliased_elements(self) -> int:
        """Elements that aliases add to the decoded tensors, as the expansion rule counts them."""
        return sum(count * max(math.prod(row.shape), LEAST_ALIASED) for row, count in self._aliased())

    def _aliased(self) -> Iterator[tuple[TensorRow, int]]:
        """Every tensor that has aliases, and their number."""
        return ((self.tensors[name], count) for name, count in Counter(self.aliases.values()).items())


def largest_numel(shape: tuple[int, ...], parts: Iterable[PartSpec]) -> int:
    """Elements of the largest array that decoding a tensor makes: a codebook may be larger than its weight."""
    return max([math.prod(shape), *(math.prod(part.shape) for part in parts)])


def count_filler(numel: int, stored_bytes: int, operations: int = 0) -> int:
    """Zero bytes that a tensor's stream needs at its end to satisfy the rules of EXPANSION and OPERATIONS."""
    least = max(math.ceil(numel / EXPANSION), math.ceil(operations / OPERATIONS))
    return max(0, least - stored_bytes)


def check_row(row: TensorRow) -> None:
    """Raises FormatError where `parse` would, so that every written file can be read."""
    fields = _row_to_json(row)
    _checked_row(fields)
    size = len(_compact(fields))
    if size > MAX_ROW_BYTES:
        raise FormatError(
            f"tensor {shown(row.name)}: a row of {size} bytes, allowed are {MAX_ROW_BYTES}: its name or note is long"
        )


def check_aliases(names: Container[str], aliases: Mapping[str, object]) -> None:
    for alias, target in aliases.items():
        _name(alias)
        if alias in names or not isinstance(target, str) or target not in names:
            raise FormatError(f"alias {shown(alias)} of {short(target)}: expected a new name for a tensor")


def check_expansion(schema: Schema, file_bytes: int) -> None:
    """Raises FormatError where aliases make more of a file of this size than a reader allows."""
    found, most = schema.aliased_elements, FREE_ALIASED + EXPANSION * file_bytes
    if found > most:
        raise FormatError(
            f"{len(schema.aliases)} aliases add {found} elements, allowed are {most}: {FREE_ALIASED}, and "
            f"{EXPANSION} for each of the file's {file_bytes} bytes"
        )


def dump(schema: Schema) -> str:
    """The schema as it is stored in the container's metadata."""
    return dump_measured(schema)[0]


def dump_measured(schema: Schema) -> tuple[str, int]:
    """`dump`, and the bytes of the smallest file with which a reader accepts it."""
    document = {"tensors": [*map(_row_to_json, schema.tensors.values())], "aliases": dict(schema.aliases)}
    text = _compact(document)
    if len(text) > MAX_JSON_BYTES:
        raise FormatError(f"a schema of {len(text)} bytes, allowed are {MAX_JSON_BYTES}")
    packed = zlib.compress(text, 9)
    envelope = {"version": VERSION, "crc": zlib.crc32(packed), "schema": base64.b64encode(packed).decode()}
    aliased = math.ceil((schema.aliased_elements - FREE_ALIASED) / EXPANSION)
    return json.dumps(envelope, separators=(",", ":")), max(aliased, least_file_bytes(text))


def _compact(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def parse(metadata: str, file_bytes: int = 0) -> Schema:
    """The inverse of `dump`, for untrusted text from a file of this size; 0 allows what every file may have."""
    if not metadata.isascii():
        raise FormatError("the schema cannot be read: its envelope is not ASCII")
    envelope = _object(parse_json(metadata, file_bytes), "envelope", {"version", "crc", "schema"})
    if _integer(envelope["version"], "the file version") != VERSION:
        raise FormatError(f"file version {envelope['version']}, this reader knows version {VERSION}")
    crc = _integer(envelope["crc"], "the schema's checksum")
    most_bytes = min(MAX_JSON_BYTES, most_text(file_bytes))
    pieces = inflate(envelope.pop("schema"), crc, most_bytes)
    del metadata  # it and the envelope are as long as the file
    cut = cut_rows(pieces, Extent(most_values(file_bytes)), file_bytes)
    document = _object(cut.rest, "schema", {"tensors", "aliases"})
    if not isinstance(document["tensors"], list) or not isinstance(document["aliases"], dict):
        raise FormatError("the schema's tensors are not a list, or its aliases not a table")
    for item in document["tensors"]:  # what is no table was not cut
        _checked_row(item)
    rows = StoredRows(cut, _checked_row)
    check_aliases(rows, document["aliases"])
    schema = Schema(rows, document["aliases"])
    check_expansion(schema, file_bytes)
    return schema


def _object(
    value: object, what: str, needed: set[str], optional: frozenset[str] = frozenset()
) -> dict[str, Any]:
    if not isinstance(value, dict) or not needed <= set(value) <= needed | optional:
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise FormatError(f"the {what} holds {short(found)}, expected {sorted(needed)}")
    return value


_OPTIONAL = {"filler_bytes": 0, "transposed_groups": 0, "extra_zeros": 0, "note": "", "trellis": 0}


def _row_to_json(row: TensorRow) -> dict[str, Any]:
    parts = {
        name: [
            part.codec,
            part.spec.bits or dtype_name(part.spec.dtype),
            list(part.spec.shape),
            part.stored_bytes,
        ]
        for name, part in row.parts.items()
    }
    shape = list(row.shape)
    fields = {"name": row.name, "kind": row.kind, "dtype": row.dtype, "shape": shape, "parts": parts}
    extras = {key: getattr(row, key) for key, usual in _OPTIONAL.items() if getattr(row, key) != usual}
    return {**fields, "crc": row.crc, **extras}


def _checked_row(item: object) -> TensorRow:
    """One row: every field's type and range is checked, and the parts against each other."""
    fields = _object(
        item, "tensor row", {"name", "kind", "dtype", "shape", "parts", "crc"}, frozenset(_OPTIONAL)
    )
    _name(fields["name"])
    try:
        return _row(fields)
    except FormatError as error:
        raise FormatError(f"tensor {shown(fields['name'])}: {error}") from error


def _row(fields: dict[str, Any]) -> TensorRow:
    kind, dtype, parts, note = fields["kind"], fields["dtype"], fields["parts"], fields.get("note", "")
    if not isinstance(kind, str) or not isinstance(parts, dict) or not _is_text(note):
        raise FormatError("kind or note is not text, or parts is not a table")
    row = TensorRow(
        name=fields["name"],
        kind=kind,
        dtype=_dtype_name(dtype),
        shape=_shape(fields["shape"]),
        parts={name: _part(value) for name, value in parts.items()},
        crc=_integer(fields["crc"], "checksum"),
        filler_bytes=_integer(fields.get("filler_bytes", 0), "filler_bytes"),
        transposed_groups=_integer(fields.get("transposed_groups", 0), "transposed_groups"),
        extra_zeros=_integer(fields.get("extra_zeros", 0), "extra_zeros"),
        note=note,
        trellis=_integer(fields.get("trellis", 0), "trellis"),
    )
    specs = row.specs
    numel = largest_numel(row.shape, specs.values())
    if numel > EXPANSION * row.stored_bytes:
        raise FormatError(
            f"claims {numel} elements in {row.stored_bytes} bytes, allowed are {EXPANSION} per byte"
        )
    check(row.kind, Layout(row.shape, row.transposed_groups), DTYPES[row.dtype], specs)
    operations = KINDS[row.kind].operations(row.shape, specs)
    if operations > OPERATIONS * row.stored_bytes:
        raise FormatError(
            f"takes {operations} multiplications in {row.stored_bytes} bytes, allowed are {OPERATIONS} per byte"
        )
    _check_zeros(row, specs)
    _check_trellis(row)
    return row


def _check_zeros(row: TensorRow, specs: Specs) -> None:
    part = KINDS[row.kind].threshold_part
    codes = 0 if part is None else math.prod(specs[part].shape)
    if row.extra_zeros > codes:
        raise FormatError(f"claims {row.extra_zeros} extra zeros among {codes} codes")


def _check_trellis(row: TensorRow) -> None:
    """A trellis has a known number of states, and codes the path part of its tensor and no other."""
    if row.trellis not in (0, *MEMORY):
        raise FormatError(f"a trellis of {row.trellis} states, known are {', '.join(map(str, MEMORY))}")
    coded = [name for name, part in row.parts.items() if part.codec == TRELLIS]
    expected = [name for name in row.parts if name == KINDS[row.kind].path_part and row.trellis]
    if coded != expected or (row.trellis and not coded):
        raise FormatError(f"{row.trellis} trellis states and {coded} coded as a path, expected {expected}")


def _part(value: object) -> PartRow:
    if not isinstance(value, list) or len(value) != 4 or value[0] not in CODECS:
        raise FormatError(f"a part is {short(value)}, expected [codec, type, shape, bytes]")
    codec, kind, shape, stored_bytes = value
    is_codes = isinstance(kind, int)
    bits = _integer(kind, "bits") if is_codes else 0
    dtype = code_dtype(bits) if is_codes else DTYPES[_dtype_name(kind)]
    spec = PartSpec(_shape(shape), dtype, bits)
    part = PartRow(codec, spec, _integer(stored_bytes, "bytes"))
    count = math.prod(spec.shape)
    holds_codes = codec not in (RAW, FLOATS)
    is_allowed = 1 <= bits <= MAX_STORED_BITS if is_codes else codec == RAW or dtype in FLOAT_TYPES
    if holds_codes != is_codes or not is_allowed:
        raise FormatError(f"codec {codec!r} cannot hold {kind!r}")
    expected = {RAW: raw_size(spec), PACKED: bit_string_bytes(count, bits)}.get(codec, part.stored_bytes)
    if part.stored_bytes != expected or (codec not in (RAW, PACKED) and count == 0):
        raise FormatError(f"{part.stored_bytes} bytes for a {codec!r} part of shape {spec.shape}")
    return part


def _is_text(value: object) -> bool:
    """Whether a value is a string that can be written: JSON can hold half a surrogate pair."""
    if not isinstance(value, str):
        return False
    return value.isascii() or value.encode(errors="replace").decode() == value


def _name(value: object) -> None:
    if not _is_text(value) or value in RESERVED:
        raise FormatError(f"a tensor is named {short(value)}: expected text other than {RESERVED}")


def _dtype_name(value: object) -> str:
    if not isinstance(value, str) or value not in DTYPES:
        raise FormatError(f"unknown type {short(value)}, known are {', '.join(DTYPES)}")
    return value


def _integer(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT:
        raise FormatError(f"{what} is {short(value)}, expected a whole number from 0 to 2^48")
    return value


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise FormatError(f"a shape is {short(value)}, expected at most {MAX_DIMENSIONS} whole numbers")
    shape = tuple(_integer(size, "a dimension") for size in value)
    # The other dimensions of an empty tensor count too: torch multiplies them into strides.
    if math.prod(filter(None, shape)) > _MAX_INT:
        raise FormatError(f"a shape of {shape} has more than 2^48 elements")
    return shape
