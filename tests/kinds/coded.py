"""Coded weights made by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from factorpack.kinds.codewords import index_bits
from factorpack.quantize.uniform import code_dtype
from factorpack.record import Encoded


def codes(*shape: int, low: int = -8, high: int = 7, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8)


def factors(
    codebook: Tensor,
    latent: Tensor,
    shape: tuple[int, ...],
    latent_scale: Tensor | None = None,
    **other: Tensor,
) -> Encoded:
    parts = {
        "codebook": codebook,
        "codebook_scale": torch.ones(1, codebook.shape[1], dtype=torch.float16),
        "latent": latent,
        "latent_scale": torch.ones(latent.shape[0], 1) if latent_scale is None else latent_scale,
    }
    return Encoded("factors", shape, torch.float32, parts | other, {"codebook": 4, "latent": 4})


def stored_codewords(codebook: Tensor, indices: list[list[int]], shape: tuple[int, ...]) -> Encoded:
    bits = index_bits(len(codebook) // len(indices))
    stored = (torch.tensor(indices) - 2 ** (bits - 1)).to(code_dtype(bits))
    parts = {"codebook": codebook, "indices": stored}
    return Encoded("codewords", shape, torch.float32, parts, {"indices": bits})


def level_codes(*rows: list[int], levels: list[list[float]], bits: int, shape: tuple[int, ...]) -> Encoded:
    parts = {"codes": torch.tensor(rows, dtype=torch.int8), "levels": torch.tensor(levels).half()}
    return Encoded("levels", shape, torch.float32, parts, {"codes": bits})
