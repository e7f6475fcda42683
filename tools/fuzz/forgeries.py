"""Packed files that say something else, with every checksum made right."""

from __future__ import annotations

import json
import math
import random
import struct
import zlib
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

import torch

from factorpack.kinds import KINDS
from factorpack.record import DTYPES
from tests.format.reference import FLOATS
from tests.hostile import costly
from tests.tampered import Pieces, compact, container_of, envelope_of, take_apart
from tools.fuzz.damages import (
    change_number,
    change_some,
    change_value,
    cut,
    drop_chunk,
    flip_bits,
    move_chunk,
    repeat_chunk,
    set_bytes,
)
from tools.fuzz.streams import codes_stream, floats_stream, path_stream

T = TypeVar("T")
CODERS = ("ans", "trellis", "floats")
_LARGEST = 1 << 20
"""Elements of a tensor that is nearly nothing in its file."""
_WIDTHS = {"int8": "b", "float16": "e", "float32": "f", "float64": "d", "bfloat16": "H"}
_ODD_NUMBERS = (0.0, -0.0, 1e-45, 6e-8, -1.0, 65504.0, 65520.0, 3.4e38, math.inf, -math.inf, math.nan)


def forge_number(pieces: Pieces, rng: random.Random) -> None:
    """One number of the schema becomes another."""
    change_number(pieces.document, rng)


def forge_value(pieces: Pieces, rng: random.Random) -> None:
    """Anything in the schema becomes anything else, goes, or comes twice."""
    change_value(pieces.document, rng)


def forge_shape(pieces: Pieces, rng: random.Random) -> None:
    """A tensor and its codes or values agree on a shape that the stream knows nothing of."""
    row = _row(pieces, rng, "keep", "scalar")
    name, part = next(iter(row["parts"].items()))
    shape = [rng.choice((1, 2, 3, 5, 40, 300)) for _ in part[2]]
    row["shape"], part[2] = list(shape), list(shape)
    if name == "codes" and "scale" in row["parts"]:
        row.pop("transposed_groups", None)
        row["parts"]["scale"][2] = [shape[0], 1]
        row["parts"]["scale"][3] = shape[0] * (2 if row["parts"]["scale"][1] == "float16" else 4)
    if part[0] not in ("ans", "floats"):
        count, width = torch.Size(shape).numel(), part[1]
        part[3] = (
            (count * width + 7) // 8 if isinstance(width, int) else count * getattr(torch, width).itemsize
        )
    size = sum(each[3] for each in row["parts"].values())
    stream = pieces.streams[row["name"]][:size]
    row["filler_bytes"] = rng.randrange(8)
    pieces.streams[row["name"]] = stream + bytes(size - len(stream) + row["filler_bytes"])


def forge_stream(pieces: Pieces, rng: random.Random) -> None:
    """A stream of the same length holds something else."""
    name = _one([name for name, stream in pieces.streams.items() if stream], rng)
    stream = pieces.streams[name]
    pieces.streams[name] = rng.choice((flip_bits, set_bytes))(stream + b"\0", rng)[: len(stream)]


def forge_part(pieces: Pieces, rng: random.Random) -> None:
    """An entropy-coded part is damaged, and may change its length."""
    tensor, name = _entropy_coded(pieces, rng)
    damage = rng.choice((flip_bits, set_bytes, cut, drop_chunk, repeat_chunk, _grow))
    data = pieces.part(tensor, name)
    pieces.set_part(tensor, name, damage(data + b"\0", rng)[: None if damage is _grow else len(data) + 8])


def forge_head(pieces: Pieces, rng: random.Random) -> None:
    """A byte of an entropy-coded part's header or first tables becomes another."""
    tensor, name = _entropy_coded(pieces, rng)
    data = bytearray(pieces.part(tensor, name))
    place = rng.randrange(min(len(data), 16))
    near = (data[place] ^ 1 << rng.randrange(8), data[place] + 1 & 255, data[place] - 1 & 255)
    data[place] = rng.choice((*near, rng.randrange(256)))
    pieces.set_part(tensor, name, bytes(data))


def forge_codec(pieces: Pieces, rng: random.Random) -> None:
    """A part's bytes are read by another codec, as another type."""
    row = _row(pieces, rng, "keep", "scalar", "factors", "constant", "levels", "spatial", "codewords")
    part = rng.choice(list(row["parts"].values()))
    part[0] = rng.choice(("raw", "floats", "packed", "ans", "trellis"))
    part[1] = rng.choice(
        (1, 2, 3, 4, 8, 9, 16, "int8", "int16", "float16", "float32", "bool", "complex64", part[1])
    )


def _grow(data: bytes, rng: random.Random) -> bytes:
    return data[:-1] + rng.randbytes(4 * rng.randint(1, 3))


def forge_codes(pieces: Pieces, rng: random.Random) -> None:
    """Codes become others, in a stream that no writer of ours would make and every reader must take."""
    found = _parts(pieces, lambda part: isinstance(part[1], int) and 0 < math.prod(part[2]) < 2000)
    row, name = _one(found, rng)
    part = row["parts"][name]
    codec, bits, (rows, columns), _ = part
    half = 1 << (bits - 1)
    if codec == "trellis":
        most = rng.choice((0, 1, min(half // 2, 30), half // 2))
        data = path_stream(rng, rows, columns, row["trellis"], most)
    elif rng.random() < 0.1:
        part[0], data = "packed", rng.randbytes(math.ceil(rows * columns * bits / 8))
    else:
        most = min(rng.choice((half - 1, 1, half // 2)), half - 1)
        low = max(rng.choice((-half, -1, 0)), -300)
        part[0], data = "ans", codes_stream(rng, rows, columns, low, max(low, min(most, low + 600)))
    pieces.set_part(row["name"], name, data)
    _fill(pieces, row)


def forge_field(pieces: Pieces, rng: random.Random) -> None:
    """A field of an entropy-coded part's header becomes another number: flags, codes, classes, split, lengths."""
    found = _parts(pieces, lambda part: part[0] in CODERS)
    row, name = _one(found, rng)
    data = bytearray(pieces.part(row["name"], name))
    at, size = rng.choice(_fields(data, row["parts"][name][0]))
    number = int.from_bytes(data[at : at + size], "little")
    near = (number + 1, number - 1, number * 2, number // 2, number ^ 1 << rng.randrange(8 * size))
    other = rng.choice((*near, 0, 1, -1, rng.getrandbits(8 * size), math.prod(row["parts"][name][2])))
    data[at : at + size] = (other % (1 << 8 * size)).to_bytes(size, "little")
    pieces.set_part(row["name"], name, bytes(data))


def _fields(data: bytes, codec: str) -> list[tuple[int, int]]:
    """Where the fields of a stream's header are, with their sizes; tables and message count in bytes."""
    if codec == "floats":
        return [(0, 1), (1, 1), *((2 + at, size) for at, size in _fields(data[2:], "ans"))]
    flags, wide = data[0], 1 + (data[0] >> 5 & 1)
    found = [(0, 1), (1, wide), (1 + wide, wide), (1 + 2 * wide, 1), (2 + 2 * wide, 1)]
    at = 3 + 2 * wide
    for size in [4] * (flags >> 6 & 1) + [2] * (codec == "trellis") + [8] * (flags >> 7):
        found.append((at, size))
        at += size
    if flags >> 7:
        lengths = int.from_bytes(data[at - 8 : at], "little").bit_count()
        found += [(at + 4 * each, 4) for each in range(min(lengths, 64))]
        at += 4 * lengths
    found += [(each, 1) for each in (at, at + 1, at + 2, len(data) - 1)]
    return [(start, size) for start, size in found if start + size <= len(data)] or [(0, 1)]


def forge_numbers(pieces: Pieces, rng: random.Random) -> None:
    """Some values that are stored as they are become odd ones: zeros, infinities, the largest there are."""
    found = _parts(pieces, lambda part: part[0] == "raw" and part[1] in _WIDTHS and part[3] > 0)
    row, name = _one(found, rng)
    kind = row["parts"][name][1]
    data, size = bytearray(pieces.part(row["name"], name)), struct.calcsize(_WIDTHS[kind])
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(len(data) // size) * size
        data[at : at + size] = _packed(rng.choice(_ODD_NUMBERS), _WIDTHS[kind], rng)
    pieces.set_part(row["name"], name, bytes(data))


def forge_floats(pieces: Pieces, rng: random.Random) -> None:
    """Floats become others, in a stream that no writer of ours would make and every reader must take."""
    row, name = _one(_parts(pieces, lambda part: part[1] in FLOATS and 0 < math.prod(part[2]) < 2000), rng)
    part = row["parts"][name]
    part[0] = "floats"
    pieces.set_part(row["name"], name, floats_stream(rng, math.prod(part[2]), part[1]))
    _fill(pieces, row)


def _packed(number: float, letter: str, rng: random.Random) -> bytes:
    try:
        return struct.pack(f"<{letter}", number)
    except (OverflowError, struct.error):
        return rng.randbytes(struct.calcsize(letter))


def forge_alias(pieces: Pieces, rng: random.Random) -> None:
    """More names: of tensors, of aliases, of nothing, of themselves; some of them many."""
    names = [row["name"] for row in pieces.document["tensors"]]
    aliases = pieces.document["aliases"]
    targets = [*names, *names, *aliases, "", "a0", "factorpack.small"]
    for each in range(rng.choice((1, 1, 3, 63, 64, 300))):
        aliases[rng.choice((f"a{each}", f"a{each}", rng.choice(targets)))] = rng.choice(names)
    if rng.random() < 0.4:
        aliases[f"a{rng.randrange(4)}"] = rng.choice(targets)


def forge_rows(pieces: Pieces, rng: random.Random) -> None:
    """Tensors change places, come twice under other names, or go."""
    rows = pieces.document["tensors"]
    choice = rng.random()
    if choice < 0.3:
        rng.shuffle(rows)
        if rng.random() < 0.5:
            pieces.streams = {row["name"]: pieces.streams[row["name"]] for row in rows}
    elif choice < 0.6:
        for each in range(rng.choice((1, 2, 20))):
            twin = deepcopy(rng.choice(rows))
            name, twin["name"] = twin["name"], f"{twin['name']}{each}"
            rows.append(twin)
            pieces.streams[twin["name"]] = pieces.streams[name]
    else:
        gone = rows.pop(rng.randrange(len(rows)))
        if rng.random() < 0.5:
            del pieces.streams[gone["name"]]


def forge_dtype(pieces: Pieces, rng: random.Random) -> None:
    """A tensor decodes to another type, or as another kind with the same parts."""
    row = rng.choice(pieces.document["tensors"])
    row["dtype"] = rng.choice(sorted(DTYPES))
    if rng.random() < 0.2:
        row["kind"] = rng.choice(sorted(KINDS))
    if rng.random() < 0.2:
        row["transposed_groups"] = rng.choice((0, 1, 2, 3))


def _parts(pieces: Pieces, wanted: Callable[[Any], bool]) -> list[tuple[dict[str, Any], str]]:
    return [
        (row, name)
        for row in pieces.document["tensors"]
        for name, part in row["parts"].items()
        if wanted(part)
    ]


def _fill(pieces: Pieces, row: dict[str, Any]) -> None:
    """As much filler as the expansion rule requests."""
    stored = sum(part[3] for part in row["parts"].values())
    elements = max(math.prod(shape) for shape in (row["shape"], *(part[2] for part in row["parts"].values())))
    row["filler_bytes"] = max(0, math.ceil(elements / 1024) - stored)
    pieces.streams[row["name"]] = pieces.streams[row["name"]][:stored] + bytes(row["filler_bytes"])


def _row(pieces: Pieces, rng: random.Random, *kinds: str) -> dict[str, Any]:
    return _one([row for row in pieces.document["tensors"] if row["kind"] in kinds], rng)


def _entropy_coded(pieces: Pieces, rng: random.Random) -> tuple[str, str]:
    """Names of a tensor and of a part of it that is entropy coded."""
    row, name = _one(_parts(pieces, lambda part: part[0] in CODERS), rng)
    return row["name"], name


def _one(found: list[T], rng: random.Random) -> T:
    if not found:
        raise _NothingToForge
    return rng.choice(found)


class _NothingToForge(Exception):
    """The file has nothing of the kind."""


Forgery = Callable[[Pieces, random.Random], None]
FORGERIES: dict[str, Forgery] = {
    "forge a number": forge_number,
    "forge a value": forge_value,
    "forge a shape": forge_shape,
    "forge a stream": forge_stream,
    "forge a message": forge_part,
    "forge a head": forge_head,
    "forge a codec": forge_codec,
    "forge codes": forge_codes,
    "forge a field": forge_field,
    "forge numbers": forge_numbers,
    "forge floats": forge_floats,
    "forge an alias": forge_alias,
    "forge rows": forge_rows,
    "forge a type": forge_dtype,
}


def signed(pieces: Pieces) -> bytes:
    """The file with every checksum right, as far as the schema still has places for them."""
    rows = pieces.document.get("tensors")
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and isinstance(row.get("name"), str) and row["name"] in pieces.streams:
            row["crc"] = zlib.crc32(pieces.streams[row["name"]])
    return pieces.build()


def forge_text(blob: bytes, rng: random.Random) -> bytes:
    """Damage to the schema's JSON text, under a right checksum."""
    pieces = take_apart(blob)
    damage = rng.choice((flip_bits, set_bytes, drop_chunk, repeat_chunk, move_chunk))
    return container_of(envelope_of(damage(compact(pieces.document), rng)), pieces.entries())


def forge_container(blob: bytes, rng: random.Random) -> bytes:
    """The container's own header says something else, and its length is right."""
    end = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:end])
    if rng.random() < 0.3:
        envelope = json.loads(header["__metadata__"]["factorpack"])
        change_some(envelope, rng)
        header["__metadata__"]["factorpack"] = compact(envelope).decode(errors="replace")
    else:
        change_some(header, rng)
    text = compact(header) + b" " * rng.choice((0, 0, 1, 8, 4096))
    return len(text).to_bytes(8, "little") + text + blob[end:]


def forge_size(_: bytes, rng: random.Random) -> bytes:
    """A tensor of many elements that is nearly nothing in its file, with some filler more or less."""

    def size(most: int = _LARGEST) -> int:
        return round(2 ** rng.uniform(0, math.log2(max(most, 1))))

    kind = rng.randrange(4)
    if kind == 0:
        row, stream = costly.constant([size(), 1])
    elif kind == 1:
        rows = size(2048)
        row, stream = costly.path(rows, size(_LARGEST // rows), rng.choice((16, 100, 1024)))
    elif kind == 2:
        tile, rank = size(1024), size(64)
        row, stream = costly.factors(max(tile, rank), rank, size(_LARGEST // max(tile, rank)))
    else:
        tile = size(256)
        row, stream = costly.codewords(size(8), tile, size(_LARGEST // tile // 8))
    if rng.random() < 0.2:
        more = rng.choice((-1, 1, 100))
        row["filler_bytes"] = max(0, row["filler_bytes"] + more)
        stream = stream[:-1] if more < 0 else stream + bytes(more)
    names = {f"a{each}": "w" for each in range(rng.choice((0, 0, 1, 3)))}
    return costly.file_of({"w": (row, stream)}, names)


WHOLE: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "forge the text": forge_text,
    "forge the container": forge_container,
    "forge the size": forge_size,
}


def forged(kind: str, blob: bytes, rng: random.Random) -> bytes:
    if kind in WHOLE:
        return WHOLE[kind](blob, rng)
    pieces = take_apart(blob)
    if rng.random() < 0.2:  # two in one file: first one after which it can still be taken apart
        _apply(rng.choice((forge_numbers, forge_codes, forge_field)), pieces, rng, forge_dtype)
    _apply(FORGERIES[kind], pieces, rng, forge_value)
    return signed(pieces)


def _apply(forgery: Forgery, pieces: Pieces, rng: random.Random, other: Forgery) -> None:
    """A forgery, or another where there is nothing of its kind."""
    try:
        forgery(pieces, rng)
    except _NothingToForge:
        other(pieces, rng)
