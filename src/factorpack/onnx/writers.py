"""Encoded -> the nodes that rebuild its weight: one function a kind, the decoders' twins."""

from __future__ import annotations

from collections.abc import Callable

import torch

from factorpack.kinds import KINDS
from factorpack.kinds.codewords import codeword_indices
from factorpack.kinds.levels import level_range
from factorpack.onnx.sketch import TYPES, Sketch, Type
from factorpack.record import Encoded

_LITTLE_BYTES = 64
"""Plain values of no more bytes than this stay plain: the nodes that would rebuild them take as much."""


def saves(encoded: Encoded, wanted: Type) -> bool:
    """Whether nodes can rebuild a tensor of a graph's type, and take less than its plain values."""
    if encoded.kind not in WRITERS:
        return False
    kind = KINDS[encoded.kind]
    if kind.is_coded:
        return True
    if kind.is_raw and (encoded.parts["values"].dtype.itemsize >= _item_bytes(wanted)):
        return False
    return encoded.numel * _item_bytes(wanted) > _LITTLE_BYTES


def rebuild(sketch: Sketch, encoded: Encoded, wanted: Type, name: str) -> None:
    """Adds the nodes whose last one gives the weight, in the graph's type, under `name`."""
    value = WRITERS[encoded.kind](sketch, encoded)
    found = Type.FLOAT
    if not KINDS[encoded.kind].is_coded:
        found = TYPES[next(iter(encoded.parts.values())).dtype]
    elif encoded.dtype.itemsize < 4:
        limit = torch.finfo(encoded.dtype).max
        ends = (sketch.store(torch.tensor(end)) for end in (-limit, limit))
        value = sketch.add("Clip", value, *ends)
    for kind in (TYPES[encoded.dtype], wanted):
        if found != kind:
            value, found = sketch.add("Cast", value, to=kind), kind
    sketch.give(value, name)


def factors(sketch: Sketch, encoded: Encoded) -> str:
    """C Z + mu 1^T, transposed: tiles are rows where a graph cuts them."""
    tile, _ = encoded.parts["codebook"].shape
    tiles = sketch.add("Transpose", _product(sketch, encoded), perm=(1, 0))
    return _from_tiles(sketch, tiles, tile, encoded)


def spatial(sketch: Sketch, encoded: Encoded) -> str:
    outputs, inputs, height, width = encoded.layout.spatial_shape
    channels = sketch.reshape(_product(sketch, encoded), (inputs, height, outputs, width))
    return _from_out_first(sketch, sketch.add("Transpose", channels, perm=(2, 0, 1, 3)), encoded)


def codewords(sketch: Sketch, encoded: Encoded) -> str:
    """Rows of the codebook, gathered by indices and summed over stages."""
    codebook, codes = encoded.parts["codebook"], encoded.parts["indices"]
    offsets = (
        codeword_indices(encoded)[:, :1].cpu() - codes[:, :1].cpu()
    )  # what makes a code a row: (stages, 1)
    indices = _shifted(sketch, codes, offsets)
    found = sketch.add("Gather", sketch.numbers(codebook), indices, axis=0)  # (stages, n, d)
    axis = sketch.store(torch.tensor([0], dtype=torch.int64))
    return _from_tiles(sketch, sketch.add("ReduceSum", found, axis, keepdims=0), codebook.shape[1], encoded)


def scalar(sketch: Sketch, encoded: Encoded) -> str:
    rows = _scaled(sketch, encoded, "codes", "scale")
    return _from_out_first(sketch, rows, encoded)


def levels(sketch: Sketch, encoded: Encoded) -> str:
    """A level a code: of its own row's, or of the only row's."""
    codes, table = encoded.parts["codes"], encoded.parts["levels"]
    low, _ = level_range(table.shape[1])
    indices = _shifted(sketch, codes, torch.tensor([[-low]]))
    if len(table) == len(codes):
        rows = sketch.add("GatherElements", sketch.numbers(table), indices, axis=1)
    else:
        rows = sketch.add("Gather", sketch.numbers(table[0]), indices, axis=0)
    return _from_out_first(sketch, rows, encoded)


def keep(sketch: Sketch, encoded: Encoded) -> str:
    return sketch.store(encoded.parts["values"])


def constant(sketch: Sketch, encoded: Encoded) -> str:
    shape = sketch.store(torch.tensor(encoded.shape, dtype=torch.int64))
    return sketch.add("Expand", sketch.store(encoded.parts["value"]), shape)


WRITERS: dict[str, Callable[[Sketch, Encoded], str]] = {
    "factors": factors,
    "spatial": spatial,
    "scalar": scalar,
    "levels": levels,
    "codewords": codewords,
    "keep": keep,
    "constant": constant,
}
"""Kinds that a graph can rebuild. A tensor of any other kind stays plain values in the graph."""


def _product(sketch: Sketch, encoded: Encoded) -> str:
    codebook = _scaled(sketch, encoded, "codebook", "codebook_scale")
    latent = _scaled(sketch, encoded, "latent", "latent_scale")
    matrix = sketch.add("MatMul", codebook, latent)
    mean = encoded.parts.get("mean")
    return matrix if mean is None else sketch.add("Add", matrix, sketch.numbers(mean))


def _scaled(sketch: Sketch, encoded: Encoded, codes: str, scale: str) -> str:
    return sketch.add("Mul", sketch.codes(encoded.parts[codes]), sketch.numbers(encoded.parts[scale]))


def _shifted(sketch: Sketch, codes: torch.Tensor, offsets: torch.Tensor) -> str:
    """Codes plus offsets, as indices."""
    whole = sketch.add("Cast", sketch.codes(codes), to=Type.INT32)
    return sketch.add("Add", whole, sketch.store(offsets.to(torch.int32)))


def _from_tiles(sketch: Sketch, tiles: str, tile: int, encoded: Encoded) -> str:
    """Tiles as rows (n, tile) -> the weight; the last tile may be longer than what is left of it."""
    count = encoded.layout.tile_count(tile) * tile
    if count != encoded.numel:
        tiles = sketch.first(sketch.reshape(tiles, (-1,)), count, encoded.numel)
    return _from_out_first(sketch, tiles, encoded)


def _from_out_first(sketch: Sketch, value: str, encoded: Encoded) -> str:
    """Numbers in the order out, in, h, w -> the weight."""
    groups, shape = encoded.layout.transposed_groups, encoded.shape
    if groups:
        outputs, *rest = encoded.layout.out_first_shape
        split = sketch.reshape(value, (groups, outputs // groups, *rest))  # (g, out/g, in/g, ...)
        value = sketch.add("Transpose", split, perm=(0, 2, 1, *range(3, len(shape) + 1)))
    return sketch.reshape(value, shape)


def _item_bytes(kind: Type) -> int:
    return next(dtype.itemsize for dtype, each in TYPES.items() if each == kind)
