"""Makes the golden file: every kind and oddity of the format, from whole-number formulas.

Scales are powers of two and codes are small, so every weight is exact in FP32 whatever the order of
summation. `python -m tests.golden.make` writes the file anew; the tests say whether it changed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from factorpack.format.container import Writer
from factorpack.record import Encoded

GOLDEN = Path(__file__).with_name("golden.packed.safetensors")
ALIASES = {"tied.weight": "fc.weight"}


def hashed(index: int, salt: int) -> int:
    """Knuth's multiplicative hash: 16 bits that look random and are the same everywhere."""
    return ((index * 2654435761 + salt * 40503) % (1 << 32)) >> 16


def codes(rows: int, columns: int, bits: int, salt: int) -> Tensor:
    """Even rows use the whole range evenly, odd rows are zero but for a rare -1."""
    size, half = 1 << bits, 1 << (bits - 1)

    def code(row: int, column: int) -> int:
        number = hashed(row * columns + column, salt)
        return number % size - half if row % 2 == 0 else -(number % 23 == 0)

    return torch.tensor([[code(i, j) for j in range(columns)] for i in range(rows)], dtype=torch.int8)


def powers(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Scales from 1/16 to 1."""
    return torch.tensor(
        [[2.0 ** -((3 * i + 5 * j) % 5) for j in range(columns)] for i in range(rows)], dtype=dtype
    )


def tensors() -> dict[str, Encoded]:
    """What the golden file holds."""
    return {"conv.weight": _conv(), "up.weight": _up(), **_scalars(), **_kept()}


def _conv() -> Encoded:
    """Factors with a mean and a scale a latent row; 540 numbers in 34 tiles of 16, the last not full."""
    parts = {
        "codebook": codes(16, 8, 4, salt=1),
        "codebook_scale": powers(1, 8, torch.float16),
        "latent": codes(8, 34, 3, salt=2),
        "latent_scale": powers(8, 1, torch.float16),
        "mean": torch.tensor([[(i - 7) / 32] for i in range(16)]),
    }
    bits = {"codebook": 4, "latent": 3}
    return Encoded("factors", (12, 5, 3, 3), torch.float32, parts, bits, 0, 37, "tile 16 ≠ 256")


def _up() -> Encoded:
    """Factors of a transposed convolution of two groups, with a scale a latent column and no mean."""
    parts = {
        "codebook": codes(8, 3, 5, salt=3),
        "codebook_scale": powers(1, 3, torch.float32),
        "latent": codes(3, 24, 2, salt=4),
        "latent_scale": powers(1, 24, torch.float32),
    }
    bits = {"codebook": 5, "latent": 2}
    return Encoded("factors", (4, 3, 4, 4), torch.float16, parts, bits, transposed_groups=2)


def _scalars() -> dict[str, Encoded]:
    """Codes that pack, codes of a transposed convolution, and so many zeros that filler is needed."""
    fc = {"codes": codes(6, 40, 4, salt=5), "scale": powers(6, 1, torch.float16)}
    up = {"codes": codes(2, 15, 8, salt=6), "scale": powers(2, 1, torch.float32)}
    zeros = {"codes": torch.zeros(2, 6000, dtype=torch.int8), "scale": torch.zeros(2, 1).half()}
    return {
        "fc.weight": Encoded("scalar", (6, 40), torch.bfloat16, fc, {"codes": 4}, note="classifier"),
        "up1d.weight": Encoded("scalar", (3, 2, 5), torch.float64, up, {"codes": 8}, transposed_groups=1),
        "zeros": Encoded("scalar", (2, 6000), torch.float32, zeros, {"codes": 2}),
    }


def _kept() -> dict[str, Encoded]:
    values = {
        "odd": torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 2.0**-149, 1 / 3]),
        "bf16": torch.arange(-3, 3).to(torch.bfloat16).reshape(2, 3),
        "fp8": torch.arange(8).to(torch.float8_e4m3fn),
        "complex": torch.complex(torch.arange(3.0), -torch.arange(3.0)),
        "steps": torch.tensor(123456789012),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
    }
    kept = {
        name: Encoded("keep", tuple(value.shape), value.dtype, {"values": value})
        for name, value in values.items()
    }
    rounded = {"values": torch.tensor([0.5, -1.25]).half()}
    return {
        **kept,
        "rounded": Encoded("keep", (2,), torch.float32, rounded, note="bias, norm or other vector"),
    }


def write(path: Path) -> None:
    with Writer(path) as writer:
        for name, encoded in tensors().items():
            writer.add(name, encoded)
        for alias, target in ALIASES.items():
            writer.alias(alias, target)


if __name__ == "__main__":
    write(GOLDEN)
