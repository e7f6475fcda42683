"""One open file, read by many threads at once, as a service does."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch import Tensor

import factorpack as fp
from factorpack.decoding import decode
from tests.helpers import assert_same_tensor, seeded

THREADS, ROUNDS = 16, 4
METHODS = {
    "codes.*": fp.Scalar(4),
    "factors.*": fp.QSPCA(rank=8, latent_bits=3, tile=36),
    "paths.*": fp.SecondOrder(step=0.3, trellis=8),
}


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Threads take turns a thousand times more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = {"codes": (40, 48), "factors": (16, 8, 3, 3), "paths": (24, 40)}
    state = {
        f"{kind}.{number}": seeded(*shape, seed=number)
        for kind, shape in shapes.items()
        for number in range(3)
    }
    path = tmp_path_factory.mktemp("shared") / "net.safetensors"
    fp.compress(state | {"bias": seeded(24)}, fp.Keep(), layers=METHODS, to=path, progress=False)
    return path


@pytest.fixture(scope="module")
def expected(file: Path) -> dict[str, Tensor]:
    return {name: decode(encoded) for name, encoded in fp.load(file).items()}


def check(packed: fp.Packed, name: str, expected: dict[str, Tensor]) -> None:
    assert_same_tensor(decode(packed[name]), expected[name])


def test_threads_read_the_same_and_other_tensors(
    file: Path, expected: dict[str, Tensor], tmp_path: Path
) -> None:
    shared, first = fp.load(file), next(iter(expected))
    size = shared.size()

    def read_all(number: int) -> None:
        for name, tensor in shared.state_dict().items():
            assert_same_tensor(tensor, expected[name])
        assert shared.size() == size
        shared.decode_to(tmp_path / f"{number}.safetensors", progress=False)

    with ThreadPoolExecutor(THREADS) as pool:
        work = [
            pool.submit(check, opened, name, expected)
            for _ in range(ROUNDS)
            for other in expected
            for opened, name in ((shared, other), (shared, first), (fp.load(file), other))
        ]
        work += [pool.submit(read_all, number) for number in range(ROUNDS)]
        for each in work:
            each.result()
    written = {(tmp_path / f"{number}.safetensors").read_bytes() for number in range(ROUNDS)}
    assert len(written) == 1


def test_a_service_reads_beside_its_event_loop(file: Path, expected: dict[str, Tensor]) -> None:
    shared = fp.load(file)

    async def serve() -> None:
        await asyncio.gather(
            *(asyncio.to_thread(check, shared, name, expected) for name in [*expected] * ROUNDS)
        )

    asyncio.run(serve())


def test_without_pread_a_lock_keeps_places_apart(
    file: Path, expected: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, where a place is set and then read from."""
    monkeypatch.delattr("os.pread", raising=False)
    shared = fp.load(file)
    with ThreadPoolExecutor(THREADS) as pool:
        for each in [pool.submit(check, shared, name, expected) for name in [*expected] * ROUNDS]:
            each.result()
