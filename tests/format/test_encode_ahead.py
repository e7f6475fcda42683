from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from factorpack.errors import FormatError, SourceError
from factorpack.format import encode_ahead as ahead
from factorpack.format.container import Reader, stored
from factorpack.format.encode_ahead import Streams, encode_ahead
from factorpack.format.packed_file import bytes_of, file_bytes, rows_of, write_packed
from factorpack.methods import Keep
from factorpack.packed import Packed, load, save
from factorpack.record import Encoded
from factorpack.weight import Weight
from tests.golden.make import ALIASES, tensors
from tests.helpers import assert_same_encoded, seeded


def coded(rows: int, columns: int, seed: int) -> Encoded:
    generator = np.random.default_rng(seed)
    scale = 2.0 ** generator.normal(size=(rows, 1)) * 2.0 ** generator.normal(size=(1, columns))
    codes = np.rint(generator.normal(size=(rows, columns)) * scale).clip(-127, 127).astype(np.int8)
    parts = {"codes": torch.from_numpy(codes), "scale": torch.ones(1, 1)}
    return Encoded("scalar", (rows, columns), torch.float32, parts, {"codes": 8})


def model() -> dict[str, Encoded]:
    sizes = [(40, 30), (300, 400), (7, 7), (512, 300), (64, 64)]
    made = {f"layer{number}": coded(*size, number) for number, size in enumerate(sizes)}
    return tensors() | made


def broken(encoded: Encoded) -> Encoded:
    return replace(encoded, bits={"codes": 4})  # codes of 8 bits


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_bytes_are_those_of_one_tensor_at_a_time(threads: int):
    expected = [stored(name, encoded) for name, encoded in model().items()]
    assert list(encode_ahead(model().items(), threads)) == expected


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_file_does_not_depend_on_threads(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_packed(tmp_path / "expected", model().items(), ALIASES)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    write_packed(tmp_path / "found", model().items(), ALIASES)
    assert (tmp_path / "found").read_bytes() == (tmp_path / "expected").read_bytes()
    assert file_bytes(model(), ALIASES) == (tmp_path / "found").stat().st_size


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_names_its_tensor_and_leaves_nothing(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    before = threading.active_count()
    made = model()
    made["layer1"] = broken(made["layer1"])
    with pytest.raises(FormatError, match="do not fit 4 bits") as caught:
        write_packed(tmp_path / "file", made.items(), {})
    assert "while writing tensor 'layer1'" in caught.value.__notes__
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", [1, 3])
def test_a_source_that_fails_leaves_nothing(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    before = threading.active_count()

    def failing() -> Iterator[tuple[str, Encoded]]:
        yield from list(model().items())[:4]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        write_packed(tmp_path / "file", failing(), {})
    with pytest.raises(SourceError, match="'layer0' has been added already"):
        write_packed(tmp_path / "file", [*model().items(), ("layer0", coded(3, 3, 0))], {})
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == before


@pytest.mark.parametrize(("most", "numel", "taken"), [(1, 1 << 23, 3), (8, 600, 2), (8, 1 << 23, 13)])
def test_as_many_tensors_are_held_as_allowed(
    most: int, numel: int, taken: int, monkeypatch: pytest.MonkeyPatch
):
    """Both limits are per thread, and one more has been taken from the source when the first is handed on."""
    monkeypatch.setattr(ahead, "_MOST_TENSORS", most)
    monkeypatch.setattr(ahead, "_MOST_NUMEL", numel)
    made = 0

    def counted() -> Iterator[tuple[str, Encoded]]:
        nonlocal made
        for number in range(13):
            made += 1
            yield f"layer{number}", coded(40, 30, number)

    found = encode_ahead(counted(), 2)
    next(found)
    assert made == taken
    found.close()


def test_what_was_measured_is_not_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made, streams = model(), Streams()
    measured = bytes_of(rows_of(made, streams), ALIASES)
    encoded_now: list[str] = []
    monkeypatch.setattr(ahead, "stored", lambda *of: encoded_now.append(of[0]) or stored(*of))
    made["layer0"] = coded(40, 30, 77)
    save(Packed(made, ALIASES, streams=streams), tmp_path / "file")
    assert encoded_now == ["layer0"]
    assert_same_encoded(Reader(tmp_path / "file")["layer0"], made["layer0"])
    assert abs((tmp_path / "file").stat().st_size - measured) < 200
    save(Packed(made, ALIASES), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()
    assert list(load(tmp_path / "file")) == list(made)


def test_a_few_values_that_are_kept_start_no_thread():
    """A model has a hundred norms, and a measured one weights that are zero."""
    kept = {f"norm{seed}": Keep().encode(Weight(seeded(64, seed=seed))) for seed in range(40)}
    zero = Encoded("constant", (900, 700), torch.float32, {"value": torch.zeros(1)})
    before, seen = threading.active_count(), 0
    for _ in encode_ahead((kept | {"weight": zero}).items(), 8):
        seen += threading.active_count() == before
    assert seen == 41


def test_an_error_in_a_few_values_waits_for_their_turn():
    good, bad = (
        Keep().encode(Weight(seeded(8))),
        Encoded("keep", (3,), torch.float32, {"values": torch.ones(4)}),
    )
    found = encode_ahead({"good": good, "bad": bad}.items(), 4)
    next(found)
    with pytest.raises(FormatError) as caught:
        next(found)
    assert "while writing tensor 'bad'" in caught.value.__notes__


def test_the_largest_tensor_that_waits_is_encoded_next(monkeypatch: pytest.MonkeyPatch):
    started, all_wait = [], threading.Event()

    def noted(name: str, *_others: object) -> tuple[object, bytes]:
        started.append(name)
        all_wait.wait()
        return None, b""

    monkeypatch.setattr(ahead, "_stored", noted)
    with ahead.LargestFirst(1) as pool:
        sizes = {"first": 3, "small": 2, "large": 9, "middle": 5}
        for name, size in sizes.items():
            pool.start(name, coded(size, size, 0), ahead.encode_codes)
            while not started:
                time.sleep(0.001)
        all_wait.set()
    assert started == ["first", "large", "middle", "small"]
