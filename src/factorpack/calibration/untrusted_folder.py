"""Model folders from anyone: what is checked before their config builds a model.

A config is data that decides what code of transformers or diffusers does. It may not make them download
anything, load native code, read outside the folder, or take more memory than the folder's weights explain.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from factorpack.calibration.model_folder import (
    CONFIG,
    METHOD,
    QUANTIZATION,
    Folder,
    import_library,
    model_class,
)
from factorpack.errors import FactorpackError, SourceError
from factorpack.source import check_inside

_DOWNLOADS = ("backbone", "use_pretrained_backbone", "use_timm_backbone")
"""Keys that make a model fetch a part of itself, where their value is true or a name."""
_IGNORED = {
    *("auto_map", "custom_pipelines", "trust_remote_code"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
    *("kernels", "kernel_config", "use_kernels", "allow_all_kernels", "fusion_config"),
    *("_name_or_path", "name_or_path", "base_model_name_or_path", "transformers_weights"),
    *("device_map", "distributed_config", "tp_plan", QUANTIZATION),
}
"""Keys about code, files and hardware: a model's numbers do not depend on them."""
_REPEATS = re.compile("layer|depth|block|stage")
MOST_REPEATS = 1 << 20
SPARE_ELEMENTS, LARGEST_SHARE = 1 << 24, 4
"""A model may have this many elements, and this many times its file's: ties and buffers are in no file."""
SPARE_MODULES, MODULES_PER_TENSOR = 1000, 20

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@contextmanager
def opening(folder: Folder) -> Iterator[None]:
    """Checks a folder, keeps the libraries from the network in the block, and makes their errors ours."""
    for each in folder.path.rglob("*"):
        check_inside(folder.path, each)
    safe_config(folder)
    library = import_library(folder.library)
    try:
        with _offline(), _silent(library):
            yield
    except FactorpackError:
        raise
    except Exception as error:  # other people's code on a config from anyone may raise anything
        lines = str(error).strip().splitlines() or [""]
        raise SourceError(
            f"{folder.path} does not open as a {folder.architecture}: {type(error).__name__}: {lines[0]}"
        ) from error


@contextmanager
def _offline() -> Iterator[None]:
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _silent(library: Any) -> Iterator[None]:
    """The libraries draw bars on standard error, to a file or a pipe too, and log what our errors say."""
    logs = library.utils.logging
    shown, verbosity = logs.is_progress_bar_enabled(), logs.get_verbosity()
    logs.disable_progress_bar()
    logs.set_verbosity_error()
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)
        if shown:
            logs.enable_progress_bar()


def safe_config(folder: Folder) -> dict[str, Any]:
    """The folder's config without what is not about the model; SourceError where it would download something."""
    quantization = folder.config.get(QUANTIZATION)
    if quantization is not None and folder.packed_file is None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise SourceError(
            f"{folder.path / CONFIG} says that the weights are quantized by {method!r}: factorpack opens plain "
            f"weights and its own, quant_method {METHOD!r}"
        )
    cleaned: dict[str, Any] = _clean(folder.config, folder)
    return cleaned


def _clean(value: Any, folder: Folder) -> Any:
    if isinstance(value, list):
        return [_clean(each, folder) for each in value]
    if not isinstance(value, dict):
        return value
    for key, found in value.items():
        if key in _DOWNLOADS and (found is True or (isinstance(found, str) and found)):
            raise SourceError(
                f"{folder.path / CONFIG} has {key} {found!r}, a part of the model that is not in the folder, and "
                "factorpack downloads nothing: build the model yourself and use fp.load(file).load_into(model)"
            )
        if _REPEATS.search(key) and isinstance(found, int) and found > MOST_REPEATS:
            raise SourceError(f"{folder.path / CONFIG} has {key} {found}, allowed are {MOST_REPEATS}")
    return {key: _clean(found, folder) for key, found in value.items() if key not in _IGNORED}


def library_config(folder: Folder) -> Any:
    """The config of a transformers folder as the object that its class takes."""
    config, config_class = safe_config(folder), model_class(folder).config_class
    part = config.get(getattr(config_class, "base_config_key", "") or "")
    return config_class.from_dict(part if isinstance(part, dict) else config)


def check_fit(folder: Folder, shapes: Shapes, aliases: Collection[str]) -> None:
    """Builds a folder's model without memory, and compares it with the shapes of the folder's weights."""
    stored = [math.prod(shape) for name, (_, shape) in shapes.items() if name not in aliases]
    allowed = SPARE_ELEMENTS + LARGEST_SHARE * sum(stored)
    with torch.device("meta"), _counted(folder, SPARE_MODULES + MODULES_PER_TENSOR * len(stored), allowed):
        model = builder(folder)()
    check_shapes({name: tuple(value.shape) for name, value in model.state_dict().items()}, shapes)
    held: dict[int, Tensor] = {id(each): each for each in (*model.parameters(), *model.buffers())}
    _check_elements(folder, sum(each.numel() for each in held.values()), allowed)


def check_shapes(model: Mapping[str, tuple[int, ...]], shapes: Shapes) -> None:
    """Raises SourceError where a tensor is of another size in the file than in the model."""
    for name, shape in model.items():
        stored = shapes[name][1] if name in shapes else shape
        # Libraries turn some tensors when they read them, so only the size is compared.
        if math.prod(stored) != math.prod(shape):
            raise SourceError(f"tensor {name!r} is {stored} in the file, {shape} by its config")


def builder(folder: Folder) -> Callable[[], nn.Module]:
    """What makes a folder's model, with the values that its class starts from."""
    factory = model_class(folder)
    if folder.library == "diffusers":
        return lambda: factory.from_config(safe_config(folder))
    return lambda: factory(library_config(folder))


@contextmanager
def _counted(folder: Folder, modules: int, allowed: int) -> Iterator[None]:
    """Ends the building of a model that has too many modules or parameters, before it is complete."""
    found = {"modules": 0, "elements": 0}

    def count_module(*_: object) -> None:
        found["modules"] += 1
        if found["modules"] > modules:
            raise SourceError(
                f"{folder.path} has weights for at most {modules} modules, and by its config a "
                f"{folder.architecture} has more"
            )

    def count_parameter(_: nn.Module, __: str, value: nn.Parameter | None) -> None:
        found["elements"] += 0 if value is None else value.numel()
        _check_elements(folder, found["elements"], allowed)

    hooks = [
        register_module_module_registration_hook(count_module),
        register_module_parameter_registration_hook(count_parameter),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_elements(folder: Folder, found: int, allowed: int) -> None:
    if found > allowed:
        raise SourceError(
            f"by its config a {folder.architecture} has {found} elements or more, and the weights in {folder.path} "
            f"explain at most {allowed}: the two do not belong together"
        )
