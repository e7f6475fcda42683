"""Opens a transformers folder as a network that reads its weights block by block: for models larger than a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from factorpack.calibration.model_folder import CONFIG, Folder, is_model_folder, open_folder
from factorpack.calibration.skeleton import build_skeleton
from factorpack.calibration.untrusted_folder import Shapes, check_fit, opening
from factorpack.checkpoints.entry import Entry
from factorpack.errors import SourceError
from factorpack.passes.resident import LIMIT_BYTES, Resident, resident_of
from factorpack.source import Source


def open_streamed(
    path: Path, source: Source, device: torch.device | None = None, limit_bytes: int = LIMIT_BYTES
) -> tuple[nn.Module, Source]:
    """The model of a folder, whose weights are read when they are used, and its tensors, read onto the device.

    Ties that only the model knows are among the aliases.
    """
    device = device or streaming_device()
    build, ties = _plain_model(path, source)
    loads = {name: entry.load for name, entry in source.entries.items()}
    network = Resident(build, loads, device, limit_bytes).network
    entries = {name: replace(entry, load=_onto(device, entry)) for name, entry in source.entries.items()}
    return network, Source(entries, {**source.aliases, **ties}, source.transposed_groups)


def streaming_device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
    build = _builder(folder, shapes)
    return build, _match(build(), source, folder)


def _builder(folder: Folder, shapes: Shapes) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with opening(folder), torch.inference_mode(False):
            return build_skeleton(folder, shapes)

    return build


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
