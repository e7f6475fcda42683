"""GGUF files written here, so that any field can be wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.helpers import raw

TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 24,
    torch.int16: 25,
    torch.int32: 26,
    torch.int64: 27,
    torch.float64: 28,
    torch.bfloat16: 30,
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def uint32(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def strings(key: str, *values: str) -> bytes:
    return text(key) + struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(text, values))


VALUES = (
    text("general.architecture") + struct.pack("<I", 8) + text("llama"),
    uint32("llama.block_count", 2),
    strings("tokenizer.ggml.tokens", "a", "bc", ""),
    text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 3) + struct.pack("<3f", 1, 2, 3),
    text("general.flag") + struct.pack("<I?", 7, True),
)


@dataclass(frozen=True)
class Info:
    """A tensor's line in the header."""

    name: str
    dims: tuple[int, ...]
    type: int
    place: int

    def packed(self) -> bytes:
        sizes = struct.pack(f"<{len(self.dims)}Q", *self.dims)
        return (
            text(self.name)
            + struct.pack("<I", len(self.dims))
            + sizes
            + struct.pack("<IQ", self.type, self.place)
        )


@dataclass(frozen=True)
class Made:
    """A GGUF file in parts."""

    infos: tuple[Info, ...]
    data: bytes
    values: tuple[bytes, ...] = VALUES
    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None
    value_count: int | None = None
    alignment: int = 32

    def packed(self) -> bytes:
        counts = (self.tensor_count, self.value_count)
        lengths = (len(self.infos), len(self.values))
        counted = [own if given is None else given for given, own in zip(counts, lengths, strict=True)]
        head = self.magic + struct.pack("<IQQ", self.version, *counted)
        head += b"".join(self.values) + b"".join(info.packed() for info in self.infos)
        return head + bytes(-len(head) % self.alignment) + self.data

    def with_info(self, number: int, **changes: object) -> Made:
        infos = list(self.infos)
        infos[number] = replace(infos[number], **changes)  # type: ignore[arg-type]
        return replace(self, infos=tuple(infos))


def made(tensors: Mapping[str, Tensor], alignment: int = 32) -> Made:
    infos, data = [], b""
    for name, value in tensors.items():
        infos.append(Info(name, tuple(value.shape)[::-1], TYPES[value.dtype], len(data)))
        data += raw(value)
        data += bytes(-len(data) % alignment)
    values = VALUES if alignment == 32 else (*VALUES, uint32("general.alignment", alignment))
    return Made(tuple(infos), data, values, alignment=alignment)
