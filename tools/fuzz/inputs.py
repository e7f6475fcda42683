"""What factorpack reads besides its own files: checkpoints to compress, model folders, curves, states of training.

Each case is a valid input with some of it changed, and signed again where it carries checksums. Whatever is
wrong with it is an error of ours.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import math
import random
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as to_safetensors

import factorpack as fp
from factorpack.budget.curves import Curve, load_curves, save_curves
from factorpack.calibration.model_folder import CONFIG
from factorpack.errors import FactorpackError
from factorpack.source import open_source
from factorpack.tune.checkpoint import load_checkpoint, random_state, save_checkpoint
from tests.checkpoints.made_gguf import Info, made
from tests.hub.conftest import llama
from tests.tampered import compact
from tools.fuzz.damages import DAMAGES, change_some
from tools.fuzz.loop import Judge, Result, Target
from tools.fuzz.reader import REFUSED, show

NAMES = ("other", "", "__metadata__", "\x1b[2J", "factorpack.small", "9" * 5000, "lm_head.weight", "a/../b")


def judged(work: Callable[[], object], size: int) -> Result:
    """Reads an input of that size; an error of ours is as good as none."""
    try:
        work()
    except FactorpackError:
        return REFUSED, size
    return "read", size


def state() -> dict[str, torch.Tensor]:
    return {
        "conv.weight": torch.linspace(-1, 1, 8 * 27).reshape(8, 3, 3, 3),
        "fc.weight": torch.linspace(-1, 1, 80).reshape(10, 8).half(),
        "fc.bias": torch.ones(10, dtype=torch.bfloat16),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
    }


def pickled(zipped: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(state(), buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def training_run() -> bytes:
    """What a training program saves: weights, their average, an optimizer, and settings."""
    average = {f"module.{name}": value for name, value in state().items()}
    optimizer = {"state": {0: {"exp_avg": torch.ones(8, 3)}}, "param_groups": [{"params": [0]}]}
    content = {"state_dict": state(), "state_dict_ema": average, "optimizer": optimizer}
    buffer = io.BytesIO()
    torch.save({**content, "args": argparse.Namespace(lr=0.1), "epoch": 3}, buffer)
    return buffer.getvalue()


def arrays() -> bytes:
    buffer = io.BytesIO()
    plain = {name: value.float().numpy() for name, value in state().items()}
    np.savez_compressed(buffer, **plain, arch=np.array("net"))
    return buffer.getvalue()


def gguf() -> bytes:
    """Plain tensors, and one of blocks of 8-bit codes, which is read where the gguf package is installed."""
    plain = made({name: value for name, value in state().items() if value.dtype != torch.bool})
    blocks = Info("blocks", (64, 2), 8, len(plain.data))
    return replace(plain, infos=(*plain.infos, blocks), data=plain.data + bytes(range(136))).packed()


def rewritten(blob: bytes, rng: random.Random) -> bytes:
    """A zip archive, one of whose entries is damaged, under right checksums of its own."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as old, zipfile.ZipFile(buffer, "w") as new:
        names = old.namelist()
        changed = rng.choice([*names, *(name for name in names if name.endswith(".pkl"))])
        for name in names:
            data = old.read(name)
            if name == changed:
                data = rng.choice(list(DAMAGES.values()))(data + b"\0", rng)[: len(data) + 400]
            if name != changed or rng.random() < 0.95:
                new.writestr(name if rng.random() < 0.98 else f"{name}x", data)
    return buffer.getvalue()


def reheaded(blob: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header says something else, and has its right length."""
    end = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:end])
    if rng.random() < 0.5:
        change_some(header, rng)
    else:
        name = rng.choice(sorted(header))
        header[rng.choice(NAMES)] = entry = header.pop(name)
        count = math.prod(entry["shape"])
        entry["shape"] = rng.choice(([count], [1, count], [count, 1, 1], [count, 0], []))
        entry["dtype"] = rng.choice(("F32", "I32", "U32", "F16", "BF16", "I16", "U16", "U8", "F8_E4M3", "F4"))
    text = compact(header)
    return len(text).to_bytes(8, "little") + text + blob[end:]


def prepare_sources(folder: Path) -> Judge:
    """Checkpoints: opened, every tensor loaded, and compressed."""
    logging.getLogger("factorpack.source").addHandler(
        logging.NullHandler()
    )  # what is said of each is not shown
    whole = {
        "net.safetensors": to_safetensors(state()),
        "net.pt": pickled(True),
        "old.pt": pickled(False),
        "run.pth.tar": training_run(),
        "net.npz": arrays(),
        "net.gguf": gguf(),
    }
    again = {"net.safetensors": reheaded, "net.pt": rewritten, "run.pth.tar": rewritten, "net.npz": rewritten}

    def judge(rng: random.Random) -> Result:
        name = rng.choice(list(whole))
        change = again.get(name) if rng.random() < 0.7 else None
        path = folder / name
        path.write_bytes((change or rng.choice(list(DAMAGES.values())))(whole[name], rng))
        result, size = read_source(path)
        return f"{name}: {result}", size

    return judge


def read_source(path: Path) -> Result:
    """Opens a checkpoint and compresses it."""
    size = [path.stat().st_size]

    def read() -> None:
        source = open_source(path)
        size[0] += sum(entry.numel * entry.dtype.itemsize for entry in source.entries.values())
        fp.compress(path, fp.Scalar(bits=4), progress=False).state_dict()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on pickles of an unknown protocol
        result, _ = judged(read, 0)
    return result, size[0]


def prepare_folders(folder: Path) -> Judge:
    """Model folders, packed and plain, with another config, index or file; opened as models."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity(transformers.logging.CRITICAL)
    model: Any = llama(transformers, tied=False, layers=1)
    model.save_pretrained(folder / "plain", max_shard_size="60kB")
    packed = fp.compress(model, fp.Scalar(4), progress=False)
    fp.hub.save_pretrained(packed, folder / "packed", like=model)
    kinds = ("plain", "packed")
    opened = folder / "opened"

    def judge(rng: random.Random) -> Result:
        kind = rng.choice(kinds)
        shutil.rmtree(opened, ignore_errors=True)
        shutil.copytree(folder / kind, opened)
        name = rng.choice((CONFIG, CONFIG, CONFIG, *sorted(path.name for path in opened.iterdir())))
        _change_file(opened / name, rng)
        size = sum(path.stat().st_size for path in opened.iterdir())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries' own
            result, _ = judged(lambda: fp.hub.from_pretrained(opened), 0)
        return f"{kind}, {name if name == CONFIG else 'another file'}: {result}", 4 * size

    return judge


def _change_file(path: Path, rng: random.Random) -> None:
    if path.suffix != ".json" or rng.random() < 0.1:
        path.write_bytes(rng.choice(list(DAMAGES.values()))(path.read_bytes(), rng))
        return
    document = json.loads(path.read_text())
    change_some(document, rng)
    path.write_bytes(compact(document))


def prepare_curves(folder: Path) -> Judge:
    """Curves of a file's weights, drawn on the page of its report."""
    path, small = folder / "curves.json", folder / "small"
    packed = fp.compress(state(), fp.Scalar(bits=4), progress=False, to=small)
    steps, losses = (0.01, 0.1, 1.0), (1e-6, 1e-3, 0.5)
    whole = {name: asdict(Curve(steps, (90, 50, 20), losses, 540, 16, 0.1)) for name in packed}

    def judge(rng: random.Random) -> Result:
        curves = json.loads(json.dumps(whole))
        for fields in rng.sample(list(curves.values()), 3):
            change_some(fields, rng)
        known = set(Curve.__dataclass_fields__)
        named = {name: Curve(**fields) for name, fields in curves.items() if set(fields) == known}
        save_curves(path, named, "fingerprint")
        if rng.random() < 0.3:
            path.write_bytes(rng.choice(list(DAMAGES.values()))(path.read_bytes(), rng))
        return judged(lambda: show(packed, load_curves(path)), path.stat().st_size)

    return judge


def prepare_checkpoints(folder: Path) -> Judge:
    """The state of a training run, as it is read when the run goes on."""
    path = folder / "run.checkpoint"
    values: dict[str, Any] = {"fingerprint": "same", "done": 3, "model": state(), "optimizer": {"state": {}}}
    values |= {"epoch_random": [random_state()], "step_random": [random_state()], "steering": None}

    def judge(rng: random.Random) -> Result:
        changed = dict(values)
        change_some(changed, rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as for sources; and a damaged state is said
            save_checkpoint(path, changed)
            if rng.random() < 0.5:
                path.write_bytes(rng.choice((rewritten, *DAMAGES.values()))(path.read_bytes(), rng))
            return judged(lambda: load_checkpoint(path, "same"), path.stat().st_size)

    return judge


SOURCES, FOLDERS = Target(prepare_sources), Target(prepare_folders)
CURVES, CHECKPOINTS = Target(prepare_curves), Target(prepare_checkpoints)
