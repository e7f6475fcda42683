"""Opens a model folder, packed or plain, with the class that its config names.

The class must come from transformers or diffusers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from factorpack.calibration.model_folder import QUANTIZATION, Folder, import_library, model_class, open_folder
from factorpack.errors import PlanError, SourceError
from factorpack.hub.quantizer import register
from factorpack.packed import Packed, load
from factorpack.runtime.apply import Mode
from factorpack.source import open_source


def from_pretrained(
    folder: str | Path, mode: Mode = "dense", example: Any = None, slack: float = 0.0
) -> nn.Module:
    """Opens a packed folder as a model in evaluation mode; a folder of plain weights opens too.

    The class is the one that `config.json` names. It must come from transformers or diffusers (a component:
    a unet, a vae): code in the folder never runs. `mode`, `example` and `slack` are those of `packed.apply`;
    any mode but "dense" needs the tensor names of the model itself, as in a folder made from a model.

    >>> model = fp.hub.from_pretrained("small-llama")  # doctest: +SKIP
    """
    opened = open_folder(folder)
    file = opened.packed_file
    if file is None and mode != "dense":
        raise PlanError(f"mode {mode!r} needs a packed folder, and {folder} is not one: use mode 'dense'")
    model = _open_model(opened)
    if file is not None and mode != "dense":
        packed = load(file)
        ties = {alias: name for alias, name in open_source(model).aliases.items() if alias not in packed}
        return Packed(packed, packed.aliases | ties).apply(model, mode, example, slack).model
    return model


def tokenizer_of(folder: Folder) -> Any:
    try:
        return import_library("transformers").AutoTokenizer.from_pretrained(
            folder.path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as error:
        raise SourceError(f"{folder.path} has no tokenizer that can be opened: {error}") from error


def _open_model(folder: Folder) -> nn.Module:
    """Loads weights with the class itself, which knows old names and ties; no tensor may stay uninitialised."""
    factory, file = model_class(folder), folder.packed_file
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    try:
        if folder.library == "diffusers" and file is not None:
            model = factory.from_config({k: v for k, v in folder.config.items() if k != QUANTIZATION})
            return load(file).load_into(model).eval()
        if folder.library == "transformers":
            register()
            options["trust_remote_code"] = False
        model, loading = factory.from_pretrained(folder.path, **options)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise SourceError(f"{folder.path} does not open as a {folder.architecture}: {error}") from error
    absent = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
    if absent:
        raise SourceError(
            f"{folder.path} lacks {len(absent)} tensors of a {folder.architecture}, the first is {absent[0]}"
        )
    opened: nn.Module = model
    return opened
