"""Opens a transformers folder as a network that reads its weights block by block: for models larger than a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from factorpack.calibration.model_folder import CONFIG, Folder, is_model_folder, model_class, open_folder
from factorpack.calibration.untrusted_folder import check_fit, library_config, opening
from factorpack.checkpoints.entry import Entry
from factorpack.errors import SourceError
from factorpack.passes.resident import LIMIT_BYTES, Resident, resident_of
from factorpack.record import DTYPES
from factorpack.source import Source


def open_streamed(
    path: Path, source: Source, device: torch.device | None = None, limit_bytes: int = LIMIT_BYTES
) -> tuple[nn.Module, Source]:
    """The model of a folder, whose weights are read when they are used, and its tensors, read onto the device.

    The device is a GPU where there is one. Ties that only the model knows are among the aliases.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    build, ties = _plain_model(path, source)
    loads = {name: entry.load for name, entry in source.entries.items()}
    network = Resident(build, loads, device, limit_bytes).network
    entries = {name: replace(entry, load=_onto(device, entry)) for name, entry in source.entries.items()}
    return network, Source(entries, {**source.aliases, **ties}, source.transposed_groups)


def open_skeleton(path: Path, source: Source) -> nn.Module:
    """The model of a folder with its parameters on the meta device: shapes, and no values."""
    return _plain_model(path, source)[0]()


@contextmanager
def streaming(model: nn.Module | None) -> Iterator[None]:
    """Takes a streamed model's weights from the device after the block, and says what to do if it is too small."""
    resident = None if model is None else resident_of(model)
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        if resident is None:
            raise
        raise SourceError(
            f"the GPU has too little memory to stream this model: give batches of fewer or shorter samples ({error})"
        ) from error
    finally:
        if resident is not None:
            resident.release()


def _plain_model(path: Path, source: Source) -> tuple[Callable[[], nn.Module], dict[str, str]]:
    """What builds the model of a folder without its weights, and the ties that only the model knows."""
    if not is_model_folder(path):
        raise SourceError(
            f"calibration runs a model, and the source is a {type(path).__name__}: give a model, or a "
            f"transformers folder, which has a {CONFIG}; {path} is not one"
        )
    folder = open_folder(path)
    if folder.library != "transformers":
        raise SourceError(f"{path} is a folder of {folder.library}, only those of transformers are streamed")
    with opening(folder):
        shapes = {name: (entry.dtype, entry.shape) for name, entry in source.entries.items()}
        check_fit(folder, shapes, ())
    build = _builder(folder, source.entries)
    return build, _match(build(), source, folder)


def _builder(folder: Folder, entries: Mapping[str, Entry]) -> Callable[[], nn.Module]:
    dtype = _dtype(folder, entries)

    def build() -> nn.Module:
        with opening(folder), torch.inference_mode(False), _default_dtype(dtype), _parameters_on_meta():
            network: nn.Module = model_class(folder)(library_config(folder))
        return network.eval()

    return build


def _dtype(folder: Folder, entries: Mapping[str, Entry]) -> torch.dtype:
    """The type that the config names, or that most of the weights have."""
    named = folder.config.get("dtype") or folder.config.get("torch_dtype")
    if isinstance(named, str) and named in DTYPES:
        return DTYPES[named]
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries.values():
        if entry.dtype.is_floating_point:
            sizes[entry.dtype] += entry.numel
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def _match(network: nn.Module, source: Source, folder: Folder) -> dict[str, str]:
    """Ties of the model that the checkpoint does not have; an error where the two do not fit."""
    tied: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    shapes = {name: tuple(each.shape) for name, each in network.named_parameters(remove_duplicate=False)}
    aliases: dict[str, str] = {}
    for names in tied.values():
        stored = [source.aliases.get(name, name) for name in names]
        held = [name for name in stored if name in source.entries]
        if not held:
            raise SourceError(
                f"{folder.path} has no tensor {names[0]!r}, which a {folder.architecture} has: streaming needs "
                "the model's own names"
            )
        found = source.entries[held[0]].shape
        if found != shapes[names[0]]:
            raise SourceError(
                f"tensor {held[0]!r} is {found} in {folder.path}, {shapes[names[0]]} by its config"
            )
        aliases |= {name: held[0] for name in names if name not in source.entries}
    return aliases


def _onto(device: torch.device, entry: Entry) -> Callable[[], Tensor]:
    return lambda: entry.load().to(device)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """New parameters go to the meta device, one by one; buffers keep the values that models compute for them."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            self._parameters[name] = nn.Parameter(param.to("meta"), param.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
