"""Encoded -> weight: one pure function a kind, and the rules its parts must keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from factorpack.errors import FormatError
from factorpack.kinds.slices import piece_of, pieces
from factorpack.quantize.uniform import MAX_STORED_BITS, MIN_BITS, code_dtype, code_range, from_codes
from factorpack.record import Encoded
from factorpack.tiles import from_spatial, from_tiles, out_first_shape, spatial_shape, tile_count

LEAST_LEVEL_BITS = 1
"""A bit tells two levels apart; codes that are multiplied have no use for the two numbers -1 and 0."""
_FLOATS = (torch.float16, torch.float32)
_NARROW = 16
"""Numbers of a tile below which two are done as one."""
_STORED = {"keep": "values", "constant": "value"}
"""The part that holds the tensor's own numbers, for the kinds that have one."""


LAYOUTS: dict[str, Callable[[Tensor, tuple[int, ...], int], Tensor]] = {
    "factors": from_tiles,
    "spatial": from_spatial,
}
"""Kinds that are a product of two matrices: how it becomes the weight, given its shape and transposed groups."""


def decode(encoded: Encoded) -> Tensor:
    """The weight an `Encoded` stands for, in its own dtype and shape."""
    check_indices(encoded)
    return rebuild(encoded)


def decode_into(encoded: Encoded, weight: Tensor) -> None:
    """`decode` into a contiguous tensor of its shape, piece by piece, converted to that tensor's type."""
    if encoded.kind == "keep":
        weight.copy_(encoded.parts["values"].to(encoded.dtype))
        return
    check_indices(encoded)
    shapes = {name: tuple(part.shape) for name, part in encoded.parts.items()}
    found = pieces(encoded.kind, encoded.shape, encoded.transposed_groups, shapes)
    for piece in found:
        piece.put(rebuild(piece_of(encoded, piece)), weight)
    if not found:
        weight.copy_(rebuild(encoded))


def rebuild(encoded: Encoded) -> Tensor:
    """`decode` where `check_indices` has been passed before: no step depends on a number, so it can be traced."""
    weight = DECODERS[encoded.kind](encoded)
    return weight.to(encoded.dtype) if encoded.kind in _STORED else narrowed(weight, encoded.dtype)


def narrowed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`, clamped where it is narrow: the nearest code may lie beyond what it holds."""
    if dtype.itemsize < 4:
        limit = torch.finfo(dtype).max
        weight = weight.clamp(-limit, limit)
    return weight.to(dtype)


def factors(encoded: Encoded) -> Tensor:
    """W~ = C Z + mu 1^T: codes (d, k) and (k, n) times their scales, plus the centring vector (d, 1).

    How W~ is laid out in the weight is the kind's: `LAYOUTS`.
    """
    return LAYOUTS[encoded.kind](_product(encoded), encoded.shape, encoded.transposed_groups)


def _product(encoded: Encoded) -> Tensor:
    """W~, tile after tile in memory: the order in which they make the weight.

    Two narrow tiles are done as one, with C twice along a diagonal: matrix products that are a few numbers
    wide take four times as long. FP16 scales cannot overflow, so that what is multiplied by zero is finite.
    """
    codebook = from_codes(encoded.parts["codebook"], encoded.parts["codebook_scale"])
    latent = from_codes(encoded.parts["latent"].T, encoded.parts["latent_scale"].T).contiguous()  # (n, k)
    mean = encoded.parts.get("mean")
    row = None if mean is None else mean.T.to(latent.dtype)
    (tile, rank), count = codebook.shape, len(latent)
    scales = (encoded.parts["codebook_scale"], encoded.parts["latent_scale"])
    if tile < _NARROW and count % 2 == 0 and all(scale.dtype == torch.float16 for scale in scales):
        codebook, latent = torch.block_diag(codebook, codebook), latent.reshape(count // 2, 2 * rank)
        row = None if row is None else row.repeat(1, 2)
    tiles = latent @ codebook.T if row is None else torch.addmm(row, latent, codebook.T)
    return tiles.reshape(count, tile).T


def check_indices(encoded: Encoded) -> None:
    """Raises FormatError where a code of an index into a table is none of the table's."""
    if encoded.kind == "codewords":
        codes, count = encoded.parts["indices"], _codewords_a_stage(encoded)
        low, _ = code_range(encoded.bits["indices"])
        first, last = int(codes.min()) - low, int(codes.max()) - low
        if first < 0 or last >= count:
            raise FormatError(
                f"part 'indices' holds {first} to {last}, a codebook has codewords 0 to {count - 1}"
            )
    elif encoded.kind == "levels":
        codes, count = encoded.parts["codes"], encoded.parts["levels"].shape[1]
        low, high = level_range(count)
        first, last = int(codes.min()), int(codes.max())
        if first < low or last > high:
            raise FormatError(f"codes {first} to {last}, {count} levels allow {low} to {high}")


def codewords(encoded: Encoded) -> Tensor:
    """Tile j = sum over stages m of codebook[m k + index[m, j]]: vector quantization, or additive with stages."""
    indices = _codebook_rows(encoded)
    codebook = encoded.parts["codebook"].float()
    return from_tiles(summed_codewords(codebook, indices).T, encoded.shape, encoded.transposed_groups)


def codeword_indices(encoded: Encoded) -> Tensor:
    """Rows of the codebook that make each tile, (stages, n); FormatError where one is not its stage's."""
    check_indices(encoded)
    return _codebook_rows(encoded)


def _codebook_rows(encoded: Encoded) -> Tensor:
    codes, count = encoded.parts["indices"], _codewords_a_stage(encoded)
    low, _ = code_range(encoded.bits["indices"])
    starts = torch.arange(0, count * len(codes), count, device=codes.device, dtype=torch.int32)
    return codes.to(torch.int32) - low + starts[:, None]


def _codewords_a_stage(encoded: Encoded) -> int:
    return len(encoded.parts["codebook"]) // len(encoded.parts["indices"])


def summed_codewords(codebook: Tensor, indices: Tensor) -> Tensor:
    """(stages k, d) and (stages, n) -> (n, d); stage after stage, so that every reader rounds alike."""
    total = codebook.index_select(0, indices[0])
    for stage in indices[1:]:
        total = total + codebook.index_select(0, stage)
    return total


def scalar(encoded: Encoded) -> Tensor:
    """W = q s: codes (out, rest), and a scale an output channel (out, 1) or one for all (1, 1)."""
    rows = from_codes(encoded.parts["codes"], encoded.parts["scale"])
    return from_tiles(rows.T, encoded.shape, encoded.transposed_groups)


def levels(encoded: Encoded) -> Tensor:
    """W = v[q + floor(L/2)]: codes (out, rest), and L levels v a channel (out, L) or for all (1, L)."""
    codes, table = encoded.parts["codes"], encoded.parts["levels"]
    low, _ = level_range(table.shape[1])
    rows = table.float().expand(len(codes), -1).gather(1, codes.long() - low)
    return from_tiles(rows.T, encoded.shape, encoded.transposed_groups)


def level_range(count: int) -> tuple[int, int]:
    """The codes of the first and the last of some levels: 0 is the middle one, as far as there is one.

    >>> level_range(3), level_range(4)
    ((-1, 1), (-2, 1))
    """
    return -(count // 2), count - 1 - count // 2


def keep(encoded: Encoded) -> Tensor:
    return encoded.parts["values"].clone()  # a caller may train what it gets


def constant(encoded: Encoded) -> Tensor:
    """A tensor filled with one value, (1,)."""
    return encoded.parts["value"].reshape(()).expand(encoded.shape).clone()


DECODERS: dict[str, Callable[[Encoded], Tensor]] = {
    "factors": factors,
    "spatial": factors,
    "codewords": codewords,
    "scalar": scalar,
    "levels": levels,
    "keep": keep,
    "constant": constant,
}


@dataclass(frozen=True, slots=True)
class PartSpec:
    """What a file says of a part before any of it is read. `bits` is 0 for a part that is not codes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int = 0


def specs(encoded: Encoded) -> dict[str, PartSpec]:
    """The specs of parts that are already here."""
    return {
        name: PartSpec(tuple(part.shape), part.dtype, encoded.bits.get(name, 0))
        for name, part in encoded.parts.items()
    }


def check(
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    transposed_groups: int,
    parts: Mapping[str, PartSpec],
) -> None:
    """Raises FormatError unless the parts are those `kind` needs for a weight of this shape and type."""
    if kind not in _CHECKS:
        raise FormatError(f"unknown kind {kind!r}, known are {', '.join(_CHECKS)}")
    if transposed_groups and (len(shape) < 3 or transposed_groups < 0 or shape[0] % transposed_groups):
        raise FormatError(f"shape {shape} is not a transposed convolution of {transposed_groups} groups")
    _CHECKS[kind](shape, transposed_groups, parts)
    # Only floats are ever rounded to another type: anything else would change when it is decoded.
    stored = parts[_STORED[kind]].dtype if kind in _STORED else torch.float32
    rounds = kind != "constant" and stored.is_floating_point and dtype.is_floating_point
    if stored != dtype and not rounds:
        raise FormatError(f"{stored} values cannot stand for a {dtype} tensor")


_PRODUCT = {"codebook", "codebook_scale", "latent", "latent_scale"}


def _check_factors(shape: tuple[int, ...], _: int, parts: Mapping[str, PartSpec]) -> None:
    _expect_names(parts, _PRODUCT, {"mean"})
    tile = _expect_codebook(shape, parts)
    _expect_latent(parts, tile_count(torch.Size(shape).numel(), tile))
    if "mean" in parts:
        _expect_shape(parts, "mean", (tile, 1))
        _expect_dtype(parts, "mean", _FLOATS)


def _check_spatial(shape: tuple[int, ...], groups: int, parts: Mapping[str, PartSpec]) -> None:
    _expect_names(parts, _PRODUCT)
    tile = _expect_codebook(shape, parts)
    if len(shape) < 2:
        raise FormatError(f"a tensor of shape {shape} has no filters, expected two dimensions or more")
    outputs, inputs, height, width = spatial_shape(shape, groups)
    if tile != inputs * height:
        raise FormatError(f"a codebook of {tile} rows for {inputs} inputs and filters {height} high")
    _expect_latent(parts, outputs * width)


def _expect_codebook(shape: tuple[int, ...], parts: Mapping[str, PartSpec]) -> int:
    """The tile of a product of codes for a weight of this shape."""
    numel = torch.Size(shape).numel()
    _expect_codes(parts, "codebook")
    _expect_codes(parts, "latent")
    if numel == 0:
        raise FormatError(f"an empty tensor of shape {shape} has no factors")
    tile, rank = parts["codebook"].shape
    if not 1 <= rank <= tile <= numel:
        raise FormatError(f"a codebook of {tile} x {rank} does not suit a weight of {numel} numbers")
    return tile


def _expect_latent(parts: Mapping[str, PartSpec], count: int) -> None:
    """The latent of `count` tiles, and the scales of both factors."""
    rank = parts["codebook"].shape[1]
    _expect_shape(parts, "latent", (rank, count))
    _expect_scale(parts, "codebook_scale", {(1, rank), (1, 1)})
    _expect_scale(parts, "latent_scale", {(rank, 1), (1, count), (1, 1)})


def _check_codewords(shape: tuple[int, ...], _: int, parts: Mapping[str, PartSpec]) -> None:
    numel = torch.Size(shape).numel()
    _expect_names(parts, {"codebook", "indices"})
    _expect_codes(parts, "indices")
    _expect_dtype(parts, "codebook", _FLOATS)
    if numel == 0:
        raise FormatError(f"an empty tensor of shape {shape} has no codewords")
    book, stages = parts["codebook"].shape, parts["indices"].shape[0]
    if len(book) != 2 or stages < 1 or book[0] < stages or book[0] % stages or not 1 <= book[1] <= numel:
        raise FormatError(f"a codebook of shape {book} does not suit {stages} stages of {numel} numbers")
    _expect_shape(parts, "indices", (stages, tile_count(numel, book[1])))
    if parts["indices"].bits != index_bits(book[0] // stages):
        raise FormatError(
            f"indices of {parts['indices'].bits} bits, {book[0] // stages} codewords have "
            f"{index_bits(book[0] // stages)}"
        )


def index_bits(count: int) -> int:
    """The width of indices into `count` codewords: no code is narrower than 2 bits.

    >>> [index_bits(count) for count in (1, 4, 5, 256, 257)]
    [2, 2, 3, 8, 9]
    """
    return max((count - 1).bit_length(), MIN_BITS)


def _check_scalar(shape: tuple[int, ...], groups: int, parts: Mapping[str, PartSpec]) -> None:
    _expect_names(parts, {"codes", "scale"})
    _expect_codes(parts, "codes")
    rows = _expect_rows(shape, groups, parts)
    _expect_scale(parts, "scale", {(rows, 1), (1, 1)})


def _check_levels(shape: tuple[int, ...], groups: int, parts: Mapping[str, PartSpec]) -> None:
    _expect_names(parts, {"codes", "levels"})
    _expect_codes(parts, "codes", LEAST_LEVEL_BITS)
    rows, most = _expect_rows(shape, groups, parts), 1 << parts["codes"].bits
    found = parts["levels"].shape
    if len(found) != 2 or not 2 <= found[1] <= most:
        raise FormatError(f"levels of shape {found}, expected 2 to {most} in each row of a matrix")
    _expect_scale(parts, "levels", {(rows, found[1]), (1, found[1])})


def _check_keep(shape: tuple[int, ...], _: int, parts: Mapping[str, PartSpec]) -> None:
    _expect_names(parts, {"values"})
    _expect_shape(parts, "values", shape)
    if parts["values"].bits:
        raise FormatError("kept values are stored as they are, not as codes")


def _check_constant(_: tuple[int, ...], __: int, parts: Mapping[str, PartSpec]) -> None:
    _expect_names(parts, {"value"})
    _expect_shape(parts, "value", (1,))
    if parts["value"].bits:
        raise FormatError("a constant is stored as it is, not as a code")


_CHECKS: dict[str, Callable[[tuple[int, ...], int, Mapping[str, PartSpec]], None]] = {
    "factors": _check_factors,
    "spatial": _check_spatial,
    "codewords": _check_codewords,
    "scalar": _check_scalar,
    "levels": _check_levels,
    "keep": _check_keep,
    "constant": _check_constant,
}


def _expect_names(parts: Mapping[str, PartSpec], needed: set[str], optional: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    found = set(parts)
    if not needed <= found <= needed | optional:
        raise FormatError(f"found parts {sorted(found)}, needed are {sorted(needed)}")


def _expect_shape(parts: Mapping[str, PartSpec], name: str, shape: tuple[int, ...]) -> None:
    if parts[name].shape != shape:
        raise FormatError(f"part {name!r} has shape {parts[name].shape}, expected {shape}")


def _expect_dtype(parts: Mapping[str, PartSpec], name: str, allowed: tuple[torch.dtype, ...]) -> None:
    if parts[name].bits or parts[name].dtype not in allowed:
        raise FormatError(f"part {name!r} is {parts[name].dtype}, allowed are {allowed}")


def _expect_rows(shape: tuple[int, ...], groups: int, parts: Mapping[str, PartSpec]) -> int:
    """How many output channels a weight has that is stored as a code a number, (out, rest)."""
    numel = torch.Size(shape).numel()
    if not shape or numel == 0:
        raise FormatError(f"a tensor of shape {shape} has no channels to quantize")
    rows = out_first_shape(shape, groups)[0]
    _expect_shape(parts, "codes", (rows, numel // rows))
    return rows


def _expect_codes(parts: Mapping[str, PartSpec], name: str, least_bits: int = MIN_BITS) -> None:
    part = parts[name]
    if not least_bits <= part.bits <= MAX_STORED_BITS or len(part.shape) != 2:
        raise FormatError(
            f"part {name!r} has {part.bits} bits and shape {part.shape}: expected a matrix of codes "
            f"of {least_bits} to {MAX_STORED_BITS} bits"
        )
    if part.dtype != code_dtype(part.bits):
        raise FormatError(
            f"part {name!r} is {part.dtype}, codes of {part.bits} bits are {code_dtype(part.bits)}"
        )


def _expect_scale(parts: Mapping[str, PartSpec], name: str, shapes: set[tuple[int, ...]]) -> None:
    _expect_dtype(parts, name, _FLOATS)
    if parts[name].shape not in shapes:
        raise FormatError(f"part {name!r} has shape {parts[name].shape}, expected one of {sorted(shapes)}")
