"""The state of a training run, written whole or not at all, and read without running code."""

from __future__ import annotations

import hashlib
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from factorpack.errors import SourceError
from factorpack.format.atomic import atomic_write
from factorpack.kinds import KINDS
from factorpack.packed import Packed

_KEYS = {"fingerprint", "done", "model", "optimizer", "epoch_random", "step_random", "steering"}


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with atomic_write(path) as file:
        file.write(buffer.getbuffer())


def load_checkpoint(path: Path, fingerprint: str) -> dict[str, Any]:
    """The state under `path`, if it belongs to the run that `fingerprint` describes."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise SourceError(f"{path} is not a checkpoint of a fine-tuning run: {error!r}") from error
    if not isinstance(state, dict) or set(state) != _KEYS:
        raise SourceError(f"{path} is not a checkpoint of a fine-tuning run")
    found = state["fingerprint"]
    if found != fingerprint:
        raise SourceError(
            f"{path} belongs to another run ({found}), this one is {fingerprint}: "
            "remove it to start anew, or repeat the settings it was made with"
        )
    return state


def random_state() -> dict[str, Any]:
    """Every generator training may draw from, in types that load without running code."""
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


def fingerprint_of(packed: Packed, *settings: object) -> str:
    """What must be the same for a checkpoint to be this run's.

    Of the weights only the kept ones count: a solver on a GPU need not find the same factors twice.
    """
    digest = hashlib.sha256(repr(settings).encode())
    for name, encoded in packed.items():
        parts = [(part, values.dtype, tuple(values.shape)) for part, values in encoded.parts.items()]
        told = (name, encoded.kind, encoded.shape, sorted(encoded.bits.items()), encoded.extra_zeros, parts)
        digest.update(repr(told).encode())
        if KINDS[encoded.kind].is_raw:
            digest.update(encoded.parts["values"].cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
