"""One interface to checkpoints and models: named tensors that load one at a time."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from factorpack.errors import SourceError
from factorpack.format.container import METADATA_KEY, SAFETENSORS_TYPES
from factorpack.format.streams import raw_bytes
from factorpack.record import LayerMoments, LayerSample, weight_of
from factorpack.torch_file import read_torch_file
from factorpack.weight import Weight

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
SHARDS = (".safetensors", *PICKLED)
_INDEXES = (
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
_SINGLES = ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
"""Names of the weights in transformers and diffusers folders."""
LARGEST_CONFIG = 1 << 24
HEAD_BYTES = 1 << 20
LARGEST_EXPANSION = 4
"""How many times the bytes of a torch file its tensors may have: some share their values."""
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
HEADS = {"fc", "classifier", "head", "heads", "lm_head", "score"}
"""Common names of output heads, as parts of tensor names."""
_SAFETENSORS_DTYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}


Checkpoint = nn.Module | Mapping[str, Tensor] | str | Path


_VOCABULARY = re.compile(r"embed|wte|lm_head|(^|\.)output\.")
MANY_ROWS = 4
"""Rows per column above which a matrix can be that of a vocabulary."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that has not been read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Source:
    """Named tensors. Only a model tells `transposed_groups`: files do not store it."""

    entries: Mapping[str, Entry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    transposed_groups: Mapping[str, int] = field(default_factory=dict)

    def weight(
        self,
        name: str,
        inputs: LayerSample | LayerMoments | None = None,
        sensitivity: float | None = None,
    ) -> Weight:
        """Reads one tensor, with what is known of its layer."""
        values = self.entries[name].load()
        return Weight(
            values,
            self.transposed_groups.get(name, 0),
            inputs,
            sensitivity,
            _is_vocabulary(name, values.shape),
        )


def _is_vocabulary(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight is an embedding of words or the head that predicts them, by its name and its shape."""
    return len(shape) == 2 and shape[0] > MANY_ROWS * shape[1] and bool(_VOCABULARY.search(name))


def open_source(source: Checkpoint) -> Source:
    """Opens a model, a state dict, or a path: `.safetensors`, `.pt/.pth/.bin`, a Hugging Face folder or index."""
    if isinstance(source, nn.Module):
        groups = {
            weight_of(name): module.groups
            for name, module in source.named_modules()
            if isinstance(module, TRANSPOSED)
        }
        plain = _from_state_dict(source.state_dict(keep_vars=False))
        return Source(plain.entries, plain.aliases, groups)
    if isinstance(source, Mapping):
        return _from_state_dict(source)
    return _open_path(Path(source))


def import_model(reference: str) -> nn.Module:
    """The model that `module:callable` builds, as in `torchvision.models:resnet18`; this runs its code."""
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise SourceError(f"{reference!r} does not name a model, expected module:callable")
    try:
        with _working_folder_last():
            found = importlib.import_module(module_name)
            for part in attribute.split("."):
                found = getattr(found, part)
            model = found() if callable(found) and not isinstance(found, nn.Module) else found
    except (ImportError, AttributeError) as error:
        raise SourceError(f"there is no {reference!r}: {error}") from error
    except Exception as error:  # the caller's own code may raise anything
        raise SourceError(f"{reference!r} fails to build a model: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise SourceError(f"{reference!r} returns a {type(model).__name__}, expected a torch module")
    return model


@contextmanager
def _working_folder_last() -> Iterator[None]:
    """Modules are also found in the working folder, where no installed package has the same name."""
    here = str(Path.cwd())
    if here in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        with suppress(ValueError):  # the imported code may have changed the path itself
            sys.path.remove(here)


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """A sort key that puts `layer10` after `layer9`, for numbers of any length."""
    # Every second word is a number: the one with more digits is larger.
    return [
        (1, len(digits := word.lstrip("0")), digits) if place % 2 else (0, 0, word)
        for place, word in enumerate(re.split(r"(\d+)", name))
    ]


def checksum_of(values: Tensor) -> str:
    """Of a tensor's type, shape and values: whatever is made from it depends on all of them."""
    found = hashlib.sha256(f"{values.dtype} {tuple(values.shape)}".encode())
    found.update(raw_bytes(values))
    return found.hexdigest()


def _from_state_dict(state: Mapping[str, Any]) -> Source:
    entries: dict[str, Entry] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise SourceError(f"entry {name!r} is a {type(value).__name__}, expected a tensor under a name")
        if value.is_meta or value.layout != torch.strided:
            raise SourceError(f"tensor {name!r} has no dense values to read: {value.device}, {value.layout}")
        first = seen.setdefault(_identity(value), name) if value.numel() else name
        if first != name:
            aliases[name] = first
        else:
            entries[name] = Entry(tuple(value.shape), value.dtype, _return_always(value.detach()))
    return Source(entries, aliases)


def _identity(value: Tensor) -> tuple[object, ...]:
    return value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride()


def _return_always(value: Tensor) -> Callable[[], Tensor]:
    return lambda: value


def _open_path(path: Path) -> Source:
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise SourceError(f"there is no file or folder {path}")
    if path.name.endswith(".index.json"):
        return _open_index(path)
    if path.suffix == ".safetensors":
        return Source(dict(_safetensors_entries(path)))
    if path.suffix in PICKLED:
        opened = _from_state_dict(read_torch_file(path))
        _check_declared(opened, path)
        return opened
    allowed = ", ".join((*SHARDS, ".index.json"))
    raise SourceError(f"{path.name} ends in {path.suffix!r}, expected one of {allowed}, or a folder")


def _check_declared(source: Source, path: Path) -> None:
    """Raises SourceError if tensors that overlap in their file would expand to far more than it holds."""
    declared = sum(entry.numel * entry.dtype.itemsize for entry in source.entries.values())
    size = path.stat().st_size
    allowed = LARGEST_EXPANSION * size + HEAD_BYTES
    if declared > allowed:
        raise SourceError(
            f"{path} has {size} bytes and tensors of {declared}, allowed are {allowed}: save expanded tensors "
            "with their values, as tensor.clone()"
        )


def _open_folder(folder: Path) -> Source:
    for name in (*_INDEXES, *_SINGLES):
        if (folder / name).is_file():
            check_inside(folder, folder / name)
            opened = _open_path(folder / name)
            return _merge_tied_heads(opened) if _has_tied_head(folder / "config.json") else opened
    raise SourceError(f"the folder {folder} holds none of {', '.join((*_INDEXES, *_SINGLES))}")


def check_inside(folder: Path, path: Path) -> None:
    """Raises SourceError if a link leads out of a folder; a hub cache keeps its files in blobs/ beside it."""
    root, target = folder.resolve(), path.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parents[1] / "blobs")
    if not any(target.is_relative_to(parent) for parent in allowed):
        raise SourceError(f"{path} is a link to {target}, expected a file inside {folder}")


def _has_tied_head(config: Path) -> bool:
    """Whether a folder's config ties the model's head to its embedding."""
    return config.is_file() and read_config(config).get("tie_word_embeddings") is True


def read_config(file: Path) -> dict[str, Any]:
    """Reads a model folder's config."""
    check_inside(file.parent, file)
    if file.stat().st_size > LARGEST_CONFIG:
        raise SourceError(f"{file} has {file.stat().st_size} bytes, allowed are {LARGEST_CONFIG}")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SourceError(f"{file} holds a {type(config).__name__}, expected a JSON object")
    return config


def _merge_tied_heads(source: Source) -> Source:
    """Makes a head an alias of the embedding it is tied to, where a checkpoint holds identical copies of both.

    Tensors that may be copies are read once each.
    """
    tied: dict[str, str] = {}
    for copies in _copies_of_heads(source.entries):
        # Heads that are copies of each other, and of nothing else, become the last of them.
        first = next((name for name in copies if not _is_head(name)), copies[-1])
        tied |= {name: first for name in copies if _is_head(name) and name != first}
    entries = {name: entry for name, entry in source.entries.items() if name not in tied}
    aliases = {alias: tied.get(target, target) for alias, target in source.aliases.items()}
    return Source(entries, aliases | tied)


def _copies_of_heads(entries: Mapping[str, Entry]) -> Iterator[list[str]]:
    """Names of matrices that are bit for bit the same, where a head is among them."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, entry in entries.items():
        if len(entry.shape) == 2:
            alike.setdefault((entry.shape, entry.dtype), []).append(name)
    for names in alike.values():
        if len(names) == 1 or not any(map(_is_head, names)):
            continue
        same: dict[str, list[str]] = {}
        for name in names:
            same.setdefault(checksum_of(entries[name].load()), []).append(name)
        yield from (copies for copies in same.values() if len(copies) > 1)


def _is_head(name: str) -> bool:
    return bool(HEADS & set(name.split(".")))


def _open_index(path: Path) -> Source:
    """A sharded checkpoint: the index maps each tensor to a file beside it."""
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{path} is not an index with a weight_map: {error!r}") from error
    entries: dict[str, Entry] = {}
    aliases: dict[str, str] = {}
    for shard in shards:
        if not _is_shard(shard) or (path.parent / shard).is_dir():
            raise SourceError(f"{path} names the shard {shard!r}, expected a file beside the index")
        check_inside(path.parent, path.parent / shard)
        opened = _open_path(path.parent / shard)
        entries.update(opened.entries)
        aliases.update(opened.aliases)
    absent = sorted(set(weight_map) - set(entries) - set(aliases))
    if absent:
        raise SourceError(f"{len(absent)} tensors of {path} are in no shard, the first is {absent[0]!r}")
    wanted = {aliases.get(name, name): None for name in weight_map}
    tied = {name: target for name, target in aliases.items() if name in weight_map}
    return Source({name: entries[name] for name in wanted}, tied)


def _is_shard(name: object) -> bool:
    """Only a plain file name: no folder, no `..`, no other index that could name this one."""
    return isinstance(name, str) and Path(name).name == name and Path(name).suffix in SHARDS


def _safetensors_entries(path: Path) -> Iterator[tuple[str, Entry]]:
    try:
        with safe_open(path, framework="pt") as file:  # which checks the header against the file
            if METADATA_KEY in (file.metadata() or {}):
                raise SourceError(f"{path} is already a packed file: decode it first")
        state, start, header = _read_header(path)
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{path} is not a whole safetensors file: {error}") from error
    header.pop("__metadata__", None)
    for name in sorted(header, key=natural_key):
        kind, shape = header[name]["dtype"], tuple(header[name]["shape"])
        if kind not in _SAFETENSORS_DTYPES:
            raise SourceError(f"tensor {name!r} of {path} has the unknown type {kind}")
        dtype, place = _SAFETENSORS_DTYPES[kind], start + header[name]["data_offsets"][0]
        yield name, Entry(shape, dtype, partial(_read_tensor, path, name, shape, dtype, place, state))


FileState = tuple[int, ...]


def _read_header(path: Path) -> tuple[FileState, int, dict[str, Any]]:
    """The state of a file, where its data start, and its entries: read once, however many tensors there are."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return _state_of(file), 8 + size, json.loads(file.read(size))


def _state_of(file: BinaryIO) -> FileState:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read_tensor(
    path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, place: int, state: FileState
) -> Tensor:
    values = torch.empty(shape, dtype=dtype)
    try:
        # Opened for each tensor: a mapped file that stays open keeps every page it has read resident.
        with path.open("rb") as file:
            if _state_of(file) != state:
                raise SourceError(f"{path} has changed since it was opened: start again")
            file.seek(place)
            if values.numel():
                buffer = memoryview(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                if file.readinto(buffer) != len(buffer):
                    raise OSError("the file ends too early")
    except OSError as error:
        raise SourceError(f"tensor {name!r} can no longer be read from {path}: {error}") from error
    return values
