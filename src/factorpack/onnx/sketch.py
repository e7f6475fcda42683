"""A part of an ONNX graph as plain data: rebuilding graphs are built and tested without onnx installed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from factorpack.onnx.widths import split
from factorpack.quantize.uniform import code_width

INT4_OPSET = 21
"""The first opset whose tensors may hold 4-bit integers."""


class Type(IntEnum):
    """Element types of weights and their parts, with ONNX's type numbers."""

    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    BOOL = 9
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BFLOAT16 = 16
    FLOAT8E4M3FN = 17
    FLOAT8E5M2 = 19
    INT4 = 22


TYPES: dict[torch.dtype, Type] = {
    torch.float64: Type.DOUBLE,
    torch.float32: Type.FLOAT,
    torch.float16: Type.FLOAT16,
    torch.bfloat16: Type.BFLOAT16,
    torch.float8_e4m3fn: Type.FLOAT8E4M3FN,
    torch.float8_e5m2: Type.FLOAT8E5M2,
    torch.complex64: Type.COMPLEX64,
    torch.complex128: Type.COMPLEX128,
    torch.uint64: Type.UINT64,
    torch.uint32: Type.UINT32,
    torch.uint16: Type.UINT16,
    torch.int64: Type.INT64,
    torch.int32: Type.INT32,
    torch.int16: Type.INT16,
    torch.int8: Type.INT8,
    torch.uint8: Type.UINT8,
    torch.bool: Type.BOOL,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """An initialiser: its elements as little-endian bytes, two per byte if they have 4 bits."""

    type: Type
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Node:
    operator: str
    inputs: tuple[str, ...]
    output: str
    attributes: Mapping[str, int | str | tuple[int, ...]]


class Sketch:
    """Nodes in execution order, and their initialisers: equal ones are stored once."""

    def __init__(self, opset: int, taken: Container[str] = ()) -> None:
        self.opset = opset
        self.nodes: list[Node] = []
        self.stored: dict[Stored, str] = {}
        numbered = (f"packed/{number}" for number in itertools.count())
        self._names: Iterator[str] = (name for name in numbered if name not in taken)

    def add(self, operator: str, *inputs: str, **attributes: int | str | tuple[int, ...]) -> str:
        """Adds a node and returns the name of its output."""
        self.nodes.append(Node(operator, inputs, next(self._names), attributes))
        return self.nodes[-1].output

    def give(self, value: str, name: str) -> None:
        """Renames the last node's output to `name`; any other value gets `name` through an Identity node."""
        if not self.nodes or self.nodes[-1].output != value:
            self.add("Identity", value)
        self.nodes[-1] = replace(self.nodes[-1], output=name)

    def store(self, values: Tensor) -> str:
        return self._store(TYPES[values.dtype], tuple(values.shape), _bytes(values))

    def _store(self, kind: Type, shape: tuple[int, ...], data: bytes) -> str:
        initialiser = Stored(kind, shape, data)
        if initialiser not in self.stored:
            self.stored[initialiser] = next(self._names)
        return self.stored[initialiser]

    def numbers(self, values: Tensor) -> str:
        """Floats stored in their own type, cast to FP32 in the graph."""
        name = self.store(values)
        return name if values.dtype == torch.float32 else self.add("Cast", name, to=Type.FLOAT)

    def codes(self, codes: Tensor) -> str:
        """A matrix of integer codes as FP32 values, stored in about as few bits as fixed widths allow."""
        parted = split(codes)
        if parted is None:
            return self._one_width(codes)
        near = codes.clone()
        near.view(-1)[parted.wide] = 0
        value = self._groups([(rows, near[rows]) for rows in parted.rows.values()])
        if not len(parted.wide):
            return value
        updates = self._one_width(codes.reshape(-1)[parted.wide])
        flat = self.reshape(value, (-1,))
        value = self.add("ScatterElements", flat, self._positions(parted.wide), updates, axis=0)
        return self.reshape(value, tuple(codes.shape))

    def _groups(self, groups: Sequence[tuple[Tensor, Tensor]]) -> str:
        """Concatenates groups of rows of one width each, and restores the rows' order."""
        if len(groups) == 1:
            return self._one_width(groups[0][1])
        together = self.add("Concat", *(self._one_width(codes) for _, codes in groups), axis=0)
        order = torch.cat([rows for rows, _ in groups]).argsort().to(torch.int32)
        return self.add("Gather", together, self.store(order), axis=0)

    def _positions(self, positions: Tensor) -> str:
        """Ascending positions, stored as the differences between them."""
        gaps = torch.diff(positions, prepend=positions.new_zeros(1)).to(torch.int32)
        integers = self.add("Cast", self.codes(gaps[None]), to=Type.INT32)
        axis = self.store(torch.tensor(0, dtype=torch.int64))
        return self.add("CumSum", self.reshape(integers, (-1,)), axis)

    def _one_width(self, codes: Tensor) -> str:
        """Codes in as many bits as the widest of them needs.

        ONNX has types of 4, 8 and 16 bits. Any other width is stored as bit planes.
        """
        width = code_width(int(codes.min()), int(codes.max()))
        if width == 4 and self.opset >= INT4_OPSET:
            name = self._store(Type.INT4, tuple(codes.shape), nibbles(codes))
        elif width in (8, 16):
            name = self.store(codes.to(torch.int8 if width == 8 else torch.int16))
        else:
            return self._planes(codes, width)
        return self.add("Cast", name, to=Type.FLOAT)

    def _planes(self, codes: Tensor, width: int) -> str:
        """sum_p weight_p bit_p, the highest weight being negative: two's complement, exact in FP32."""
        planes = bit_planes(codes, width)
        shifts = torch.arange(8, dtype=torch.uint8)
        weights = 2.0 ** torch.arange(width)
        weights[-1] *= -1
        shifted = self.add("BitShift", self.store(planes[:, :, None]), self.store(shifts), direction="RIGHT")
        bits = self.add("BitwiseAnd", shifted, self.store(torch.ones(1, dtype=torch.uint8)))
        rows = self.reshape(self.add("Cast", bits, to=Type.FLOAT), (width, -1))
        flat = self.reshape(self.add("MatMul", self.store(weights[None]), rows), (-1,))
        return self.reshape(self.first(flat, 8 * planes.shape[1], codes.numel()), tuple(codes.shape))

    def reshape(self, value: str, shape: tuple[int, ...]) -> str:
        return self.add("Reshape", value, self.store(torch.tensor(shape, dtype=torch.int64)))

    def first(self, flat: str, count: int, wanted: int) -> str:
        """The first `wanted` of `count` elements."""
        if count == wanted:
            return flat
        start, end = (self.store(torch.tensor([place], dtype=torch.int64)) for place in (0, wanted))
        return self.add("Slice", flat, start, end)


def bit_planes(codes: Tensor, width: int) -> Tensor:
    """Bit p of eight codes in each byte of row p, the first code in the lowest bit: (width, n/8).

    >>> bit_planes(torch.tensor([1, 2, 3, -1], dtype=torch.int8), 3).tolist()
    [[13], [14], [8]]
    """
    flat = codes.reshape(-1).cpu().numpy()
    bits = [np.packbits((flat >> place & 1).astype(np.uint8), bitorder="little") for place in range(width)]
    return torch.from_numpy(np.stack(bits))


def nibbles(codes: Tensor) -> bytes:
    """4-bit codes, two per byte, the first in the low half.

    >>> nibbles(torch.tensor([1, -1, 2], dtype=torch.int8)).hex()
    'f102'
    """
    flat = codes.reshape(-1).cpu().numpy().astype(np.uint8) & 15
    pairs = np.pad(flat, (0, flat.size % 2)).reshape(-1, 2)
    return bytes(pairs[:, 0] | pairs[:, 1] << 4)


def _bytes(values: Tensor) -> bytes:
    flat = values.detach().cpu().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if math.prod(values.shape) else b""
