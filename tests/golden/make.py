"""Makes the golden file: every kind and oddity of the format, from whole-number formulas.

Scales are powers of two and codes are small, so every weight is exact in FP32 whatever the order of
summation. `python -m tests.golden.make` writes the file anew; the tests say whether it changed.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from factorpack.format import chunks, entropy, streams, trellis_stream
from factorpack.format.container import Writer
from factorpack.record import Encoded

GOLDEN = Path(__file__).with_name("golden.packed.safetensors")
ALIASES = {"tied.weight": "fc.weight"}
PATH, CHUNKED, CHUNKED_PATH = "path.weight", "chunked.weight", "chunked_path.weight"
NORM, GAINS, BIASES = "norm.weight", "norm.gains", "norm.bias"


def hashed(index: int, salt: int) -> int:
    """Knuth's multiplicative hash: 16 bits that look random and are the same everywhere."""
    return ((index * 2654435761 + salt * 40503) % (1 << 32)) >> 16


def codes(rows: int, columns: int, bits: int, salt: int) -> Tensor:
    """Even rows use the whole range evenly, odd rows are zero but for a rare -1."""
    size, half = 1 << bits, 1 << (bits - 1)

    def code(row: int, column: int) -> int:
        number = hashed(row * columns + column, salt)
        return number % size - half if row % 2 == 0 else -(number % 23 == 0)

    dtype = torch.int8 if bits <= 8 else torch.int16
    return torch.tensor([[code(i, j) for j in range(columns)] for i in range(rows)], dtype=dtype)


def powers(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Scales from 1/16 to 1."""
    return torch.tensor(
        [[2.0 ** -((3 * i + 5 * j) % 5) for j in range(columns)] for i in range(rows)], dtype=dtype
    )


def tensors() -> dict[str, Encoded]:
    """What the golden file holds."""
    return {
        "conv.weight": _conv(),
        "up.weight": _up(),
        **_one_step(),
        **_scalars(),
        **_kept(),
        **_constants(),
        **_levels(),
        "spatial.weight": _spatial(),
        "sums.weight": _sums(),
        PATH: _path(),
        CHUNKED: _chunked(),
        "independent_path.weight": _path(),
        CHUNKED_PATH: _path(),
        **_floats(),
    }


def _sums() -> Encoded:
    """Codewords of two stages of five, 140 numbers in 24 tiles of 6, the last not full."""
    book = torch.tensor([[(hashed(6 * i + j, 11) % 64 - 32) / 16 for j in range(6)] for i in range(10)])
    index = [[hashed(24 * stage + tile, 12) % 5 - 4 for tile in range(24)] for stage in range(2)]
    parts = {"codebook": book.half(), "indices": torch.tensor(index, dtype=torch.int8)}
    return Encoded("codewords", (14, 10), torch.float32, parts, {"indices": 3})


def _chunked() -> Encoded:
    """Codes of which most are near zero, in rows of two widths: four classes, a chunk each."""

    def code(row: int, column: int) -> int:
        number = hashed(40 * row + column, 16)
        return number % 3 + number // 3 % 3 - 2 + (number // 9 % 15 - 7) * (row % 2)

    found = [[code(i, j) for j in range(40)] for i in range(32)]
    parts = {"codes": torch.tensor(found, dtype=torch.int8), "scale": torch.full((1, 1), 2.0**-6).half()}
    return Encoded("scalar", (32, 40), torch.float32, parts, {"codes": 5})


def _path() -> Encoded:
    """A path through a trellis of 4 states, 20 rows in a segment, with a column that has none."""
    after = ((0, 2), (2, 0), (1, 3), (3, 1))
    found = [[0] * 40 for _ in range(20)]
    for column in range(40):
        state = 0
        for row in range(20):
            index = 0 if column == 7 else hashed(40 * row + column, 13) % 7 - 3
            found[row][column] = 2 * index - (state >> 1) * ((index > 0) - (index < 0))
            state = after[state][index & 1]
    parts = {"codes": torch.tensor(found, dtype=torch.int8), "scale": torch.full((1, 1), 2.0**-5).half()}
    return Encoded("scalar", (20, 40), torch.float32, parts, {"codes": 4}, trellis=4)


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


def _one_step() -> dict[str, Encoded]:
    """One scale a layer and wide codes: factors whose tile is a kernel, and packed codes of 16 bits.

    The latent's scale varies by output channel and by row, so that its split view and classes of both pay.
    """
    one = torch.full((1, 1), 2.0**-9)
    kernel = {
        "codebook": codes(9, 9, 8, salt=7),
        "codebook_scale": one,
        "latent": _by_channel(9, 24, 16),
        "latent_scale": one.half(),
    }
    wide = {"codes": codes(1, 15, 16, salt=9), "scale": one}
    bits = {"codebook": 8, "latent": 9}
    return {
        "kernel.weight": Encoded("factors", (24, 16, 3, 3), torch.float32, kernel, bits),
        "wide.weight": Encoded("scalar", (1, 15), torch.float32, wide, {"codes": 16}),
    }


def _by_channel(rows: int, channels: int, each: int) -> Tensor:
    """Codes from one to six bits wide, and one of nine."""

    def code(row: int, column: int) -> int:
        width = 1 << (column // each % 4 + row % 3)
        return hashed(row * channels * each + column, salt=8) % width - width // 2

    found = [[code(i, j) for j in range(channels * each)] for i in range(rows)]
    found[0][0] = 200
    return torch.tensor(found, dtype=torch.int16)


def _scalars() -> dict[str, Encoded]:
    """Codes that pack, codes of a transposed convolution, and so many zeros that filler is needed."""
    fc = {"codes": codes(11, 40, 4, salt=5)[::2], "scale": powers(6, 1, torch.float16)}
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


def _floats() -> dict[str, Encoded]:
    """Floats of every type whose mantissas end in no zeros, in four and in one, and all that is odd about floats."""
    signs = [1 - 2 * (hashed(i, 17) % 2) for i in range(70)]
    whole = [(hashed(i, 18) * 128 + hashed(i, 19) % 128) | 1 << 23 for i in range(70)]
    fp32 = torch.tensor([sign * each / 2**24 for sign, each in zip(signs, whole, strict=True)])
    few = torch.tensor([(64 + hashed(i, 20) % 64) / 2.0 ** (7 + i % 5) for i in range(70)]).half()
    odd = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 2.0**-20, -(2.0**-15)]
    few[::10] = torch.tensor(odd).half()
    bf16 = torch.tensor([sign * (64 + hashed(i, 21) % 64) / 2**6 for i, sign in enumerate(signs)]).bfloat16()
    values = {NORM: few.reshape(7, 10), GAINS: fp32, BIASES: bf16}
    return {
        name: Encoded("keep", tuple(value.shape), torch.float32, {"values": value})
        for name, value in values.items()
    }


def _constants() -> dict[str, Encoded]:
    """One value everywhere: a count, and a vector so long that filler is needed."""
    count, floor = torch.tensor([7]), torch.tensor([-float("inf")]).half()
    return {
        "tracked": Encoded("constant", (), torch.int64, {"value": count}),
        "floor": Encoded("constant", (70, 100), torch.float16, {"value": floor}, note="a mask"),
    }


def _levels() -> dict[str, Encoded]:
    """Three levels of a transposed convolution's channels, codes of one bit, and pruned codes."""
    ternary = torch.tensor([[hashed(i * 40 + j, salt=10) % 3 - 1 for j in range(40)] for i in range(6)])
    three = {
        "codes": ternary.to(torch.int8),
        "levels": torch.tensor([[-(2.0**-i), 0.0, 0.75] for i in range(6)]),
    }
    two = {"codes": codes(4, 50, 1, salt=11), "levels": torch.tensor([[-0.5, 0.25]]).half()}
    pruned = {
        "codes": codes(4, 50, 5, salt=12) * (codes(4, 50, 1, salt=13) != 0),
        "scale": powers(4, 1, torch.half),
    }
    return {
        "ternary": Encoded("levels", (10, 6, 4), torch.float32, three, {"codes": 2}, transposed_groups=1),
        "signs": Encoded("levels", (4, 50), torch.bfloat16, two, {"codes": 1}),
        "pruned": Encoded("scalar", (4, 50), torch.float32, pruned, {"codes": 5}, extra_zeros=99),
    }


def _spatial() -> Encoded:
    """Factors of one-dimensional filters, 3 high and 2 wide."""
    parts = {
        "codebook": codes(15, 3, 4, salt=14),
        "codebook_scale": powers(1, 3, torch.float16),
        "latent": codes(3, 14, 4, salt=15),
        "latent_scale": powers(3, 1, torch.float16),
    }
    bits = {"codebook": 4, "latent": 4}
    return Encoded("spatial", (7, 5, 3, 2), torch.float32, parts, bits)


def write(path: Path) -> None:
    with Writer(path) as writer:
        for name, encoded in tensors().items():
            # Chunks are for blocks far larger than any here, and models by quantizer for lower rates.
            is_chunked = name in (CHUNKED, CHUNKED_PATH)
            few = 1 if is_chunked else chunks.FEWEST
            margin = 2.0 if is_chunked else entropy._CHUNK_MARGIN
            least = -1.0 if name in (PATH, CHUNKED_PATH) else trellis_stream._MARGIN
            # Floats were raw when the other tensors were made.
            most = streams._MOST_FLOATS if name in (NORM, GAINS, BIASES) else 0
            with (
                patch.object(chunks, "FEWEST", few),
                patch.object(entropy, "_CHUNK_MARGIN", margin),
                patch.object(trellis_stream, "_MARGIN", least),
                patch.object(streams, "_MOST_FLOATS", most),
            ):
                writer.add(name, encoded)
        for alias, target in ALIASES.items():
            writer.alias(alias, target)


if __name__ == "__main__":
    write(GOLDEN)
