"""Reads torch files from anyone: no code of theirs runs, and a small file takes little memory."""

from __future__ import annotations

import re
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from factorpack.checkpoints.nested_weights import USUAL
from factorpack.errors import SourceError

_ZIP = b"PK\x03\x04"
_TAR, _TAR_PLACE = b"ustar", 257
_LARGEST_HEAD = 1 << 26
_MAKERS = re.compile(rb"\n(bytearray|encode|\w*Tensor)\n")
"""Calls that torch's restricted reader allows and no state dict needs: each makes any size from a few bytes."""
_ADVICE = "factorpack never runs code from a checkpoint; save the model's state_dict() and use that"
_MODULE = b"ctorch.nn.modules."
"""What a pickle of a whole model has in it: the class of one of its layers."""
_TENSOR = b"ctorch._utils\n_rebuild_"
_UNKNOWN = re.compile(r"GLOBAL (\S+) was not an allowed global")


class Ignored:
    """Stands for an object that holds settings and no weights: it takes whatever it is given, and keeps nothing."""

    def __new__(cls, *_: object) -> Ignored:
        return super().__new__(cls)

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("argparse.Namespace", "typing.Any"), Ignored),
    **{f"pathlib.{kind}": Ignored for kind in ("Path", "PosixPath", "WindowsPath", "PurePosixPath")},
    **{f"pathlib._local.{kind}": Ignored for kind in ("PosixPath", "WindowsPath")},
    **{f"builtins.{kind}": Ignored for kind in ("int", "float", "str", "bool", "list", "dict")},
    **{f"omegaconf.{kind}": Ignored for kind in ("dictconfig.DictConfig", "listconfig.ListConfig")},
    **{f"omegaconf.base.{kind}": Ignored for kind in ("Metadata", "ContainerMetadata")},
    **{f"omegaconf.nodes.{kind}Node": Ignored for kind in ("Any", "String", "Integer", "Float", "Boolean")},
    "lightning.fabric.utilities.data.AttributeDict": OrderedDict,
    "lightning_fabric.utilities.data.AttributeDict": OrderedDict,
    "lightning.pytorch.utilities.parsing.AttributeDict": OrderedDict,
    "pytorch_lightning.utilities.parsing.AttributeDict": OrderedDict,
}
"""Classes of the settings that timm, Lightning and others save beside the weights, and what stands for each.

None of them is imported. torch's restricted reader fills dictionaries only of types it knows.
"""
_one_reader = threading.Lock()
"""torch keeps the classes it allows in one place for all threads."""


def read_torch_file(path: Path) -> Mapping[Any, Any]:
    """What a torch file holds, read with `weights_only=True`; its tensors stay in the file."""
    with path.open("rb") as file:
        head = file.read(_TAR_PLACE + len(_TAR))
    if head[_TAR_PLACE:] == _TAR:
        raise SourceError(
            f"{path} is an archive of files, expected a file that torch.save wrote: unpack it first"
        )
    is_zip = head.startswith(_ZIP)
    pickled = b""
    try:
        pickled = _checked_pickle(path) if is_zip else _head(path)
        _check_makers(pickled)
        loaded = _load(path, is_zip)
    except SourceError as error:
        error.args = (f"{path} {error}",)
        raise
    except Exception as error:  # a damaged pickle fails in torch's restricted reader in a dozen ways
        raise _refusal(path, pickled, error) from error
    if not isinstance(loaded, Mapping):
        raise SourceError(f"{path} holds a {type(loaded).__name__}, expected a state dict")
    return loaded


def _load(path: Path, is_zip: bool) -> Any:
    stand_ins: list[Any] = [(kind, name) for name, kind in _SETTINGS.items()]
    with _one_reader, torch.serialization.safe_globals(stand_ins):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


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
    error.add_note(f"state = torch.jit.load({str(path)!r}, map_location='cpu').state_dict()")
    error.add_note(f"torch.save(dict(state), {f'{path.stem}-weights.pt'!r})")
    return error


def _refusal(path: Path, pickled: bytes, error: Exception) -> SourceError:
    """Why a file is not read, and how its owner makes one that is."""
    # Only the first sentence: torch goes on to recommend loading it unsafely.
    reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
    unknown, is_module = _UNKNOWN.search(str(error)), _MODULE in pickled
    if unknown is not None:
        reason = f"it holds a {unknown[1]}, and not only tensors and settings"
    if is_module:
        reason = "it is a whole pickled model, with its code, and not its weights alone"
    if not path.stat().st_size:
        reason = "it is empty"
    refused = SourceError(f"{path} cannot be read as plain tensors: {reason} ({_ADVICE})")
    if is_module or (unknown is not None and _TENSOR in pickled):
        key = _named_in(pickled)
        refused.add_note(
            "If you trust it, these two lines, which run its code, make a file that can be read:"
        )
        refused.add_note(f"found = torch.load({str(path)!r}, map_location='cpu', weights_only=False){key}")
        saved = "found.state_dict()" if is_module else "found"
        refused.add_note(f"torch.save({saved}, {f'{path.stem}-weights.pt'!r})")
    return refused


def _named_in(pickled: bytes) -> str:
    """The subscript that takes the weights out of a pickled dictionary; empty for anything else."""
    # A file from before torch wrote archives has three short pickles first.
    body = pickled.split(b".\x80\x02", 3)[-1] if pickled.count(b".\x80\x02") >= 3 else pickled[2:]
    is_dict = body.startswith((b"}", b"ccollections\nOrderedDict"))
    written = (name for name in USUAL if b"X" + len(name).to_bytes(4, "little") + name.encode() in body)
    return f"[{next(written, 'state_dict')!r}]" if is_dict else ""


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LARGEST_HEAD)


def _check_makers(pickled: bytes) -> None:
    found = _MAKERS.search(pickled)
    if found:
        raise SourceError(f"calls {found[1].decode()}, which no state dict does ({_ADVICE})")
