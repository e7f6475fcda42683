"""Reads .pt files from anyone: no code of theirs runs, and a small file takes little memory."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from factorpack.errors import SourceError

_ZIP = b"PK\x03\x04"
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
_LARGEST_HEAD = 1 << 26
_MAKERS = re.compile(rb"\n(bytearray|encode|\w*Tensor)\n")
"""Calls that torch's restricted reader allows and no state dict needs: each makes any size from a few bytes."""
_ADVICE = "factorpack never runs code from a checkpoint; save the model's state_dict() and use that"


def read_torch_file(path: Path) -> Mapping[str, Any]:
    """The state dict in a torch checkpoint, read with `weights_only=True`; its tensors stay in the file."""
    with path.open("rb") as file:
        is_zip = file.read(4) == _ZIP
    try:
        _check_makers(_checked_pickle(path) if is_zip else _head(path))
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except SourceError as error:
        error.args = (f"{path} {error}",)
        raise
    except Exception as error:  # a damaged pickle fails in torch's restricted reader in a dozen ways
        # Only the first sentence: torch goes on to recommend loading it unsafely.
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        raise SourceError(f"{path} cannot be read as plain tensors: {reason} ({_ADVICE})") from error
    if not isinstance(loaded, Mapping):
        raise SourceError(f"{path} holds a {type(loaded).__name__}, expected a state dict")
    for wrapper in _WRAPPERS:
        inner = loaded.get(wrapper)
        if isinstance(inner, Mapping) and all(isinstance(value, Tensor) for value in inner.values()):
            return inner
    return loaded


def _checked_pickle(path: Path) -> bytes:
    """The pickle inside an archive. The archive has to be one of tensors, stored as torch stores them."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        inside = [entry.filename.partition("/")[2] for entry in entries]
        if any(name == "constants.pkl" or name.startswith("code/") for name in inside):
            raise _torchscript_error(path)
        # torch never compresses. If it maps the file, it would take compressed bytes for weights.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise SourceError("has compressed entries, expected an archive as torch.save writes it")
        total, size = sum(entry.file_size for entry in entries), path.stat().st_size
        if total > size:
            raise SourceError(f"has {size} bytes and declares entries of {total}: it is damaged")
        pickles = [entry for entry, name in zip(entries, inside, strict=True) if name == "data.pkl"]
        return b"".join(archive.read(entry) for entry in pickles)


def _torchscript_error(path: Path) -> SourceError:
    error = SourceError(
        "is a TorchScript archive, a program with its weights, and factorpack never runs code from a checkpoint. "
        "If you trust it, save its weights with these two lines and use them:"
    )
    error.add_note(f"state = torch.jit.load({path.name!r}, map_location='cpu').state_dict()")
    error.add_note(f"torch.save(dict(state), {f'{path.stem}-weights.pt'!r})")
    return error


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LARGEST_HEAD)


def _check_makers(pickled: bytes) -> None:
    found = _MAKERS.search(pickled)
    if found:
        raise SourceError(f"calls {found[1].decode()}, which no state dict does ({_ADVICE})")
