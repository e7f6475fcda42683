"""The file format a second time: slow, plain Python, no numpy, torch, safetensors or constriction.

Written from the format's description and not from the package's code, so that the two can disagree.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from bisect import bisect_right
from itertools import accumulate
from typing import Any

TABLE_BITS, MODEL_BITS = 12, 24


def unpack_bits(data: bytes, count: int, width: int) -> list[int]:
    """Value i takes bits i*width to (i+1)*width - 1 of the bytes read as one little-endian number."""
    number = int.from_bytes(data, "little")
    return [number >> (i * width) & ((1 << width) - 1) for i in range(count)]


def ans_decode(data: bytes, rows: int, columns: int) -> list[list[int]]:
    """An entropy-coded matrix: header, each row's model, the models' frequencies, the message."""
    low, alphabet, groups = struct.unpack_from("<bBB", data)
    alphabet, groups = alphabet + 1, groups + 1
    width = (groups - 1).bit_length()
    index_end = 3 + (rows * width + 7) // 8
    table_end = index_end + (groups * (alphabet - 1) * (TABLE_BITS + 1) + 7) // 8
    group_of = unpack_bits(data[3:index_end], rows, width)
    tail = unpack_bits(data[index_end:table_end], groups * (alphabet - 1), TABLE_BITS + 1)
    words = list(struct.unpack(f"<{(len(data) - table_end) // 4}I", data[table_end:]))
    state = 0
    for _ in range(min(2, len(words))):
        state = state << 32 | words.pop()
    codes: list[list[int]] = [[] for _ in range(rows)]
    for group in range(groups):
        starts = model_starts(tail[group * (alphabet - 1) : (group + 1) * (alphabet - 1)])
        for row in (row for row in range(rows) if group_of[row] == group):
            for _ in range(columns):
                symbol, state = ans_step(state, starts)
                if state < 1 << 32 and words:
                    state = state << 32 | words.pop()
                codes[row].append(symbol + low)
    assert state == 0
    assert not words
    return codes


def model_starts(tail: list[int]) -> list[int]:
    """Where each symbol's share of 2^24 starts, and the end of the last; the first frequency is implied."""
    frequencies = [(1 << TABLE_BITS) - sum(tail), *tail]
    if len(frequencies) == 1:
        frequencies.append(0)
    size = len(frequencies)
    before = accumulate(frequencies[:-1], initial=0)
    starts = [(total * ((1 << MODEL_BITS) - size) >> TABLE_BITS) + i for i, total in enumerate(before)]
    return [*starts, 1 << MODEL_BITS]


def ans_step(state: int, starts: list[int]) -> tuple[int, int]:
    quantile = state & ((1 << MODEL_BITS) - 1)
    symbol = bisect_right(starts, quantile) - 1
    share = starts[symbol + 1] - starts[symbol]
    return symbol, (state >> MODEL_BITS) * share + quantile - starts[symbol]


def read_packed(blob: bytes) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A packed file: its schema, and every tensor's parts as lists of codes or as raw bytes."""
    header_end = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:header_end])
    envelope = json.loads(header.pop("__metadata__")["factorpack"])
    document = json.loads(zlib.decompress(base64.b64decode(envelope["schema"])))
    shared = header.get("factorpack.small", {"data_offsets": [0, 0]})["data_offsets"][0]
    tensors = {}
    for row in document["tensors"]:
        size = sum(part[3] for part in row["parts"].values()) + row.get("filler_bytes", 0)
        if size < 16384:
            start, shared = shared, shared + size
        else:
            start = header[row["name"]]["data_offsets"][0]
        stream = blob[header_end + start : header_end + start + size]
        assert zlib.crc32(stream) == row["crc"]
        tensors[row["name"]] = _read_parts(row["parts"], stream)
    return document, tensors


def _read_parts(parts: dict[str, Any], stream: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (codec, kind, shape, size) in parts.items():
        data, stream = stream[:size], stream[size:]
        if codec == "raw":
            found[name] = data
        elif codec == "ans":
            found[name] = ans_decode(data, *shape)
        else:
            rows, columns = shape
            flat = [value - (1 << (kind - 1)) for value in unpack_bits(data, rows * columns, kind)]
            found[name] = [flat[row * columns : (row + 1) * columns] for row in range(rows)]
    assert not any(stream)
    return found
