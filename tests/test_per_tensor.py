"""Compression in parts: the same bytes whoever makes them, and nothing lost or taken for what it is not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import factorpack as fp
from factorpack import per_tensor
from factorpack.engine import Local, Outcome, Ray, Task
from factorpack.engine.task import perform, require_success
from factorpack.errors import EngineError, PlanError, SourceError, WeightError
from factorpack.format.container import Reader
from factorpack.format.locks import locked
from factorpack.methods import METHODS
from factorpack.planning.rules import Choice
from factorpack.record import Encoded
from factorpack.weight import Weight
from tests.helpers import compress_to, flipped, seeded

METHOD = fp.QSPCA(8, 4, tile=16)


class Here:
    """An engine without processes: runs tasks in some order, and ends as if killed after some."""

    def __init__(self, stop_after: int = 99, reverse: bool = False) -> None:
        self.stop_after, self.reverse = stop_after, reverse
        self.names: list[str] = []

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        for task in reversed(tasks) if self.reverse else tasks:
            if len(self.names) == self.stop_after:
                raise KeyboardInterrupt
            outcome = require_success(perform(task))
            self.names.append(task.name)
            yield outcome


def state() -> dict[str, torch.Tensor]:
    return {
        "conv1.weight": seeded(8, 3, 3, 3),
        "conv2.weight": seeded(64, 32, 3, 3, seed=1),
        "conv2.bias": seeded(64, seed=2),
        "deep.weight": seeded(640, 160, dtype=torch.bfloat16, seed=3),
        "fc.weight": seeded(10, 64, seed=4),
        "steps": torch.tensor(7),
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A sharded one, as large checkpoints are."""
    folder = tmp_path / "model"
    folder.mkdir()
    names = list(state())
    shards = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for shard, held in shards.items():
        save_file({name: state()[name] for name in held}, folder / shard)
    where = {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.fixture
def expected(checkpoint: Path, tmp_path: Path) -> bytes:
    compress_to(tmp_path / "serial", checkpoint, METHOD)
    return (tmp_path / "serial").read_bytes()


def left(folder: Path) -> set[str]:
    """What lies beside the checkpoint and the file of the serial run."""
    return {path.name for path in folder.iterdir()} - {"model", "serial"}


@pytest.mark.parametrize(
    "engine", [Here(), Here(reverse=True), Local(1, start="fork"), Local(3, start="fork")]
)
def test_the_bytes_are_those_of_one_process(
    engine: Here | Local, checkpoint: Path, expected: bytes, tmp_path: Path
) -> None:
    packed = compress_to(tmp_path / "out", checkpoint, METHOD, engine=engine, progress=False)
    assert (tmp_path / "out").read_bytes() == expected
    assert list(packed) == sorted(state(), key=list(state()).index)
    assert left(tmp_path) == {"out"}, "the parts and the lock are gone"


@pytest.mark.filterwarnings("ignore")
def test_the_bytes_of_a_ray_cluster_too(checkpoint: Path, expected: bytes, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the engine 'ray' needs the extra of that name")
    compress_to(tmp_path / "out", checkpoint, METHOD, engine=Ray(2), progress=False)
    assert (tmp_path / "out").read_bytes() == expected


def test_tied_tensors_of_a_torch_file(tmp_path: Path) -> None:
    shared = seeded(64, 64)
    torch.save({"one": shared, "two": shared, "bias": seeded(64)}, tmp_path / "net.pt")
    for name, engine in (("serial", None), ("out", Here())):
        compress_to(tmp_path / name, tmp_path / "net.pt", fp.Scalar(4), engine=engine)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "serial").read_bytes()
    assert fp.load(tmp_path / "out").aliases == {"two": "one"}


def test_a_killed_run_goes_on_from_what_is_whole(checkpoint: Path, expected: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = Here(stop_after=4)
    with pytest.raises(KeyboardInterrupt):
        compress_to(out, checkpoint, METHOD, engine=first)
    assert not out.exists()
    files = sorted((tmp_path / "out.parts").iterdir())
    assert len(files) == 4
    files[0].write_bytes(files[0].read_bytes()[:-1])  # as a disk might leave it
    (tmp_path / "out.parts" / ".x.part.0.tmp").write_bytes(b"a killed worker's")
    second = Here()
    with pytest.warns(UserWarning, match=r"\.part is damaged, so '[\w.]+' is made again"):
        compress_to(out, checkpoint, METHOD, engine=second)
    assert out.read_bytes() == expected
    assert len(second.names) == len(state()) - 3
    assert left(tmp_path) == {"out"}


def stopped(checkpoint: Path, out: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        compress_to(out, checkpoint, METHOD, engine=Here(stop_after=6))


def test_parts_of_another_method_are_not_taken(checkpoint: Path, tmp_path: Path) -> None:
    stopped(checkpoint, tmp_path / "out")
    engine = Here()
    compress_to(tmp_path / "out", checkpoint, fp.QSPCA(8, 3, tile=16), engine=engine)
    coded = {"conv2.weight", "deep.weight"}
    assert coded <= set(engine.names), "the others are kept, or coded by a rule, either way"
    assert left(tmp_path) == {"out"}


def test_parts_of_an_older_checkpoint_are_not_taken(checkpoint: Path, tmp_path: Path) -> None:
    stopped(checkpoint, tmp_path / "out")
    shard = checkpoint / "b.safetensors"
    before = shard.stat()
    changed = {
        name: value
        for name, value in state().items()
        if name in ("deep.weight", "fc.weight", "steps", "empty")
    }
    save_file(changed | {"deep.weight": seeded(640, 160, dtype=torch.bfloat16, seed=9)}, shard)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns - 10**12))  # a clock that was put back
    assert shard.stat().st_size == before.st_size
    engine = Here()
    compress_to(tmp_path / "out", checkpoint, METHOD, engine=engine)
    compress_to(tmp_path / "serial", checkpoint, METHOD)
    assert engine.names == ["deep.weight", "empty"], "one has changed, one had not been reached"
    assert (tmp_path / "out").read_bytes() == (tmp_path / "serial").read_bytes()


def test_a_checkpoint_that_changes_on_the_way_is_noticed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = Choice.encode, []

    def encode(self: Choice, weight: Weight) -> Encoded:
        if not seen:
            flip_last_bit(checkpoint / "b.safetensors")
        seen.append(weight)
        return real(self, weight)

    monkeypatch.setattr(Choice, "encode", encode)
    with pytest.raises(SourceError, match=r"'deep.weight' of .* has changed while it was being compressed"):
        compress_to(tmp_path / "out", checkpoint, METHOD, engine=Here())
    assert left(tmp_path) == {"out.parts"}
    assert len(list((tmp_path / "out.parts").iterdir())) == 3, "what was made from the first shard is good"


def flip_last_bit(file: Path) -> None:
    """Neither the size nor the time of the file changes."""
    before = file.stat()
    content = file.read_bytes()
    with file.open("r+b") as opened:
        opened.write(flipped(content, 8 * len(content) - 1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("how", [{"method": fp.Scalar(4)}, {"ratio": 12.0}])
def test_a_change_far_into_the_checkpoint_is_noticed(how: dict[str, Any], tmp_path: Path) -> None:
    """With the same size, time and first megabyte, and a bit that changes the codes."""
    first, last = seeded(600, 512), seeded(64, 64, seed=1)
    last[-1, -1] = -last.abs().max()
    file, out = tmp_path / "net.safetensors", tmp_path / "out"
    save_file({"a.weight": first, "b.weight": last}, file)
    whole = Here()
    compress_to(tmp_path / "before", file, engine=whole, progress=False, **how)
    ended = Here(stop_after=len(whole.names) - 1)
    with pytest.raises(KeyboardInterrupt):
        compress_to(out, file, engine=ended, progress=False, **how)
    flip_last_bit(file)
    compress_to(out, file, engine=Here(), progress=False, **how)
    compress_to(tmp_path / "expected", file, engine=Here(), progress=False, **how)
    assert (tmp_path / "expected").read_bytes() != (tmp_path / "before").read_bytes()
    assert out.read_bytes() == (tmp_path / "expected").read_bytes()


def test_a_part_under_another_name_is_not_taken(checkpoint: Path, expected: bytes, tmp_path: Path) -> None:
    """The same tensor by another method is whole, and not what its name says."""
    out = tmp_path / "out"
    stopped(checkpoint, out)
    parts = {next(iter(Reader(part))): part for part in (tmp_path / "out.parts").iterdir()}
    part = parts["deep.weight"]
    per_tensor.write_part(
        tmp_path / "other.part", "deep.weight", fp.Scalar(2).encode(Weight(seeded(640, 160)))
    )
    (tmp_path / "other.part").replace(part)
    with pytest.warns(UserWarning, match="'deep.weight' is made again: it holds .* which is another part"):
        compress_to(out, checkpoint, METHOD, engine=Here())
    assert out.read_bytes() == expected


def test_a_second_run_is_told_of_the_first(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        locked(out),
        pytest.raises(PlanError, match=rf"out is being written by another run \(process {os.getpid()} on"),
    ):
        compress_to(out, checkpoint, METHOD, engine=Here())
    compress_to(out, checkpoint, METHOD, engine=Here())
    assert left(tmp_path) == {"out"}


def test_a_strangers_files_stay(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out.parts").mkdir()
    (tmp_path / "out.parts" / "thesis.tex").write_text("mine")
    compress_to(tmp_path / "out", checkpoint, METHOD, engine=Here())
    assert [path.name for path in (tmp_path / "out.parts").iterdir()] == ["thesis.tex"]


def test_a_weight_that_cannot_be_coded_is_named(tmp_path: Path) -> None:
    save_file(
        {"good.weight": seeded(64, 64), "bad.weight": torch.full((64, 64), torch.nan)},
        tmp_path / "x.safetensors",
    )
    with pytest.raises(WeightError, match="NaN") as caught:
        compress_to(
            tmp_path / "out",
            tmp_path / "x.safetensors",
            METHOD,
            engine=Local(2, start="fork"),
            progress=False,
        )
    assert "while compressing tensor 'bad.weight'" in caught.value.__notes__


@pytest.mark.parametrize("source", [{"a": torch.zeros(2)}, torch.nn.Linear(2, 2)])
def test_weights_do_not_travel(source: fp.model.Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="workers open it themselves: give the path of a checkpoint"):
        compress_to(tmp_path / "out", source, METHOD, engine=Here())
    assert left(tmp_path) == set()


def test_a_target_that_cannot_be_is_refused_before_any_work(checkpoint: Path, tmp_path: Path) -> None:
    engine = Here()
    with pytest.raises(SourceError, match="there is no folder"):
        compress_to(tmp_path / "nowhere" / "out", checkpoint, METHOD, engine=engine)
    with pytest.raises(SourceError, match="is a folder"):
        compress_to(checkpoint, checkpoint, METHOD, engine=engine)
    assert engine.names == []


def test_what_is_stated_covers_what_is_kept_and_coded() -> None:
    entry = fp.source.Entry((1000, 1000), torch.bfloat16, lambda: torch.zeros(0))
    small, large = (per_tensor.peak_bytes(entry, Choice(METHODS[name]())) for name in ("keep", "scalar"))  # type: ignore[call-arg]
    assert per_tensor.BASE_BYTES < small < large


def test_a_worker_that_dies_each_time_leaves_what_others_made(
    checkpoint: Path, expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = per_tensor.write_packed

    def write(path: Path, tensors: list[tuple[str, Encoded]], aliases: dict[str, str]) -> None:
        if tensors[0][0] == "fc.weight":
            os._exit(9)
        real(path, tensors, aliases)

    with monkeypatch.context() as patched:
        patched.setattr(per_tensor, "write_packed", write)
        with pytest.raises(EngineError, match=r"'fc.weight': its worker died 3 times, .*exit code 9"):
            compress_to(tmp_path / "out", checkpoint, METHOD, engine=Local(2, start="fork"), progress=False)
    engine = Here()
    compress_to(tmp_path / "out", checkpoint, METHOD, engine=engine)
    assert "fc.weight" in engine.names
    assert len(engine.names) < len(state())
    assert (tmp_path / "out").read_bytes() == expected
