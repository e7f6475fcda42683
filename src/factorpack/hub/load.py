"""Opens a model folder, packed or plain, with the class that its config names.

The class must come from transformers or diffusers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.calibration.model_folder import Folder, import_library, model_class, open_folder
from factorpack.calibration.skeleton import build_skeleton
from factorpack.calibration.untrusted_folder import Shapes, check_fit, library_config, opening, safe_config
from factorpack.errors import PlanError, SourceError
from factorpack.format.container import is_packed
from factorpack.hub.places import DeviceMap, Places
from factorpack.packed import Packed, load
from factorpack.runtime.apply import Mode
from factorpack.source import open_source, read_config

GENERATION = "generation_config.json"
_LOGGER = logging.getLogger(__name__)


def from_pretrained(
    folder: str | Path,
    mode: Mode = "dense",
    example: Any = None,
    slack: float = 0.0,
    max_memory: int | None = None,
    dtype: torch.dtype | None = None,
    device_map: DeviceMap | None = None,
) -> nn.Module:
    """Opens a packed folder as a model in evaluation mode; a folder of plain weights opens too.

    The class is the one that `config.json` names. It must come from transformers or diffusers (a component:
    a unet, a vae): code in the folder never runs, and nothing is downloaded. `mode`, `example`, `slack` and
    `max_memory` are those of `packed.apply`; any mode but "dense" needs the tensor names of the model itself,
    as in a folder made from a model. In modes "packed", "coded" and "factored" the dense model is never in
    memory. Weights that go to a GPU are decoded there.

    `dtype` is the type that the model computes in, its own where there is none. `device_map` is a device, or
    devices by the beginnings of names, as in transformers; "auto" is a GPU where there is one.

    >>> model = fp.hub.from_pretrained("small-llama")  # doctest: +SKIP
    """
    opened = open_folder(folder)
    file = opened.packed_file
    if file is None and mode != "dense":
        raise PlanError(f"mode {mode!r} needs a packed folder, and {folder} is not one: use mode 'dense'")
    if file is None or (mode == "dense" and (opened.library != "transformers" or not is_packed(file))):
        return _open_model(opened, dtype, device_map)
    packed, places = load(file), Places(device_map)
    with opening(opened):
        check_fit(opened, packed.shapes(), packed.aliases)
        model = build_skeleton(opened, packed.shapes(), dtype)
        _set_up(opened, model, dtype)
    whole = Packed(packed.tensors, packed.aliases | _ties(model, packed))
    if mode == "dense" and not _is_as_stored(model, packed.shapes(), whole):
        return _open_model(opened, dtype, device_map)
    applied = whole.apply(model, mode, example, slack, max_memory, places.of)
    return places.settle(applied.model)


def tokenizer_of(folder: Folder) -> Any:
    with opening(folder):
        transformers = import_library("transformers")
        try:
            return transformers.AutoTokenizer.from_pretrained(
                folder.path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # as in `opening`
            raise SourceError(f"{folder.path} has no tokenizer that can be opened: {error}") from error


def _ties(model: nn.Module, packed: Packed) -> dict[str, str]:
    """Names of the model's tensors that the file does not have, and the names it has for the same tensors."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    ties: dict[str, str] = {}
    for own in names.values():
        stored = [packed.aliases.get(name, name) for name in own if name in packed]
        ties |= {name: stored[0] for name in own if stored and name not in packed}
    return ties


def _is_as_stored(model: nn.Module, shapes: Shapes, packed: Packed) -> bool:
    """Whether a model's tensors are those of a file, so that nothing is left for transformers to arrange."""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {name: shapes[packed.aliases.get(name, name)][1] for name in (*packed, *packed.aliases)}
    kept_wide = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return own == stored and not any(getattr(model, name, None) for name in kept_wide)


def _set_up(folder: Folder, model: nn.Module, dtype: torch.dtype | None) -> None:
    """What transformers' `from_pretrained` does besides loading weights."""
    if folder.library == "transformers":
        settings = _generation_settings(folder)
        if settings is not None:
            model.generation_config = settings
        model.config.name_or_path = str(folder.path)  # type: ignore[union-attr]
        if dtype is not None:
            model.config.dtype = dtype


def _generation_settings(folder: Folder) -> Any:
    file = folder.path / GENERATION
    if not file.is_file():
        return None
    return import_library("transformers").GenerationConfig.from_dict(read_config(file))


def _open_model(
    folder: Folder, dtype: torch.dtype | None = None, device_map: DeviceMap | None = None
) -> nn.Module:
    """Fills the model with the folder's weights, read by factorpack itself; none may stay uninitialised."""
    with opening(folder):
        file = folder.packed_file
        if file is not None and not is_packed(file):
            raise SourceError(f"{file} is not a packed file, although the config says so")
        weights = _stored_weights(folder) if file is None else _packed_weights(file)
        check_fit(folder, weights.shapes, weights.aliases)
        if folder.library == "transformers":
            settings = {"dtype": dtype, "device_map": device_map}
            given = {name: value for name, value in settings.items() if value is not None}
            return _fill(folder, weights.load(), given)
        factory, places = model_class(folder), Places(device_map)
        if file is not None:
            model = load(file).load_into(factory.from_config(safe_config(folder))).eval()
        else:
            model, loading = factory.from_pretrained(
                folder.path, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
            _check_complete(folder, loading)
        return places.settle(model if dtype is None else model.to(dtype))


@dataclass(frozen=True, slots=True)
class _Weights:
    """A folder's weights before they are read."""

    shapes: Shapes
    aliases: Collection[str]
    load: Callable[[], dict[str, Tensor]]


def _packed_weights(file: Path) -> _Weights:
    packed = load(file)
    return _Weights(packed.shapes(), packed.aliases, packed.state_dict)


def _stored_weights(folder: Folder) -> _Weights:
    source = open_source(folder.path)

    def read() -> dict[str, Tensor]:
        state = {name: entry.load() for name, entry in source.entries.items()}
        return state | {alias: state[name] for alias, name in source.aliases.items()}

    shapes = {name: (entry.dtype, entry.shape) for name, entry in source.entries.items()}
    return _Weights(
        shapes | {alias: shapes[name] for alias, name in source.aliases.items()}, source.aliases, read
    )


def _fill(folder: Folder, state: dict[str, Tensor], given: dict[str, Any]) -> nn.Module:
    """A transformers model from a state dict in memory; its class knows old names and ties.

    A config may name the class that was trained where the folder has that one's base alone, without a head: the
    base opens then, as with transformers' AutoModel.
    """
    named = model_class(folder)
    model, loading = _filled(folder, named, state, given)
    base = _base_class(folder)
    if _absent(loading) and base is not None and base is not named:
        found, fits = _filled(folder, base, state, given)
        if not _absent(fits):
            _LOGGER.info(
                "%s has the weights of a %s, without the head of the %s that its config names",
                *(folder.path, base.__name__, folder.architecture),
            )
            model, loading = found, fits
    _check_complete(folder, loading)
    model.config.name_or_path = str(folder.path)
    opened: nn.Module = model
    return opened


def _filled(
    folder: Folder, factory: Any, state: dict[str, Tensor], given: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """A model of a class, and what of it the state dict did not have."""
    model, loading = factory.from_pretrained(
        None,
        config=library_config(folder),
        state_dict=state,
        generation_config=_generation_settings(folder),
        output_loading_info=True,
        trust_remote_code=False,
        **given,
    )
    return model, loading


def _base_class(folder: Folder) -> Any:
    """The class of a model without any head; None where transformers has none, or several."""
    found = import_library("transformers").MODEL_MAPPING.get(type(library_config(folder)), None)
    return found if isinstance(found, type) else None


def _absent(loading: dict[str, Any]) -> list[str]:
    return sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))


def _check_complete(folder: Folder, loading: dict[str, Any]) -> None:
    if absent := _absent(loading):
        raise SourceError(
            f"{folder.path} lacks {len(absent)} tensors of a {folder.architecture}, the first is {absent[0]}"
        )
