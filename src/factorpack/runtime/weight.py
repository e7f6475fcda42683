"""A weight that lies in memory as packed codes and is rebuilt each time it is asked for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from factorpack.decode import check_indices, rebuild
from factorpack.record import Encoded
from factorpack.runtime.codes import pack_codes, unpack_codes

CODED = ("factors", "spatial", "codewords", "scalar", "levels")
"""Kinds that are smaller in memory than the weight they stand for."""
_TILE_FIRST = {"factors": "latent"}
"""Codes held transposed, the numbers of a tile side by side: the order in which a layer reads them."""


class PackedWeight(nn.Module):
    """The parts of an `Encoded` as buffers of bytes: codes packed to their width, other numbers as they are.

    Nothing of it is a float to torch, so that `model.half()` changes the type of the weight that comes out
    and not the numbers that it is made of; and bytes pass through every backend of torch.distributed.
    """

    def __init__(self, encoded: Encoded, like: Tensor) -> None:
        super().__init__()
        check_indices(encoded)
        self.kind, self.shape, self.decoded = encoded.kind, encoded.shape, encoded.dtype
        self.transposed_groups = encoded.transposed_groups
        self.bits = dict(encoded.bits)
        self.part_shapes = {name: tuple(part.shape) for name, part in encoded.parts.items()}
        self.part_dtypes = {name: part.dtype for name, part in encoded.parts.items()}
        for name, part in encoded.parts.items():
            self.register_buffer(name, self._stored(name, part).to(like.device))
        self.like: Tensor
        self.register_buffer("like", torch.empty(0, dtype=like.dtype, device=like.device), persistent=False)

    def _stored(self, name: str, part: Tensor) -> Tensor:
        if name in self.bits:
            turned = part.T if name == _TILE_FIRST.get(self.kind) else part
            return pack_codes(turned, self.bits[name])
        return part.contiguous().view(torch.uint8)

    def forward(self) -> Tensor:
        """The weight as `load_into` would give it to the model."""
        # The file's products are in FP32, mixed precision or not.
        with torch.autocast(self.like.device.type, enabled=False):
            return rebuild(self.encoded()).to(self.like.dtype)

    def encoded(self) -> Encoded:
        """What it was made of, without the notes."""
        parts = {name: self.part(name) for name in self.part_shapes}
        return Encoded(self.kind, self.shape, self.decoded, parts, self.bits, self.transposed_groups)

    def part(self, name: str) -> Tensor:
        stored: Tensor = getattr(self, name)
        shape = self.part_shapes[name]
        if name not in self.bits:
            return stored.view(self.part_dtypes[name])
        rows, columns = shape
        codes: Tensor = unpack_codes(stored, self.bits[name], rows * columns)
        return codes.view(columns, rows).T if name == _TILE_FIRST.get(self.kind) else codes.view(shape)

    def extra_repr(self) -> str:
        widths = ", ".join(f"{name} of {bits} bits" for name, bits in self.bits.items())
        return f"{tuple(self.shape)} as {self.kind}: {widths}"
