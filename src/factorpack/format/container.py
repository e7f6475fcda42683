"""The container: a safetensors file of byte streams, written beside its target and renamed, read lazily."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from factorpack.decoding import check, specs
from factorpack.errors import FormatError, SourceError
from factorpack.format import schema as schemas
from factorpack.format.atomic import atomic_write
from factorpack.format.encode_workers import EncodeCodes, encode_codes
from factorpack.format.safetensors_file import SafetensorsFile
from factorpack.format.schema import RESERVED, SMALL, PartRow, Schema, TensorRow
from factorpack.format.stored_rows import StoredRows
from factorpack.format.streams import decode_part, encode_part, raw_bytes, split_of, states_of
from factorpack.format.untrusted_json import short, shown
from factorpack.kinds import KINDS
from factorpack.record import DTYPES, Encoded, dtype_name

METADATA_KEY = "factorpack"
OTHER_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".npz", ".gguf", ".onnx")
"""Names of files that other programs open as something else than safetensors."""
SMALL_BYTES = 16384
"""Smaller streams share one entry: a separate entry costs about 100 bytes of header."""
_WORTH_THREADS, _RUN_BYTES = 1 << 24, 1 << 22
"""Bytes of a file that threads check when it is opened, and of streams that one checks at a time."""

SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def safetensors_header(
    entries: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str], least_bytes: int = 0
) -> bytes:
    """The header of a safetensors file whose entries, (name, type, shape, bytes), follow in this order.

    Spaces at its end make it `least_bytes` long, where it is shorter.
    """
    table: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name, kind, shape, count in entries:
        table[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, start + count]}
        start += count
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * max(0, least_bytes - len(text) - 8)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def is_packed(path: str | Path) -> bool:
    """Whether a file claims to be a packed file, complete or not."""
    try:
        return METADATA_KEY in SafetensorsFile(Path(path)).metadata
    except FormatError:
        return False


def check_target(path: Path) -> None:
    """Refuses a path that no file can be written to, before there is work to lose."""
    if not path.parent.is_dir():
        raise SourceError(f"there is no folder {path.parent} to write {path.name} into")
    if path.is_dir():
        raise SourceError(f"{path} is a folder, expected a file to write")
    if path.name == "-":
        raise SourceError("'-' is no file: a result cannot go to standard output, name a file to write")
    if path.exists() and not path.is_file():
        raise SourceError(f"{path} is a device or a pipe, expected a file to write")
    if not os.access(path.parent, os.W_OK):
        raise SourceError(
            f"{path.name} cannot be written: the folder {path.parent} is read-only for this user"
        )


def check_ending(path: Path) -> None:
    """Refuses a name that would make other programs open a safetensors file as something else."""
    if path.suffix.lower() in OTHER_ENDINGS:
        raise SourceError(
            f"{path.name} ends in {path.suffix!r}, and what is written is a safetensors file: "
            f"name it {path.with_suffix('.safetensors').name}"
        )


def file_header(rows: Sequence[TensorRow], aliases: Mapping[str, str]) -> bytes:
    """What a packed file of these tensors begins with; their streams follow `sort_for_file`."""
    schemas.check_aliases({row.name for row in rows}, aliases)
    metadata, file_bytes = schemas.dump_measured(Schema({row.name: row for row in rows}, aliases))
    large = {row.name: row.stored_bytes for row in rows if not _is_small(row.stored_bytes)}
    stream_bytes = sum(row.stored_bytes for row in rows)
    sizes = _with_small(large, stream_bytes - sum(large.values()))
    entries = [(name, "U8", (size,), size) for name, size in sizes.items()]
    return safetensors_header(entries, {METADATA_KEY: metadata}, file_bytes - stream_bytes)


def sort_for_file(rows: Iterable[TensorRow]) -> list[TensorRow]:
    """Rows in file order: the large streams, then the small ones that share an entry."""
    return sorted(rows, key=lambda row: _is_small(row.stored_bytes))


class Writer:
    """Writes a packed file tensor by tensor and holds none: call `add` or `put`, then leave the block.

    >>> with Writer(path) as writer:  # doctest: +SKIP
    ...     writer.add("conv1.weight", encoded)
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._rows: list[TensorRow] = []
        self._names: set[str] = set()
        self._aliases: dict[str, str] = {}
        self._small: list[bytes] = []

    def __enter__(self) -> Writer:
        check_target(self._path)
        # The header comes first and is known last, so the streams wait in an unnamed file.
        self._spool = tempfile.TemporaryFile(dir=self._path.parent)
        return self

    def add(self, name: str, encoded: Encoded) -> None:
        self.take_name(name)
        try:
            row, stream = stored(name, encoded)
        except FormatError as error:
            error.add_note(f"while writing tensor {name!r}")
            raise
        self.put(row, stream)

    def take_name(self, name: str) -> None:
        """Refuses the name of a tensor that cannot be added, before it is encoded."""
        if name in RESERVED:
            raise SourceError(f"a tensor cannot be named {name!r}: the file format uses that name")
        if name in self._names:
            raise SourceError(f"tensor {name!r} has been added already")
        self._names.add(name)

    def put(self, row: TensorRow, stream: bytes) -> None:
        """Writes a tensor that is encoded already and whose name is taken."""
        self._rows.append(row)
        if _is_small(row.stored_bytes):
            self._small.append(stream)
        else:
            self._spool.write(stream)

    def alias(self, name: str, target: str) -> None:
        """Records that tensor `name` is the same as `target`, a tensor that is added."""
        self._aliases[name] = target

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):  # an error about a full disk does not name the file
            error.add_note(f"while writing {self._path}")
        with self._spool:
            if error is None:
                self._finish()

    def _finish(self) -> None:
        self._spool.write(b"".join(self._small))
        with atomic_write(self._path) as file:
            file.write(file_header(self._rows, self._aliases))
            self._spool.seek(0)
            shutil.copyfileobj(self._spool, file, 1 << 20)


class Reader(Mapping[str, Encoded]):
    """The tensors of a packed file, each decoded to an `Encoded` when it is read.

    Opening checks the container, the schema and every checksum. The file's own size bounds every allocation,
    and nothing in the file is ever executed. `max_bytes` refuses a file that declares more decoded bytes.
    A tensor's checksum is checked again when it is read, so a file that has changed since is found.
    """

    def __init__(self, path: str | Path, max_bytes: int | None = None) -> None:
        self.path = Path(path)
        self._file = SafetensorsFile(self.path)
        self.file_bytes = self._file.bytes
        if METADATA_KEY not in self._file.metadata and self._file.entries:
            raise FormatError(
                f"{self.path} is not a packed file: it holds plain weights, which `factorpack compress` packs"
            )
        if set(self._file.metadata) != {METADATA_KEY}:
            raise FormatError(
                f"{self.path} is not a packed file: its metadata holds {short(sorted(self._file.metadata))}, "
                f"expected {METADATA_KEY!r} alone"
            )
        self.schema = schemas.parse(self._file.metadata.pop(METADATA_KEY), self.file_bytes)
        if max_bytes is not None and self.schema.declared_bytes > max_bytes:
            raise FormatError(
                f"{self.path} declares {self.schema.declared_bytes} decoded bytes, allowed are {max_bytes}",
                found=self.schema.declared_bytes,
                allowed=max_bytes,
            )
        assert isinstance(self.schema.tensors, StoredRows)
        self.rows = self.schema.tensors
        self._starts = _stream_starts(self.rows, self._file)
        self._check_streams()

    def _check_streams(self) -> None:
        """Every checksum, in order; threads read a large file, a run of streams each."""
        if self.file_bytes < _WORTH_THREADS:
            self._check_run(range(len(self.rows)))
            return
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for _ in pool.map(self._check_run, _runs(self.rows.stored_bytes)):
                pass  # the first error is raised

    def _check_run(self, numbers: range) -> None:
        for number in numbers:
            self._stream(number)

    @property
    def header_bytes(self) -> int:
        """Bytes of the file that belong to no tensor's stream."""
        return self.file_bytes - sum(self.rows.stored_bytes)

    def __getitem__(self, name: str) -> Encoded:
        row = self.rows[name]
        stream = self._stream(self.rows.number(name))
        try:
            return read_row(row, stream)
        except FormatError as error:
            raise FormatError(f"tensor {shown(name)}: {error}", tensor=name) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __contains__(self, name: object) -> bool:
        return name in self.rows  # a Mapping would decode the tensor

    def __len__(self) -> int:
        return len(self.rows)

    def stream(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes as they are stored."""
        return np.frombuffer(self._stream(self.rows.number(name)), np.uint8)

    def _stream(self, number: int) -> bytes:
        """A tensor's bytes as they are in the file now, with the checksum that they had when it was written."""
        stream = self._file.read(self._starts[number], self.rows.stored_bytes[number])
        if zlib.crc32(stream) != self.rows.crcs[number]:
            name = next(islice(self.rows, number, None))
            raise FormatError(
                f"tensor {shown(name)}: the checksum does not match, the file is damaged", tensor=name
            )
        return stream


def stored(name: str, encoded: Encoded, encode: EncodeCodes = encode_codes) -> tuple[TensorRow, bytes]:
    """A tensor's row of the schema and its stream."""
    check(encoded.kind, encoded.layout, encoded.dtype, specs(encoded))
    KINDS[encoded.kind].check_values(encoded)
    streams: list[bytes] = []
    parts: dict[str, PartRow] = {}
    for part_name, spec in specs(encoded).items():
        split, states = split_of(encoded, part_name), states_of(encoded, part_name)
        codec, data = encode_part(encoded.parts[part_name], spec.bits, split, states, encode)
        parts[part_name] = PartRow(codec, spec, len(data))
        streams.append(data)
    numel = schemas.largest_numel(encoded.shape, specs(encoded).values())
    operations = KINDS[encoded.kind].operations(encoded.shape, specs(encoded))
    filler_bytes = schemas.count_filler(numel, sum(map(len, streams)), operations)
    stream = b"".join([*streams, bytes(filler_bytes)])
    row = TensorRow(
        name,
        encoded.kind,
        dtype_name(encoded.dtype),
        encoded.shape,
        parts,
        zlib.crc32(stream),
        filler_bytes,
        encoded.transposed_groups,
        encoded.extra_zeros,
        encoded.note,
        encoded.trellis,
    )
    schemas.check_row(row)
    return row, stream


def read_row(row: TensorRow, stream: bytes) -> Encoded:
    """The inverse of `stored`; the bytes may be anything."""
    parts, start, pieces = {}, 0, memoryview(stream)
    for name, part in row.parts.items():
        end = start + part.stored_bytes
        try:
            parts[name] = decode_part(part.codec, pieces[start:end], part.spec, row.trellis)
        except FormatError as error:
            raise FormatError(f"part {name!r}: {error}") from error
        start = end
    if stream[start:].strip(b"\0"):
        raise FormatError("the filler is not zero")
    bits = {name: part.spec.bits for name, part in row.parts.items() if part.spec.bits}
    encoded = Encoded(
        row.kind,
        row.shape,
        DTYPES[row.dtype],
        parts,
        bits,
        row.transposed_groups,
        row.extra_zeros,
        row.note,
        row.trellis,
    )
    KINDS[encoded.kind].check_values(encoded)
    return encoded


def _stream_starts(rows: StoredRows, file: SafetensorsFile) -> array[int]:
    """Where in the file each tensor's stream begins; the entries must be those that the schema needs."""
    large = rows.large(SMALL_BYTES)
    expected = _with_small(large, sum(rows.stored_bytes) - sum(large.values()))
    if set(file.entries) != set(expected):
        odd = sorted(set(file.entries) ^ set(expected))
        raise FormatError(f"schema and container disagree on the entries {odd[:3]}")
    entries = {}
    for name, size in expected.items():
        found = file.entries[name]
        if found["dtype"] != "U8" or found["shape"] != [size]:
            raise FormatError(
                f"tensor {shown(name)}: the container holds {found['dtype']} {found['shape']}, "
                f"the schema expects {size} bytes"
            )
        entries[name] = file.first + found["data_offsets"][0]
    place, starts = entries.pop(SMALL, 0), array("q")
    first = iter(entries.values())
    for size in rows.stored_bytes:
        starts.append(place if _is_small(size) else next(first))
        place += size if _is_small(size) else 0
    return starts


def _runs(sizes: Sequence[int]) -> Iterator[range]:
    """Neighbouring streams that are worth a thread together."""
    start = total = 0
    for number, size in enumerate(sizes, 1):
        total += size
        if total >= _RUN_BYTES or number == len(sizes):
            yield range(start, number)
            start, total = number, 0


def _is_small(stored_bytes: int) -> bool:
    return stored_bytes < SMALL_BYTES


def _with_small(large: dict[str, int], small_bytes: int) -> dict[str, int]:
    """The container's entries in file order: the large streams, then one for all small ones."""
    return {**large, SMALL: small_bytes} if small_bytes else large


def write_plain(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], values: Iterable[Tensor]
) -> None:
    """Writes an ordinary safetensors file, with values that come one by one in the order of `tensors`."""
    entries = []
    for name, (dtype, shape) in tensors.items():
        if dtype not in SAFETENSORS_TYPES:
            raise SourceError(f"safetensors has no type for {name!r}, a {dtype} tensor")
        entries.append((name, SAFETENSORS_TYPES[dtype], shape, torch.Size(shape).numel() * dtype.itemsize))
    with atomic_write(path) as file:
        file.write(safetensors_header(entries, {"format": "pt"}))
        _write_all(file, values)


def _write_all(file: BinaryIO, values: Iterable[Tensor]) -> None:
    for value in values:
        file.write(raw_bytes(value))
