"""Damage to bytes and to JSON, for whoever takes them in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from tests.golden.make import GOLDEN

DONOR = GOLDEN.read_bytes()
JUNK: tuple[object, ...] = (
    *(None, True, "", "\ud800", "\x1b[2J", "a" * 300, "../..", [], {}, [[]], {"": {}}),
    *(-1, 0, 8, 1.5, 1e9, 1e-300, float("inf"), float("nan"), 1 << 31, 1 << 48, 1 << 64, 10**100),
    *("keep", "constant", "levels", "spatial", "ans", "raw", "packed", "floats", "trellis"),
    *("float32", "complex128"),
)


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def set_bytes(data: bytes, rng: random.Random) -> bytes:
    start, end = span(data, rng)
    return (
        data[:start]
        + bytes([rng.choice((0, 255, 0x22, 0x5B, 0x7B, rng.randrange(256)))]) * (end - start)
        + data[end:]
    )


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def drop_chunk(data: bytes, rng: random.Random) -> bytes:
    start, end = span(data, rng)
    return data[:start] + data[end:]


def repeat_chunk(data: bytes, rng: random.Random) -> bytes:
    start, end = span(data, rng)
    return data[:end] + data[start:]


def move_chunk(data: bytes, rng: random.Random) -> bytes:
    start, end = span(data, rng)
    other = rng.randrange(len(data))
    piece, rest = data[start:end], data[:start] + data[end:]
    return rest[:other] + piece + rest[other:]


def splice(data: bytes, rng: random.Random) -> bytes:
    """A piece of the golden file in the place of one of this file."""
    start, end = span(data, rng)
    first, last = span(DONOR, rng)
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
    text = rng.choice((flip_bits, set_bytes, drop_chunk, repeat_chunk))(data[8:end] or b" ", rng)
    return len(text).to_bytes(8, "little") + text + data[end:]


def span(data: bytes, rng: random.Random) -> tuple[int, int]:
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


Place = tuple[Any, Any]
"""What holds a value of a JSON document, and the key or index it has there."""


def places(value: object) -> Iterator[Place]:
    """Every place in a JSON document."""
    keys: Any = (
        value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in list(keys):
        yield value, key
        yield from places(value[key])  # type: ignore[index]


def change_number(document: object, rng: random.Random) -> None:
    """One number becomes another."""
    found = [(holder, key) for holder, key in places(document) if isinstance(holder[key], int | float)]
    if not found:
        return
    holder, key = rng.choice(found)
    number = holder[key]
    near = (number + 1, number - 1, number * 2, number // 2, 0, 1, rng.randrange(64))
    far = (-1, 1 << 31, 1 << 47, (1 << 48) + 1, 1 << 64, 10**100, 1.5, float("inf"), True)
    holder[key] = rng.choice(near if rng.random() < 0.7 else far)


def change_value(document: object, rng: random.Random) -> None:
    """Anything becomes anything else, goes, or comes twice."""
    found = list(places(document))
    if not found:
        return
    holder, key = rng.choice(found)
    choice = rng.random()
    if choice < 0.25:
        del holder[key]
    elif choice < 0.5:
        other, place = rng.choice(found)
        holder[key] = deepcopy(other[place])
    elif choice < 0.6 and isinstance(holder, list):
        holder.insert(key, deepcopy(holder[key]))
    elif choice < 0.65 and isinstance(holder, dict):
        holder[rng.choice(("", "more", "__class__", str(rng.choice(JUNK))))] = holder.pop(key)
    else:
        holder[key] = deepcopy(rng.choice(JUNK))


def change_some(document: object, rng: random.Random) -> None:
    """Mostly one change, now and then several."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        rng.choice((change_number, change_value))(document, rng)
