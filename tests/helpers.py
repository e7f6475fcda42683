"""What several test files share."""

from __future__ import annotations

import resource
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import factorpack as fp
from factorpack.decoding import decode
from factorpack.format.container import Reader, Writer
from factorpack.record import Encoded


def raw(values: Tensor) -> bytes:
    """A tensor's bits: equal where the tensors are, NaN and signed zeros included."""
    plain = torch.empty(values.shape, dtype=values.dtype).copy_(values).reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if values.numel() else b""


def assert_same_tensor(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert raw(found) == raw(expected)


def assert_same_encoded(found: Encoded, expected: Encoded) -> None:
    """Equal in every field, and every part bit for bit."""
    for field in ("kind", "shape", "dtype", "bits", "transposed_groups", "extra_zeros", "note", "trellis"):
        assert getattr(found, field) == getattr(expected, field), field
    assert list(found.parts) == list(expected.parts)
    for name in expected.parts:
        assert_same_tensor(found.parts[name], expected.parts[name])


def write_packed(
    path: Path, tensors: Mapping[str, Encoded], aliases: Mapping[str, str] | None = None
) -> None:
    with Writer(path) as writer:
        for name, encoded in tensors.items():
            writer.add(name, encoded)
        for alias, target in (aliases or {}).items():
            writer.alias(alias, target)


def flipped(content: bytes, bit: int) -> bytes:
    """The same bytes but for one bit."""
    place = bit // 8
    return content[:place] + bytes([content[place] ^ 1 << bit % 8]) + content[place + 1 :]


def compress_to(path: str | Path, source: Any, *settings: Any, **more: Any) -> fp.Packed:
    """`compress` straight into a file."""
    return fp.compress(source, *settings, to=path, **more)


def read_all(path: Path) -> dict[str, Tensor]:
    """Opens a packed file and decodes every tensor of it."""
    reader = Reader(path)
    return {name: decode(encoded) for name, encoded in reader.items()}


@contextmanager
def little_memory(python_bytes: int = 16 << 20, all_bytes: int = 512 << 20) -> Iterator[None]:
    """Fails a block that allocates much: Python and numpy are traced, torch and the rest meet a wall.

    The wall is wide because thread pools and allocators reserve address space they never use.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    tracemalloc.start()
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + all_bytes, hard))
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        tracemalloc.stop()
    assert peak <= python_bytes, f"allocated {peak} bytes, allowed are {python_bytes}"


SHARED = Path(__file__).parents[2] / "shared"


def shared_weights(name: str) -> Path:
    """A real checkpoint from the folder beside the project; the test is skipped where there is none."""
    path = SHARED / "models" / f"{name}.safetensors"
    if not path.is_file():
        pytest.skip(f"needs the trained weights {path.name}, which are not beside this checkout")
    return path


def seeded(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Gaussian numbers that are the same on every run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def tolerance(dtype: torch.dtype) -> float:
    """Relative error that sums of a few hundred terms may have in a type: 256 units in the last place."""
    return 256 * torch.finfo(dtype).eps


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal up to the rounding of `dtype` (the narrower of the two) on the scale of the largest number."""
    narrow = dtype or max(found.dtype, expected.dtype, key=lambda each: torch.finfo(each).eps)
    assert found.shape == expected.shape
    allowed = tolerance(narrow) * expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected.double(), rtol=0.0, atol=allowed)


def assert_rounded(found: Tensor, expected: Tensor) -> None:
    """Equal up to one rounding of each number to FP16, as scales and levels are stored."""
    torch.testing.assert_close(found.double(), expected.double(), rtol=2.0**-10, atol=0.0)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||, in float64."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
