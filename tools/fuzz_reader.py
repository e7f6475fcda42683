"""Damages packed files at random and reads them: `python -m tools.fuzz_reader --files 100000 --seed 1`.

A reader may refuse a file with FormatError and with nothing else. What it accepts must be the original,
bit for bit, unless the damage came with checksums made right; then it may be any other model, but it
must not take long, nor much memory. The exit status says whether all of this held.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from factorpack.decoding import decode
from factorpack.errors import FormatError
from factorpack.format.container import Reader, Writer
from factorpack.format.schema import Schema
from factorpack.format.streams import raw_bytes
from factorpack.record import Encoded
from tests.golden.make import ALIASES, GOLDEN, codes, powers, tensors
from tests.tampered import Pieces, compact, container_of, envelope_of, take_apart

REFUSED, SAME, OTHER = "refused", "same", "another model"
DONOR = GOLDEN.read_bytes()
MEMORY_BYTES = 4 << 30
FILE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Original:
    """A valid file and what is in it."""

    blob: bytes
    schema: Schema
    weights: dict[str, bytes]


@dataclass(slots=True)
class Outcome:
    """Counts by kind of damage, and everything that must not happen."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int = 0
    """How much the process grew."""

    def total(self) -> Counter[str]:
        return sum(self.counts.values(), Counter())


# Damage to bytes: checksums stay as they are.


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def set_bytes(data: bytes, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    return (
        data[:start]
        + bytes([rng.choice((0, 255, 0x22, 0x5B, 0x7B, rng.randrange(256)))]) * (end - start)
        + data[end:]
    )


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def drop_chunk(data: bytes, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + data[end:]


def repeat_chunk(data: bytes, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    return data[:end] + data[start:]


def move_chunk(data: bytes, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    other = rng.randrange(len(data))
    piece, rest = data[start:end], data[:start] + data[end:]
    return rest[:other] + piece + rest[other:]


def splice(data: bytes, rng: random.Random) -> bytes:
    """A piece of the golden file in the place of one of this file."""
    start, end = _span(data, rng)
    first, last = _span(DONOR, rng)
    return data[:start] + DONOR[first:last] + data[end:]


def edit_header_length(data: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    other = rng.choice(
        (length + rng.randint(-9, 9), length * 2, len(data) - 8, len(data), 0, 1 << rng.randrange(64))
    )
    return (other % (1 << 64)).to_bytes(8, "little") + data[8:]


def edit_header_text(data: bytes, rng: random.Random) -> bytes:
    """Damage to the text alone, with its length made right."""
    end = 8 + int.from_bytes(data[:8], "little")
    text = rng.choice((flip_bits, set_bytes, drop_chunk, repeat_chunk))(data[8:end], rng)
    return len(text).to_bytes(8, "little") + text + data[end:]


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    """A piece of the data, short more often than long, and never all of it."""
    length = min(rng.choice((1, 4, 16, 256, len(data) // 3)), len(data) - 1)
    start = rng.randrange(len(data) - length)
    return start, start + rng.randint(1, max(length, 1))


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip bits": flip_bits,
    "set bytes": set_bytes,
    "cut": cut,
    "drop a chunk": drop_chunk,
    "repeat a chunk": repeat_chunk,
    "move a chunk": move_chunk,
    "splice": splice,
    "header length": edit_header_length,
    "header text": edit_header_text,
}


# Forgeries: the schema or the streams change, and every checksum is made right.


def forge_number(pieces: Pieces, rng: random.Random) -> None:
    """One number of the schema becomes another."""
    holder, key = rng.choice([place for place in _places(pieces.document) if isinstance(_at(place), int)])
    number = holder[key]
    near = (number + 1, number - 1, number * 2, number // 2, 0, 1, rng.randrange(64))
    far = (-1, 1 << 31, 1 << 47, (1 << 48) + 1, 1 << 64, 10**100, 1.5, float("inf"), True)
    holder[key] = rng.choice(near if rng.random() < 0.7 else far)


def forge_value(pieces: Pieces, rng: random.Random) -> None:
    """Anything in the schema becomes anything else, goes, or comes twice."""
    places = list(_places(pieces.document))
    holder, key = rng.choice(places)
    choice = rng.random()
    if choice < 0.25:
        del holder[key]
    elif choice < 0.5:
        holder[key] = deepcopy(_at(rng.choice(places)))
    elif choice < 0.6 and isinstance(holder, list):
        holder.insert(key, deepcopy(holder[key]))
    else:
        junk: tuple[object, ...] = (
            None,
            True,
            "",
            "keep",
            "constant",
            "levels",
            "spatial",
            "ans",
            "raw",
            "packed",
            "float32",
            "\ud800",
            [],
            {},
            [[]],
            -1,
            0,
            8,
            1e9,
        )
        holder[key] = rng.choice(junk)


def forge_shape(pieces: Pieces, rng: random.Random) -> None:
    """A tensor and its codes or values agree on a shape that the stream knows nothing of."""
    row = _row(pieces, rng, "keep", "scalar")
    name, part = next(iter(row["parts"].items()))
    shape = [rng.choice((1, 2, 3, 5, 40, 300)) for _ in part[2]]
    row["shape"], part[2] = list(shape), list(shape)
    if name == "codes":
        row.pop("transposed_groups", None)
        row["parts"]["scale"][2] = [shape[0], 1]
        row["parts"]["scale"][3] = shape[0] * (2 if row["parts"]["scale"][1] == "float16" else 4)
    if part[0] != "ans":
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
    name = rng.choice([name for name, stream in pieces.streams.items() if stream])
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


def _entropy_coded(pieces: Pieces, rng: random.Random) -> tuple[str, str]:
    """Names of a tensor and of a part of it that is entropy coded."""
    parts = [
        (row["name"], name)
        for row in pieces.document["tensors"]
        for name, part in row["parts"].items()
        if part[0] in ("ans", "trellis")
    ]
    return rng.choice(parts)


def forge_codec(pieces: Pieces, rng: random.Random) -> None:
    """A part's bytes are read by another codec, as another type."""
    row = _row(pieces, rng, "keep", "scalar", "factors", "constant", "levels", "spatial", "codewords")
    part = rng.choice(list(row["parts"].values()))
    part[0] = rng.choice(("raw", "packed", "ans", "trellis"))
    part[1] = rng.choice(
        (1, 2, 3, 4, 8, 9, 16, "int8", "int16", "float16", "float32", "bool", "complex64", part[1])
    )


def _grow(data: bytes, rng: random.Random) -> bytes:
    return data[:-1] + rng.randbytes(4 * rng.randint(1, 3))


def _row(pieces: Pieces, rng: random.Random, *kinds: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [row for row in pieces.document["tensors"] if row["kind"] in kinds]
    return rng.choice(rows)


Place = tuple[Any, Any]


def _places(value: object) -> Iterator[Place]:
    """Every place in a JSON document, as what holds it and the key or index it has there."""
    keys: Any = (
        value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in list(keys):
        yield value, key
        yield from _places(value[key])  # type: ignore[index]


def _at(place: Place) -> object:
    holder, key = place
    return holder[key]


FORGERIES: dict[str, Callable[[Pieces, random.Random], None]] = {
    "forge a number": forge_number,
    "forge a value": forge_value,
    "forge a shape": forge_shape,
    "forge a stream": forge_stream,
    "forge a message": forge_part,
    "forge a head": forge_head,
    "forge a codec": forge_codec,
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
    text = rng.choice((flip_bits, set_bytes, drop_chunk, repeat_chunk, move_chunk))(
        compact(pieces.document), rng
    )
    return container_of(envelope_of(text), pieces.entries())


FORGE_TEXT = "forge the text"
KINDS = (*DAMAGES, *FORGERIES, FORGE_TEXT)


def damaged(kind: str, blob: bytes, rng: random.Random) -> bytes:
    if kind in DAMAGES:
        return DAMAGES[kind](blob, rng)
    if kind == FORGE_TEXT:
        return forge_text(blob, rng)
    pieces = take_apart(blob)
    FORGERIES[kind](pieces, rng)
    return signed(pieces)


def originals(folder: Path) -> list[Original]:
    """The golden file and small new ones, one of them with a stream large enough for its own entry."""
    golden = tensors()
    mixed = {
        "a": golden["up.weight"],
        "b": _scalar(3, 50, 3),
        "c": golden["mask"],
        "d": _scalar(1, 9000, 2),
        "f": _codewords(),
    }
    large = Encoded("keep", (4200,), torch.int32, {"values": torch.arange(4200, dtype=torch.int32)})
    models: list[tuple[dict[str, Encoded], dict[str, str]]] = [
        (golden, ALIASES),
        (mixed, {"e": "b"}),
        ({"w": _scalar(4, 200, 4), "empty": golden["empty"]}, {}),
        ({"w": golden["conv.weight"], "b": golden["odd"]}, {}),
        (
            {name: golden[name] for name in ("ternary", "signs", "pruned", "spatial.weight", "path.weight")},
            {},
        ),
        ({"large": large, "w": _scalar(1, 200, 4)}, {}),
    ]
    paths = [GOLDEN]
    for number, (model, aliases) in enumerate(models[1:]):
        paths.append(folder / f"original{number}")
        with Writer(paths[-1]) as writer:
            for name, encoded in model.items():
                writer.add(name, encoded)
            for alias, target in aliases.items():
                writer.alias(alias, target)
    return [Original(path.read_bytes(), *_read(path)) for path in paths]


def _scalar(rows: int, columns: int, bits: int) -> Encoded:
    """Codes of which every other row is nearly all zeros, so that entropy coding pays."""
    parts = {"codes": codes(rows + 1, columns, bits, salt=rows)[1:], "scale": powers(rows, 1, torch.float16)}
    return Encoded("scalar", (rows, columns), torch.float32, parts, {"codes": bits})


def _codewords() -> Encoded:
    """Sums of two of 2 x 5 codewords, whose 3 bits could hold three more."""
    indices = (codes(2, 60, 8, salt=11).to(torch.int32) % 5 - 4).to(torch.int8)
    parts = {"codebook": powers(10, 4, torch.float16), "indices": indices}
    return Encoded("codewords", (24, 10), torch.float32, parts, {"indices": 3})


def _read(path: Path) -> tuple[Schema, dict[str, bytes]]:
    reader = Reader(path)
    return reader.schema, {name: raw_bytes(decode(encoded)) for name, encoded in reader.items()}


def judge(path: Path, original: Original, forged: bool) -> str:
    """What reading a damaged file came to; whatever must not happen is raised."""
    try:
        schema, weights = _read(path)
    except FormatError:
        return REFUSED
    if weights == original.weights and schema == original.schema:
        return SAME
    if not forged:
        raise AssertionError("a damaged file was read as another model")
    return OTHER


def _too_long(*_: object) -> None:
    raise TimeoutError(f"took more than {FILE_SECONDS} s")


@contextmanager
def limits() -> Iterator[None]:
    """A wall on memory, an alarm clock, and warnings that count as errors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    threads = torch.get_num_threads()
    previous = signal.signal(signal.SIGALRM, _too_long)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        torch.set_num_threads(threads)


def fuzz(files: int, seed: int, start: int = 0, progress: bool = False) -> Outcome:
    """Reads `files` damaged files; file i of a seed is always the same one."""
    outcome = Outcome({kind: Counter() for kind in KINDS})
    in_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=in_memory if in_memory.is_dir() else None) as folder, limits():
        valid = originals(Path(folder))
        began, grown = time.perf_counter(), _peak_bytes()
        for index in range(start, start + files):
            _one(index, seed, valid, Path(folder) / "file", outcome)
            if progress and index % 500 == 0:
                print(f"\r{index - start} of {files} files", end="", file=sys.stderr, flush=True)
        outcome.seconds = time.perf_counter() - began
        outcome.peak_bytes = _peak_bytes() - grown
    if progress:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return outcome


def _one(index: int, seed: int, valid: list[Original], path: Path, outcome: Outcome) -> None:
    rng = random.Random(f"{seed}:{index}")
    kind, original = rng.choice(KINDS), rng.choice(valid)
    path.write_bytes(damaged(kind, original.blob, rng))
    try:
        signal.setitimer(signal.ITIMER_REAL, FILE_SECONDS)
        result = judge(path, original, kind not in DAMAGES)
    except Exception as error:  # whatever it is, it is what this program looks for
        result = "violation"
        outcome.violations.append(f"file {index}, {kind}: {type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    outcome.counts[kind][result] += 1


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _show(outcome: Outcome) -> None:
    columns = (REFUSED, SAME, OTHER, "violation")
    print(f"{'':16}" + "".join(f"{column:>16}" for column in columns))
    for kind, counts in [*outcome.counts.items(), ("all", outcome.total())]:
        print(f"{kind:16}" + "".join(f"{counts[column]:>16}" for column in columns))
    files = outcome.total().total()
    rate = 1000 * outcome.seconds / max(files, 1)
    print(
        f"{files} files, {rate:.2f} ms a file, {outcome.peak_bytes / 2**20:.0f} MiB more memory at the peak"
    )
    for line in outcome.violations[:20]:
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="first file, to repeat one that failed")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    settings = parser.parse_args()
    outcome = fuzz(settings.files, settings.seed, settings.start, sys.stderr.isatty())
    if settings.json:
        fields = {
            "files": settings.files,
            "seed": settings.seed,
            "counts": outcome.counts,
            "violations": outcome.violations,
            "seconds": outcome.seconds,
            "peak_bytes": outcome.peak_bytes,
        }
        print(json.dumps(fields, indent=2))
    else:
        _show(outcome)
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
