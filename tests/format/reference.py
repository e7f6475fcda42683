"""The file format a second time: slow, plain Python, no numpy, torch, safetensors, constriction or pcodec.

Written from the format's description and not from the package's code, so that the two can disagree.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from bisect import bisect_right
from itertools import accumulate
from math import ceil, prod
from typing import Any

MODEL_BITS = 24


def unpack_bits(data: bytes, count: int, width: int) -> list[int]:
    """Value i takes bits i*width to (i+1)*width - 1 of the bytes read as one little-endian number."""
    number = int.from_bytes(data, "little")
    return [number >> (i * width) & ((1 << width) - 1) for i in range(count)]


class Message:
    """Words and a state, from which symbols are taken one by one."""

    def __init__(self, data: bytes) -> None:
        self.words = list(struct.unpack(f"<{len(data) // 4}I", data))
        self.state = 0
        for _ in range(min(2, len(self.words))):
            self.state = self.state << 32 | self.words.pop()

    def take(self, starts: list[int]) -> int:
        if len(starts) == 2:
            return 0
        quantile = self.state & ((1 << MODEL_BITS) - 1)
        symbol = bisect_right(starts, quantile) - 1
        share = starts[symbol + 1] - starts[symbol]
        self.state = (self.state >> MODEL_BITS) * share + quantile - starts[symbol]
        if self.state < 1 << 32 and self.words:
            self.state = self.state << 32 | self.words.pop()
        return symbol


class Bits:
    """Numbers of any width from the bytes read as one little-endian number."""

    def __init__(self, data: bytes) -> None:
        self.number = int.from_bytes(data, "little")
        self.at = 0

    def take(self, width: int) -> int:
        found = self.number >> self.at & ((1 << width) - 1)
        self.at += width
        return found

    def next_byte(self) -> None:
        self.at = (self.at + 7) // 8 * 8


def chunk_decode(data: bytes, count: int, width: int) -> list[int]:
    """One chunk: numbers of `width` bits by bins, whose indices four interleaved table-driven coders give."""
    bits = Bits(data)
    assert bits.take(8) == 0
    log = bits.take(4)
    size = 1 << log
    bins = [
        (bits.take(log) + 1, bits.take(width), bits.take(width.bit_length())) for _ in range(bits.take(15))
    ]
    bits.next_byte()
    stride = 3 * size // 5 | 1
    owner = [0] * size
    for place, number in enumerate(n for n, (weight, _, _) in enumerate(bins) for _ in range(weight)):
        owner[place * stride % size] = number
    met = [weight for weight, _, _ in bins]
    steps = []
    for number in owner:
        more = log + 1 - met[number].bit_length()
        steps.append((number, more, (met[number] << more) - size))
        met[number] += 1
    states = [bits.take(log) for _ in range(4)]
    bits.next_byte()
    found: list[int] = []
    for first in range(0, count, 256):
        batch = []
        for i in range(min(256, count - first)):
            number, more, base = steps[states[i % 4]]
            batch.append(number)
            states[i % 4] = base + bits.take(more)
        found += [bins[number][1] + bits.take(bins[number][2]) for number in batch]
    bits.next_byte()
    assert bits.at == 8 * len(data)
    return found


def ans_decode(data: bytes, rows: int, columns: int) -> list[list[int]]:
    """An entropy-coded matrix: header, tables, message, chunks."""
    flags = data[0]
    total_bits, is_wide, is_split = flags & 31, flags >> 5 & 1, flags >> 6 & 1
    low, size, row_classes, column_classes = struct.unpack_from("<hHBB" if is_wide else "<bBBB", data, 1)
    at = 7 if is_wide else 5
    split = int.from_bytes(data[at : at + 4], "little") if is_split else 0
    at += 4 * is_split
    models = row_classes + column_classes + 1
    lengths = {}
    if flags >> 7:
        named = int.from_bytes(data[at : at + 8], "little")
        at += 8
        for model in (each for each in range(models) if named >> each & 1):
            lengths[model] = int.from_bytes(data[at : at + 4], "little")
            at += 4
    chunks_at = len(data) - sum(lengths.values())
    width = size.bit_length()
    end = at + (models * width + 7) // 8
    sizes = [value + 1 for value in unpack_bits(data[at:end], models, width)]
    tables, used = read_tables(data[end:], [row_classes + 1, column_classes + 1, *sizes], total_bits)
    message = Message(data[end + used : chunks_at - (2 if lengths else 0)])
    height = split or rows
    width = rows * columns // height
    row_class = [message.take(tables[0]) for _ in range(height)]
    column_class = [message.take(tables[1]) for _ in range(width)]
    codes = sorted(range(low, low + size + 1), key=lambda code: (abs(code), code))
    view = [[0] * width for _ in range(height)]
    for model in range(models):
        places = [
            (row, column)
            for a in range(row_classes + 1)
            for row in range(height)
            if row_class[row] == a
            for column in range(width)
            if column_class[column] == model - a
        ]
        if model in lengths:
            chunk = data[chunks_at : chunks_at + lengths[model]]
            symbols = chunk_decode(chunk, len(places), 8 if size < 256 else 16)
            chunks_at += lengths[model]
        else:
            symbols = [message.take(tables[2 + model]) for _ in places]
        for (row, column), symbol in zip(places, symbols, strict=True):
            view[row][column] = codes[symbol]
    assert message.state == 0
    assert not message.words
    return from_view(view, split, rows)


NEXT = {
    4: [(0, 2), (2, 0), (1, 3), (3, 1)],
    8: [(0, 2), (2, 0), (4, 6), (6, 4), (5, 7), (7, 5), (1, 3), (3, 1)],
}
"""The states after an even and an odd index."""


def path_decode(data: bytes, rows: int, columns: int, states: int) -> list[list[int]]:
    """A matrix of levels that are a path through a trellis."""
    if data[0] == 0:
        segment, split = struct.unpack_from("<HI", data, 1)
        height = split or rows
        view = walk(ans_decode(data[7:], height, rows * columns // height), segment, states)
        return from_view(view, split, rows)
    flags = data[0]
    total_bits, is_wide, is_split = flags & 31, flags >> 5 & 1, flags >> 6 & 1
    low, size, row_classes, column_classes = struct.unpack_from("<hHBB" if is_wide else "<bBBB", data, 1)
    at = 7 if is_wide else 5
    split = int.from_bytes(data[at : at + 4], "little") if is_split else 0
    at += 4 * is_split
    models = 2 * (row_classes + column_classes + 1)
    chunked, lengths = [], []
    if flags >> 7:
        chunked = [each for each in range(models) if int.from_bytes(data[at : at + 16], "little") >> each & 1]
        lengths = struct.unpack_from(f"<{len(chunked)}I", data, at + 16)
        at += 16 + 4 * len(chunked)
    counts = struct.unpack_from(f"<{len(chunked)}I", data, at)
    at += 4 * len(chunked)
    segment = int.from_bytes(data[at : at + 2], "little")
    at += 2
    width = size.bit_length()
    end = at + (models * width + 7) // 8
    sizes = [value + 1 for value in unpack_bits(data[at:end], models, width)]
    tables, used = read_tables(data[end:], [row_classes + 1, 2 * (column_classes + 1), *sizes], total_bits)
    chunks_at = len(data) - sum(lengths)
    message = Message(data[end + used : chunks_at - (2 if lengths else 0)])
    blocks = {}
    for model, length, count in zip(chunked, lengths, counts, strict=True):
        chunk = data[chunks_at : chunks_at + length]
        blocks[model] = iter(chunk_decode(chunk, count, 8 if size < 256 else 16))
        chunks_at += length
    height = split or rows
    width = rows * columns // height
    row_class = [message.take(tables[0]) for _ in range(height)]
    column_kind = [message.take(tables[1]) for _ in range(width)]
    codes = sorted(range(low, low + size + 1), key=lambda code: (abs(code), code))
    view = [[0] * width for _ in range(height)]
    state = {(top, column): 0 for top in range(0, height, segment) for column in range(width)}
    for place in range(min(segment, height)):
        entries = []
        for row in range(place, height, segment):
            for column in range(width):
                quantizer = column_kind[column] & state[row - place, column] * 2 // states
                entries.append((2 * (row_class[row] + column_kind[column] // 2) + quantizer, row, column))
        for model, row, column in sorted(entries, key=lambda entry: entry[0]):
            symbol = next(blocks[model]) if model in blocks else message.take(tables[2 + model])
            index = codes[symbol]
            sign = (index > 0) - (index < 0)
            view[row][column] = 2 * index - (model & 1) * sign
            before = state[row - place, column]
            state[row - place, column] = NEXT[states][before][index & 1]
    assert message.state == 0
    assert not message.words
    assert not any(list(block) for block in blocks.values())
    return from_view(view, split, rows)


def walk(indices: list[list[int]], segment: int, states: int) -> list[list[int]]:
    """The levels of indices, each column of each segment from state 0."""
    levels = [[0] * len(row) for row in indices]
    for column in range(len(indices[0])):
        state = 0
        for row, own in enumerate(indices):
            state = state if row % segment else 0
            index = own[column]
            sign = (index > 0) - (index < 0)
            levels[row][column] = 2 * index - (state * 2 // states) * sign
            state = NEXT[states][state][index & 1]
    return levels


FLOATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23)}
"""Bits of exponent and mantissa."""


def floats_decode(data: bytes, count: int, kind: str) -> bytes:
    """The little-endian bytes of floats: signs and exponents first, then mantissas."""
    exponent_bits, mantissa_bits = FLOATS[kind]
    used, highest = data[0], data[1]
    assert used <= mantissa_bits
    widths = [min(16, used - start) for start in range(0, used, 16)]
    at = len(data) - sum((count * width + 7) // 8 for width in widths)
    (codes,) = ans_decode(data[2:at], 1, count)
    mantissas, place = [0] * count, mantissa_bits - used
    for width in widths:
        end = at + (count * width + 7) // 8
        for i, bits in enumerate(unpack_bits(data[at:end], count, width)):
            mantissas[i] |= bits << place
        at, place = end, place + width
    found = b""
    for code, mantissa in zip(codes, mantissas, strict=True):
        below, sign = (code, 0) if code >= 0 else (-code - 1, 1)
        assert below <= highest < 1 << exponent_bits
        bits = (sign << exponent_bits | highest - below) << mantissa_bits | mantissa
        found += bits.to_bytes((1 + exponent_bits + mantissa_bits) // 8, "little")
    return found


def from_view(view: list[list[int]], split: int, rows: int) -> list[list[int]]:
    if not split:
        return view
    flat = [code for row in view for code in row]  # of the transpose
    return [flat[row::rows] for row in range(rows)]


def read_tables(data: bytes, sizes: list[int], total_bits: int) -> tuple[list[list[int]], int]:
    """Where each symbol of each table starts, and the bytes the tables took."""
    number, place = int.from_bytes(data, "little"), 0

    def bit() -> int:
        nonlocal place
        place += 1
        return number >> (place - 1) & 1

    lengths: list[list[int]] = []
    for size in sizes:
        lengths.append([])
        for _ in range(size - 1):
            before = lengths[-1][-1] if lengths[-1] else total_bits - 2
            value = 0
            while not bit():
                value += 1
            lengths[-1].append(before - ((value + 1) // 2 if value % 2 else -value // 2))
    tables = []
    for row in lengths:
        tail = []
        for length in row:
            lower = sum(bit() << i for i in range(length - 1))
            tail.append(lower + (1 << (length - 1)) if length else 0)
        tables.append(model_starts([(1 << total_bits) - sum(tail), *tail], total_bits))
    while place % 8:
        assert not bit()
    return tables, place // 8


def model_starts(frequencies: list[int], total_bits: int) -> list[int]:
    """Where each symbol's share of 2^24 starts, and the end of the last."""
    size = len(frequencies)
    before = accumulate(frequencies[:-1], initial=0)
    starts = [(total * ((1 << MODEL_BITS) - size) >> total_bits) + i for i, total in enumerate(before)]
    return [*starts, 1 << MODEL_BITS]


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
        tensors[row["name"]] = _read_parts(row["parts"], stream, row.get("trellis", 0))
    return document, tensors


def _read_parts(parts: dict[str, Any], stream: bytes, states: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (codec, kind, shape, size) in parts.items():
        data, stream = stream[:size], stream[size:]
        if codec == "raw":
            found[name] = data
        elif codec == "floats":
            found[name] = floats_decode(data, prod(shape), kind)
        elif codec == "ans":
            found[name] = ans_decode(data, *shape)
        elif codec == "trellis":
            found[name] = path_decode(data, *shape, states)
        else:
            rows, columns = shape
            flat = [value - (1 << (kind - 1)) for value in unpack_bits(data, rows * columns, kind)]
            found[name] = [flat[row * columns : (row + 1) * columns] for row in range(rows)]
    assert not any(stream)
    return found


Matrix = list[list[Any]]
"""Of any numbers that can be added and multiplied."""


def weight_of(
    kind: str, shape: tuple[int, ...], groups: int, index_bits: int, parts: dict[str, Matrix]
) -> list[Any]:
    """The elements of a coded tensor in its own order, from parts as matrices of numbers."""
    numel = prod(shape)
    out_first = (shape[1] * groups, shape[0] // groups, *shape[2:]) if groups else shape
    if kind == "scalar":
        rows = zip(parts["codes"], _spread(parts["scale"], len(parts["codes"]), 1), strict=True)
        flat = [code * scale for row, (scale,) in rows for code in row]
    elif kind == "levels":
        levels = _spread(parts["levels"], len(parts["codes"]), len(parts["levels"][0]))
        rows = zip(parts["codes"], levels, strict=True)
        flat = [own[int(code) + len(own) // 2] for row, own in rows for code in row]
    elif kind == "codewords":
        flat = _summed(parts, 1 << (index_bits - 1))[:numel]
    elif kind == "spatial":
        flat = _by_output(_product(parts, len(parts["latent"][0])), out_first)
    else:
        flat = _product(parts, ceil(numel / len(parts["codebook"])))[:numel]
    return _input_first(flat, shape, groups) if groups else flat


def _spread(scale: Matrix, rows: int, columns: int) -> Matrix:
    """A row, a column or one number as the matrix it stands for."""
    wide = [row * (columns // len(row)) for row in scale]
    return wide * (rows // len(wide))


def _product(parts: dict[str, Matrix], tiles: int) -> list[Any]:
    """Tile after tile: entry i of tile j is sum_k C_ik s_k Z_kj t + mu_i."""
    rank = len(parts["latent"])
    codebook_scale = _spread(parts["codebook_scale"], 1, rank)
    latent_scale = _spread(parts["latent_scale"], rank, tiles)
    flat = []
    for tile in range(tiles):
        for i, codebook_row in enumerate(parts["codebook"]):
            total = parts["mean"][i][0] if "mean" in parts else 0
            for k, code in enumerate(codebook_row):
                total += code * codebook_scale[0][k] * parts["latent"][k][tile] * latent_scale[k][tile]
            flat.append(total)
    return flat


def _summed(parts: dict[str, Matrix], half: int) -> list[Any]:
    """Tile after tile: the sum over stages of the rows that their indices name."""
    stages, book = parts["indices"], parts["codebook"]
    count = len(book) // len(stages)
    flat = []
    for indices in zip(*stages, strict=True):
        rows = [book[stage * count + int(index) + half] for stage, index in enumerate(indices)]
        flat += [sum(numbers) for numbers in zip(*rows, strict=True)]
    return flat


def _by_output(columns: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Column after column of a matrix (in*h, out*w), in the order out, in, h, w."""
    outputs, inputs, *kernel = shape
    height, width = prod(kernel[:-1]), kernel[-1] if kernel else 1
    return [
        columns[(o * width + x) * inputs * height + i * height + y]
        for o in range(outputs)
        for i in range(inputs)
        for y in range(height)
        for x in range(width)
    ]


def _input_first(flat: list[Any], shape: tuple[int, ...], groups: int) -> list[Any]:
    """(out, in/g, kernel) in file order to a transposed convolution's (in, out/g, kernel)."""
    outputs, inputs, kernel = shape[1], shape[0] // groups, prod(shape[2:])  # of a group
    return [
        flat[((group * outputs + out) * inputs + channel) * kernel + position]
        for group in range(groups)
        for channel in range(inputs)
        for out in range(outputs)
        for position in range(kernel)
    ]
