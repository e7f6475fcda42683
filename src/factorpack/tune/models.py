"""Loads a model's weights from any file, and chooses the device."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from factorpack.errors import SourceError
from factorpack.format.container import is_packed
from factorpack.packed import load
from factorpack.source import open_source


def load_weights(model: nn.Module, file: Path, key: str | None = None) -> nn.Module:
    """Puts a file's weights into a model; `key` names those of a torch file that has several."""
    if is_packed(file):
        return load(file).load_into(model)
    opened = open_source(file, key).fitted(model.state_dict(), file.name).say()
    state = {name: entry.load() for name, entry in opened.entries.items()}
    state |= {alias: state[target] for alias, target in opened.aliases.items()}
    targets = model.state_dict()
    if missing_or_extra := set(targets) ^ set(state):
        missing, extra = (sorted(missing_or_extra & set(names)) for names in (targets, state))
        raise SourceError(
            f"{file} does not fit the model: the model lacks {extra[:5]}, the file lacks {missing[:5]}"
        )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise SourceError(f"{file} does not fit the model: {' '.join(str(error).split())}") from error
    return model


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
