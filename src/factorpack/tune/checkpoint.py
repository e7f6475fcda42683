"""The state of a training run, written atomically and read without running code."""

from __future__ import annotations

import hashlib
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from factorpack.errors import FormatError, SourceError
from factorpack.format.checked_file import read_checked, say_damaged, write_checked
from factorpack.format.streams import raw_bytes
from factorpack.kinds import KINDS
from factorpack.packed import Packed

_KEYS = {
    "fingerprint",
    "done",
    "start",
    "model",
    "optimizer",
    "epoch_random",
    "step_random",
    "steering",
    "best",
}


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_checked(path, buffer.getbuffer())


def load_checkpoint(path: Path, fingerprint: str) -> dict[str, Any] | None:
    """The state under `path`; None, with a warning, where it is damaged.

    A file that is no checkpoint, or one of another run than `fingerprint` describes, is an error.
    """
    try:
        state: dict[str, Any] = torch.load(
            io.BytesIO(read_checked(path)), map_location="cpu", weights_only=True
        )
        found = state["fingerprint"]
    except FormatError as error:
        say_damaged(path, "the training so far", error)
        return None
    except Exception as error:
        raise SourceError(f"{path} is not a checkpoint of a fine-tuning run: {error}") from error
    if set(state) != _KEYS:
        raise SourceError(f"{path} is not a checkpoint of a fine-tuning run: it holds {sorted(state)}")
    if found != fingerprint:
        raise SourceError(
            f"{path} belongs to another run ({found}), this one is {fingerprint}: "
            "remove it to start over, or use the settings it was made with"
        )
    return state


def random_state() -> dict[str, Any]:
    """The state of every generator that training may use, in types that load without running code."""
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002, the one libraries use
    words = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), words, position, has_gauss, cached],
        "python": [version, list(internal), gauss],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def fingerprint_of(packed: Packed, teacher: nn.Module | None, *settings: object) -> str:
    """A hash of everything that must match for a checkpoint to belong to this run.

    Codes count by value where they were read from a file: made on a GPU, they may not be the same twice.
    """
    digest = hashlib.sha256(repr(settings).encode())
    for name, value in [*teacher.named_parameters(), *teacher.named_buffers()] if teacher is not None else []:
        digest.update(name.encode() + raw_bytes(value))
    for name, encoded in packed.items():
        parts = [(part, values.dtype, tuple(values.shape)) for part, values in encoded.parts.items()]
        fields = (name, encoded.kind, encoded.shape, sorted(encoded.bits.items()), encoded.extra_zeros, parts)
        digest.update(repr(fields).encode())
        if KINDS[encoded.kind].is_raw or packed.path is not None:
            for values in encoded.parts.values():
                digest.update(raw_bytes(values))
    return digest.hexdigest()[:16]
