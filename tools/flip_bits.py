"""Flips bits in every kind of file that a run keeps: `python -m tools.flip_bits --flips 1000`.

Each kind of run is ended before it is done, or left with what it keeps for the next. Then one bit of one of its
files is flipped, at a random place. Reading that file back must refuse it with a warning or an error, and a few
times per kind the whole run is resumed: it must end with the undisturbed run's bytes or an error.
The exit status says whether no flip was silent.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

import factorpack as fp
from factorpack.budget import journal, tasks
from factorpack.budget.curves import load_curves
from factorpack.budget.journal import Journal
from factorpack.calibration.model_folder import open_folder
from factorpack.comparison import Grid
from factorpack.errors import FactorpackError
from factorpack.format.container import Reader
from factorpack.hub import resumed_folder
from factorpack.hub.resumed_folder import resume_folder
from factorpack.per_tensor import is_whole
from factorpack.tune.checkpoint import load_checkpoint
from tests.helpers import flipped, seeded
from tests.test_per_tensor import Here
from tests.tune.small_net import METHOD, build, loader, perceptron, state_in

RESUMES = 5
"""Whole runs per kind that are resumed from a damaged file."""


@dataclass(frozen=True)
class Kept:
    """A kind of run: how it leaves its files in a folder, how one is read back, and how it goes on to its result."""

    leave: Callable[[Path], None]
    files: str
    """A pattern of the files that it keeps."""
    reader: Callable[[Path], Callable[[], object]]
    """For a whole file, what reads it back: it raises an error of ours or warns where the file is damaged."""
    resume: Callable[[Path], bytes]


@dataclass
class Count:
    """What became of the flips in one kind of file."""

    files: int = 0
    bytes: int = 0
    flips: int = 0
    resumed: int = 0
    resumed_with_warning: int = 0
    """The others did not need the file, such as the curve of one weight once all curves are kept together."""
    silent: list[str] = field(default_factory=list)


@contextmanager
def _ended() -> Iterator[None]:
    with suppress(KeyboardInterrupt):
        yield
        raise AssertionError("the run ended by itself")


def _weights() -> dict[str, torch.Tensor]:
    found = {f"layer{n}.weight": seeded(24, 20, seed=n) for n in range(3)}
    return found | {"layer0.bias": seeded(24, seed=9)}


def _over_engine(folder: Path, stop_after: int = 99, **how: Any) -> bytes:
    if not (folder / "net.safetensors").exists():
        save_file(_weights(), folder / "net.safetensors")
    out = folder / "out"
    fp.compress(folder / "net.safetensors", to=out, engine=Here(stop_after), progress=False, **how)
    return out.read_bytes()


def _leave_engine(stop_after: int, **how: Any) -> Callable[[Path], None]:
    def leave(folder: Path) -> None:
        with _ended():
            _over_engine(folder, stop_after, **how)

    return leave


def _part_reader(path: Path) -> Callable[[], object]:
    """A part of an engine's run: a tensor, or the curve of one."""
    if path.read_bytes().startswith(b'{"'):
        return partial(tasks._read_curve, path, next(iter(json.loads(path.read_bytes())["curves"])))
    return partial(is_whole, path, next(iter(Reader(path))))


def _planned(folder: Path, **how: Any) -> bytes:
    net = torch.nn.Sequential(torch.nn.Linear(20, 24), torch.nn.ReLU(), torch.nn.Linear(24, 16))
    net.load_state_dict({name: seeded(*value.shape) for name, value in net.state_dict().items()})
    out = folder / "out"
    fp.compress(net.eval(), ratio=5.0, calibration=[seeded(8, 20)], to=out, progress=False, **how)
    return out.read_bytes()


def _leave_journal(folder: Path) -> None:
    write, count = Journal._write, 0

    def counted(mine: Journal, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count > 4:
            raise KeyboardInterrupt
        write(mine, *arguments)

    with _ended(), patch.object(Journal, "_write", counted):
        _planned(folder)


def _journal_reader(path: Path) -> Callable[[], object]:
    name = next(iter(Reader(path))).partition(":document:")[0]
    return lambda: journal._read(Reader(path), name, None)


def _with_curves(folder: Path) -> bytes:
    return _planned(folder, curves=folder / "curves.json")


def _leave_curves(folder: Path) -> None:
    _with_curves(folder)
    (folder / "out").unlink()


def _tune(folder: Path, end_at: int = 0) -> bytes:
    seen = 0

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if seen == end_at:
            raise KeyboardInterrupt
        return torch.nn.functional.cross_entropy(logits, labels)

    net = perceptron()
    packed = fp.compress(net, METHOD, progress=False)
    settings: dict[str, Any] = {
        "schedule": fp.Schedule(epochs=2, held_out_share=0.0),
        "checkpoint_every": 2,
        "progress": False,
    }
    fp.finetune(packed, net, loader(), loss=loss, checkpoint=folder / "run.checkpoint", **settings)
    fp.save(packed, folder / "out")
    return (folder / "out").read_bytes()


def _leave_checkpoint(folder: Path) -> None:
    with _ended():
        _tune(folder, end_at=6)


def _checkpoint_reader(path: Path) -> Callable[[], object]:
    return partial(load_checkpoint, path, state_in(path)["fingerprint"])


def _grid(folder: Path) -> Grid:
    return Grid(build(), [1.5], folder, ["scalar", "ttq"], [seeded(4, 3, 14, 14)], progress=False)


def _compare(folder: Path) -> bytes:
    points = _grid(folder).run()
    packed = [(folder / point.file).read_bytes() for point in points if point.file]
    return b"".join([*packed, *(repr((point.method, point.file_bytes)).encode() for point in points)])


def _point_reader(path: Path) -> Callable[[], object]:
    return partial(_grid(path.parent)._read_point, path.name.partition("-")[0], 1.5)


def _folder(folder: Path) -> bytes:
    source = folder / "model"
    if not source.exists():
        source.mkdir()
        (source / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        save_file(_weights(), source / "model.safetensors")
    like = open_folder(source)

    def write(path: Path) -> None:
        fp.compress(source, fp.Scalar(4), to=path, progress=False)

    return _result(resume_folder(folder / "small", like, write, lambda: resumed_folder.identify_run(like)))


def _result(packed: fp.Packed) -> bytes:
    assert packed.path is not None
    return packed.path.read_bytes()


def _leave_folder(folder: Path) -> None:
    with _ended(), patch("factorpack.hub.save.card", side_effect=KeyboardInterrupt):
        _folder(folder)


def _record_reader(path: Path) -> Callable[[], object]:
    """Either file: the record, or the packed file that it is of."""
    beside, record = path.parent / "small.packed.safetensors", path.parent / ".small.finished"
    identity = resumed_folder.identify_run(open_folder(path.parent / "model"))
    return lambda: resumed_folder._is_recorded(beside, record, lambda: identity)


KINDS = {
    "parts of an engine": Kept(
        _leave_engine(3, method=fp.Scalar(4)),
        "out.parts/*.part",
        _part_reader,
        lambda folder: _over_engine(folder, method=fp.Scalar(4)),
    ),
    "parts of an engine's budget": Kept(
        _leave_engine(6, ratio=5.0),
        "out.parts/*.part",
        _part_reader,
        lambda folder: _over_engine(folder, ratio=5.0),
    ),
    "journal": Kept(_leave_journal, "out.parts/*.part", _journal_reader, _planned),
    "curves": Kept(_leave_curves, "curves.json", lambda path: partial(load_curves, path), _with_curves),
    "checkpoint": Kept(_leave_checkpoint, "*.checkpoint", _checkpoint_reader, _tune),
    "points of a comparison": Kept(
        lambda folder: _compare(folder) and None, "*-1.5.*", _point_reader, _compare
    ),
    "a finished folder": Kept(_leave_folder, "*small.[fp]*", _record_reader, _folder),
}


def said(call: Callable[[], object]) -> tuple[bool, object]:
    """Whether a call warned or raised an error of ours, and what it returned; None after an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            returned = call()
        except FactorpackError:
            return True, None
    return bool(caught), returned


def flip(kind: Kept, folder: Path, expected: bytes, resumes: int, draw: random.Random, count: Count) -> None:
    """Flips one bit, and reads the file back or resumes the run from a copy of the folder."""
    files = sorted(path for path in folder.glob(kind.files) if path.is_file())
    count.files, count.bytes = len(files), sum(path.stat().st_size for path in files)
    path = draw.choice(files)
    content = path.read_bytes()
    bit = draw.randrange(8 * len(content))
    where = f"{path.relative_to(folder)} bit {bit} of {8 * len(content)}"
    read = kind.reader(path)
    path.write_bytes(flipped(content, bit))
    if count.flips >= resumes:
        if not said(read)[0]:
            count.silent.append(where)
    else:
        copy = folder.with_name("copy")
        shutil.copytree(folder, copy)
        is_said, made = said(lambda: kind.resume(copy))
        if made != expected and (made is not None or not is_said):
            count.silent.append(f"{where}: resumed to other bytes")
        shutil.rmtree(copy)
        count.resumed += 1
        count.resumed_with_warning += is_said
    path.write_bytes(content)
    count.flips += 1


def run(flips: int, seed: int, resumes: int = RESUMES) -> dict[str, Count]:
    """At least `flips` flips, the same number in the files of each kind."""
    torch.set_num_threads(1)
    draw = random.Random(seed)
    counts = {name: Count() for name in KINDS}
    for name, kind in KINDS.items():
        with tempfile.TemporaryDirectory(prefix="factorpack-flips-") as place:
            whole, folder = Path(place) / "whole", Path(place) / "left"
            whole.mkdir()
            folder.mkdir()
            expected = kind.resume(whole)
            kind.leave(folder)
            while counts[name].flips * len(KINDS) < flips:
                flip(kind, folder, expected, resumes, draw, counts[name])
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resumes", type=int, default=RESUMES, help="runs per kind that are resumed whole")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    found = run(arguments.flips, arguments.seed, arguments.resumes)
    document = {
        "command": f"python -m tools.flip_bits --flips {arguments.flips} --seed {arguments.seed}",
        "seconds": round(time.perf_counter() - begun, 1),
        "flips": sum(count.flips for count in found.values()),
        "silent": sum(len(count.silent) for count in found.values()),
        "result": {name: vars(count) for name, count in found.items()},
    }
    print(json.dumps(document, indent=1))
    sys.exit(bool(document["silent"]))


if __name__ == "__main__":
    main()
