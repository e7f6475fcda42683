"""A model opened from its folder, packed or plain, by the class that its config names.

The class is one of transformers or diffusers and of nothing else.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import nn

from factorpack.errors import PlanError, SourceError
from factorpack.hub.folder import EXTRAS, QUANTIZATION, Folder, open_folder
from factorpack.hub.quantizer import register
from factorpack.packed import Packed, load
from factorpack.runtime.apply import Mode
from factorpack.source import open_source

_BASES = {"transformers": "PreTrainedModel", "diffusers": "ModelMixin"}


def from_pretrained(
    folder: str | Path, mode: Mode = "dense", example: Any = None, slack: float = 0.0
) -> nn.Module:
    """The ready model of a packed folder, in evaluation mode; a folder of plain weights opens too.

    The class is the one that `config.json` names, of transformers or of diffusers (a component: a unet, a
    vae) and of nothing else: code in the folder never runs. `mode`, `example` and `slack` are those of
    `packed.apply`; any but "dense" wants the names that the model itself gives its tensors, as a folder
    made from a model has.

    >>> model = fp.hub.from_pretrained("small-llama")  # doctest: +SKIP
    """
    opened = open_folder(folder)
    file = opened.packed_file
    if file is None and mode != "dense":
        raise PlanError(f"mode {mode!r} is for packed folders, and {folder} is none: 'dense' opens it")
    model = _opened(opened)
    if file is not None and mode != "dense":
        packed = load(file)
        ties = {alias: name for alias, name in open_source(model).aliases.items() if alias not in packed}
        return Packed(packed, packed.aliases | ties).apply(model, mode, example, slack).model
    return model


def model_class(folder: Folder) -> Any:
    """The class that a folder's weights are for."""
    library, name = _imported(folder.library), folder.architecture
    found = getattr(library, name, None)
    if not isinstance(found, type) or not issubclass(found, getattr(library, _BASES[folder.library])):
        raise SourceError(
            f"{folder.library} {library.__version__} has no model {name!r}, and factorpack never runs code "
            f"from a folder: build the model yourself and use fp.load(file).load_into(model)"
        )
    return found


def tokenizer_of(folder: Folder) -> Any:
    try:
        return _imported("transformers").AutoTokenizer.from_pretrained(
            folder.path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as error:
        raise SourceError(f"{folder.path} has no tokenizer that opens: {error}") from error


def _opened(folder: Folder) -> nn.Module:
    """Filled by the class itself, which knows old names and ties; nothing may be left to chance."""
    made, file = model_class(folder), folder.packed_file
    asked: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    try:
        if folder.library == "diffusers" and file is not None:
            model = made.from_config({k: v for k, v in folder.config.items() if k != QUANTIZATION})
            return load(file).load_into(model).eval()
        if folder.library == "transformers":
            register()
            asked["trust_remote_code"] = False
        model, told = made.from_pretrained(folder.path, **asked)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise SourceError(f"{folder.path} does not open as a {folder.architecture}: {error}") from error
    wrong = sorted(map(str, [*told["missing_keys"], *told["mismatched_keys"]]))
    if wrong:
        raise SourceError(
            f"{folder.path} lacks {len(wrong)} tensors of a {folder.architecture}, the first is {wrong[0]}"
        )
    opened: nn.Module = model
    return opened


def _imported(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise SourceError(
            f"opening this folder's model needs {library}: pip install 'factorpack[{EXTRAS[library]}]'"
        ) from error
