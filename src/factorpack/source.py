"""One interface to checkpoints and models: named tensors that load one at a time."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.checkpoints.entry import Entry, Note
from factorpack.checkpoints.file_kind import ENDINGS, PICKLED, SHARDS, kind_of
from factorpack.checkpoints.gguf_file import read_gguf
from factorpack.checkpoints.nested_weights import find_weights
from factorpack.checkpoints.npz_file import read_npz
from factorpack.checkpoints.safetensors_entries import read_safetensors
from factorpack.checkpoints.torch_file import read_torch_file
from factorpack.checkpoints.weight_names import AVERAGES, PARALLEL, fit_names, natural_key, wrapper_of
from factorpack.errors import SourceError
from factorpack.format.streams import raw_bytes
from factorpack.record import LayerMoments, LayerSample, weight_of
from factorpack.weight import Weight

SINGLE_FILES = {".npz": read_npz, ".gguf": read_gguf}
_INDEXES = (
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
_SINGLES = ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
"""Names of the weights in transformers and diffusers folders."""
LARGEST_CONFIG = 1 << 24
LONGEST_NAME = 255
"""Bytes of a file's name that file systems allow."""
HEAD_BYTES = 1 << 20
LARGEST_EXPANSION = 4
"""How many times the bytes of a torch file its tensors may have: some share their values."""
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
HEADS = {"fc", "classifier", "head", "heads", "lm_head", "score"}
"""Common names of output heads, as parts of tensor names."""
_LOGGER = logging.getLogger(__name__)


Checkpoint = nn.Module | Mapping[str, Tensor] | str | Path


_VOCABULARY = re.compile(r"embed|token_embd|wte|lm_head|(^|\.)output\.")
MANY_ROWS = 4
"""Rows per column above which a matrix can be that of a vocabulary."""


@dataclass(frozen=True, slots=True)
class Source:
    """Named tensors. Only a model tells `transposed_groups`: files do not store it."""

    entries: Mapping[str, Entry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    transposed_groups: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    """What is to be said of how a file was read."""
    key: str | None = None
    """The name in a torch file under which the tensors are."""

    def say(self) -> Source:
        """Logs the notes: once for each time that someone asks for the file to be used."""
        for note in self.notes:
            _LOGGER.log(note.level, note.text)
        return self

    def fitted(self, wanted: Collection[str], file: str) -> Source:
        """The same tensors under the names that a model has for them, where only prefixes differ."""
        names = {*self.entries, *self.aliases}
        fitting = {} if names == set(wanted) else fit_names(names, wanted)
        # A tensor that only an alias keeps in the model would be left out with its own name.
        if not fitting or any(
            name in fitting and target not in fitting for name, target in self.aliases.items()
        ):
            return self
        changed = next((pair for pair in fitting.items() if pair[0] != pair[1]), None)
        left = len(names) - len(fitting)
        text = f"{file}: names as the model has them" + (
            f", {changed[0]!r} as {changed[1]!r}" if changed else ""
        )
        text += f"; left out: {left} tensors that the model does not have" if left else ""
        return replace(self._renamed(fitting), notes=(*self.notes, Note(text)))

    def _renamed(self, names: Mapping[str, str]) -> Source:
        entries = {names[name]: entry for name, entry in self.entries.items() if name in names}
        aliases = {names[name]: names[target] for name, target in self.aliases.items() if name in names}
        return replace(self, entries=entries, aliases=aliases)

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


def open_source(source: Checkpoint, key: str | None = None) -> Source:
    """Opens a model, a state dict, or a path: `.safetensors`, a torch file, `.npz`, `.gguf`, a folder or index.

    `key` names the weights in a torch file that has several.
    """
    if isinstance(source, str | Path):
        return _open_named(Path(source), key)
    if key is not None:
        raise SourceError(f"the key {key!r} is for a torch file, and the source is a {type(source).__name__}")
    if isinstance(source, nn.Module):
        groups = {
            weight_of(name): module.groups
            for name, module in source.named_modules()
            if isinstance(module, TRANSPOSED)
        }
        return replace(_from_state_dict(source.state_dict(keep_vars=False)), transposed_groups=groups)
    if not isinstance(source, Mapping):
        what = f"the class {source.__name__}" if isinstance(source, type) else f"a {type(source).__name__}"
        raise SourceError(f"the source is {what}, expected a model, a state dict or a path")
    return _from_state_dict(source)


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


def _open_named(path: Path, key: str | None) -> Source:
    """What a caller names: a folder, an index or a file. A file's names are without what wrappers added."""
    if key is not None and (path.is_dir() or kind_of(path) not in PICKLED):
        raise SourceError(f"the key {key!r} is for a torch file ({', '.join(PICKLED)}), and {path} is none")
    opened = _open_path(path, key)
    is_one_file = path.is_file() and kind_of(path) in SHARDS
    return _without_wrapper(opened, path.name) if is_one_file else opened


def _open_path(path: Path, key: str | None = None) -> Source:
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise SourceError(
            f"there is no file or folder {path}: checkpoints are read from this machine, and nothing is downloaded"
        )
    kind = kind_of(path)
    if kind == ".index.json":
        return _open_index(path)
    if kind == ".safetensors":
        return Source(dict(read_safetensors(path)))
    if kind in PICKLED:
        return _open_torch_file(path, key)
    if kind in SINGLE_FILES:
        entries, notes = SINGLE_FILES[kind](path)
        ordered = {name: entries[name] for name in sorted(entries, key=natural_key)}
        return Source(ordered, notes=notes)
    raise SourceError(
        f"{path.name} ends in {path.suffix!r} and does not begin as a checkpoint does, expected one of "
        f"{', '.join(ENDINGS)}, or a folder"
    )


def _open_torch_file(path: Path, key: str | None) -> Source:
    loaded = read_torch_file(path)
    try:
        found = find_weights(loaded, path.name, key)
    except SourceError as error:
        error.args = (f"{path} {error}",)
        raise
    opened = replace(_from_state_dict(found.weights), notes=found.notes, key=found.key)
    _check_declared(opened, path)
    return opened


def _without_wrapper(source: Source, file: str) -> Source:
    """Names without what every one of them begins with, if a wrapper puts that there."""
    names = [*source.entries, *source.aliases]
    counted = [name for name in names if name != AVERAGES]
    wrapper = wrapper_of(counted)
    if not wrapper or (len(counted) < len(names) and not wrapper.startswith(PARALLEL)):
        return source
    text = f"{file}: every name began with {wrapper!r}, which is left out"
    text += f", and so is {AVERAGES!r}" if len(counted) < len(names) else ""
    renamed = source._renamed({name: name.removeprefix(wrapper) for name in counted})
    return replace(renamed, notes=(*source.notes, Note(text)))


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
    found = sorted(path.name for path in folder.iterdir() if path.is_file() and kind_of(path) in ENDINGS)
    instead = f"; name one of its files: {', '.join(found[:5])}" if found else ""
    raise SourceError(f"the folder {folder} holds none of {', '.join((*_INDEXES, *_SINGLES))}{instead}")


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
    return replace(source, entries=entries, aliases=aliases | tied)


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
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
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
    """Only a plain file name, and no other index that could name this one."""
    return isinstance(name, str) and is_file_name(name) and Path(name).suffix in SHARDS


def is_file_name(name: str) -> bool:
    """Whether a file beside another can have this name: no folder, no `..`, no longer than systems allow."""
    return Path(name).name == name and len(name.encode(errors="replace")) <= LONGEST_NAME
