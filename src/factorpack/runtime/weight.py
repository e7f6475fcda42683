"""A weight that lies in memory as packed codes and is rebuilt each time it is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from factorpack.decode import check_indices, rebuild
from factorpack.quantize.uniform import from_codes
from factorpack.record import Encoded
from factorpack.runtime.codes import pack_codes, unpack_codes
from factorpack.runtime.rows import pack_rows, suits, unpack_rows

CODED = ("factors", "spatial", "codewords", "scalar", "levels")
"""Kinds that are smaller in memory than the weight they stand for."""
_TILE_FIRST = {"factors": "latent"}
"""Codes held transposed, the numbers of a tile side by side: the order in which a layer reads them."""
_MULTIPLIED = {"factors": "latent", "scalar": "codes"}
"""Codes that inputs can be multiplied by as they are."""


class PackedWeight(nn.Module):
    """The parts of an `Encoded` as buffers of bytes: codes packed to their width, other numbers as they are.

    Nothing of it is a float to torch (but what is folded, which is made anew), so that `model.half()` changes
    the type of the weight that comes out and not the numbers that it is made of; and bytes pass through every
    backend of torch.distributed.
    """

    def __init__(self, encoded: Encoded, like: Tensor) -> None:
        super().__init__()
        check_indices(encoded)
        self.kind, self.shape, self.decoded = encoded.kind, encoded.shape, encoded.dtype
        self.transposed_groups = encoded.transposed_groups
        self.bits = dict(encoded.bits)
        self.part_shapes = {name: tuple(part.shape) for name, part in encoded.parts.items()}
        self.part_dtypes = {name: part.dtype for name, part in encoded.parts.items()}
        self.rows = _rows(encoded)
        for name, part in encoded.parts.items():
            self.register_buffer(name, self._stored(name, part).to(like.device))
        self.like: Tensor
        self.register_buffer("like", torch.empty(0, dtype=like.dtype, device=like.device), persistent=False)
        self.folded: Tensor | None
        self.register_buffer("folded", None, persistent=False)
        self.folded_mean: Tensor | None
        self.register_buffer("folded_mean", None, persistent=False)

    def _stored(self, name: str, part: Tensor) -> Tensor:
        if name not in self.bits:
            return part.contiguous().view(torch.uint8)
        turned = part.T if name == _TILE_FIRST.get(self.kind) else part
        if name in self.rows:
            return pack_rows(turned.reshape(self.rows[name]), self.bits[name])
        return pack_codes(turned, self.bits[name])

    def fold(self) -> None:
        """Keeps C times all scales, (d, k), where Z lies in rows and has no scale of its own then; and mu of
        all tiles of a row, (K, 1). Made at every call, they would cost more than the products do. Both are in
        the weight's type, but in FP32 for FP16, which does not hold the scales.
        """
        if self.kind != "factors" or "latent" not in self.rows or self.part_shapes["latent_scale"][1] != 1:
            return
        dtype = torch.float32 if self.like.dtype == torch.float16 else self.like.dtype
        codebook = from_codes(self.part("codebook"), self.part("codebook_scale"))
        self.folded = (codebook * self.part("latent_scale").T).to(dtype)
        if "mean" in self.part_shapes:
            tiles = self.shape[1] // len(codebook)
            self.folded_mean = self.part("mean").to(dtype).repeat(tiles, 1)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.folded is not None:
            self.fold()

    def _apply(self, *args: Any, **kwargs: Any) -> PackedWeight:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.folded is not None:  # anew, since a narrow type has lost what a wide one could hold
            self.fold()
        return self

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
        if name in self.rows:
            codes: Tensor = unpack_rows(stored, self.bits[name], self.rows[name][1])
        else:
            codes = unpack_codes(stored, self.bits[name], rows * columns)
        return codes.view(columns, rows).T if name == _TILE_FIRST.get(self.kind) else codes.view(shape)

    def extra_repr(self) -> str:
        widths = ", ".join(f"{name} of {bits} bits" for name, bits in self.bits.items())
        return f"{tuple(self.shape)} as {self.kind}: {widths}"


def _rows(encoded: Encoded) -> dict[str, tuple[int, int]]:
    """Codes of a matrix that are laid out to be multiplied by, and their shape then: (outputs, codes of each)."""
    name = _MULTIPLIED.get(encoded.kind)
    if name is None or len(encoded.shape) != 2:
        return {}
    outputs = encoded.shape[0]
    if encoded.kind == "factors" and encoded.shape[1] % len(encoded.parts["codebook"]):
        return {}
    if encoded.kind == "scalar" and _clamps(encoded):
        return {}
    columns = encoded.parts[name].numel() // outputs
    return {name: (outputs, columns)} if suits(columns, encoded.bits[name]) else {}


def _clamps(encoded: Encoded) -> bool:
    """Whether a weight of codes and scales may meet the limits of its type, which products with codes do not."""
    largest = encoded.parts["scale"].float().abs().max().item() * (1 << (encoded.bits["codes"] - 1))
    return not largest <= torch.finfo(encoded.dtype).max
