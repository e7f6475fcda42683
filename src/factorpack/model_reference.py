"""What `--model` names: `module:callable`, or a model of timm or torchvision by its own name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from factorpack.errors import SourceError


@dataclass(frozen=True, slots=True)
class _Collection:
    """A package of models, and its function that makes one by name, without trained weights."""

    module: str
    function: str
    settings: Mapping[str, Any] = field(default_factory=dict)


_COLLECTIONS = {
    "timm": _Collection("timm", "create_model", {"pretrained": False}),
    "torchvision": _Collection("torchvision.models", "get_model", {"weights": None}),
}


def import_model(reference: str) -> nn.Module:
    """The model that `module:callable` builds; this runs its code.

    `timm:resnet18` and `torchvision:resnet18` are what these packages make under that name.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise SourceError(
            f"{reference!r} does not name a model, expected module:callable, timm:NAME or torchvision:NAME"
        )
    try:
        with _working_folder_last():
            model = _build(module_name, name)
    except (ImportError, AttributeError) as error:
        raise SourceError(f"there is no {reference!r}: {_reason(module_name, error)}") from error
    except Exception as error:  # the caller's own code may raise anything
        raise SourceError(f"{reference!r} fails to build a model: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise SourceError(f"{reference!r} returns a {type(model).__name__}, expected a torch module")
    return model


def _build(module_name: str, name: str) -> object:
    found: Any = importlib.import_module(module_name)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        if module_name not in _COLLECTIONS:
            raise
        return _build_by_name(_COLLECTIONS[module_name], name)
    return found() if callable(found) and not isinstance(found, nn.Module) else found


def _build_by_name(collection: _Collection, name: str) -> object:
    make = getattr(importlib.import_module(collection.module), collection.function)
    return make(name, **collection.settings)


def _reason(module_name: str, error: Exception) -> str:
    package = module_name.partition(".")[0]
    if package in _COLLECTIONS and isinstance(error, ModuleNotFoundError) and error.name == package:
        return f"{package} is not installed: pip install {package}"
    return str(error)


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
