"""A model folder: its config, the class it names, files copied along with the weights, and perhaps a packed file."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factorpack.errors import SourceError
from factorpack.source import check_inside, is_file_name, read_config

CONFIG, PACKED_FILE, CARD = "config.json", "model.packed.safetensors", "README.md"
QUANTIZATION, METHOD = "quantization_config", "factorpack"
"""The config entry of a packed folder, and its `quant_method`."""
EXTRAS = {"transformers": "hf", "diffusers": "diffusers"}
"""The library of a folder's class, and the extra that installs it."""
_BASES = {"transformers": "PreTrainedModel", "diffusers": "ModelMixin"}
"""The class of each library that its models come from."""
_SIDE_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe", ".spm")
"""Endings of files copied along: tokenizers, generation and pooling settings, chat templates. Never code."""
_WEIGHTS = (
    ".index.json",
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
)


@dataclass(frozen=True, slots=True)
class Folder:
    """A model folder with its config."""

    path: Path
    config: dict[str, Any]
    has_files: bool = True
    """False for the config of a model in memory."""

    @property
    def packed_file(self) -> Path | None:
        """The packed file that the config names; None in a folder of plain weights."""
        quantization = self.config.get(QUANTIZATION)
        if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
            return None
        name = quantization.get("file")
        if not isinstance(name, str) or not is_file_name(name) or not (self.path / name).is_file():
            raise SourceError(f"{self.path / CONFIG} names the packed file {name!r}, expected one beside it")
        check_inside(self.path, self.path / name)
        return self.path / name

    @property
    def library(self) -> str:
        """The library of the model's class: only the config of a diffusers component has a `_class_name`."""
        return "diffusers" if "_class_name" in self.config else "transformers"

    @property
    def architecture(self) -> str:
        """The name of the model's class in the config."""
        config = self.config
        named = [config["_class_name"]] if self.library == "diffusers" else config.get("architectures")
        if not isinstance(named, list) or not named or not isinstance(named[0], str):
            raise SourceError(
                f"{self.path / CONFIG} has the architectures {named!r}, expected a list with a class of "
                "transformers, as ['LlamaForCausalLM'], or a _class_name of diffusers, as 'UNet2DModel'"
            )
        return named[0]

    def side_files(self) -> list[Path]:
        """Files to copy along with the weights, from the folder and its subfolders, as relative paths."""
        if not self.has_files:
            return []
        found = [
            each
            for each in sorted((*self.path.glob("*"), *self.path.glob("*/*")))
            if each.is_file()
            and each.name.endswith(_SIDE_FILES)
            and not each.name.endswith(_WEIGHTS)
            and not any(part.startswith(".") for part in each.relative_to(self.path).parts)
            and each.relative_to(self.path) != Path(CONFIG)
        ]
        for each in found:
            check_inside(self.path, each)
        return [each.relative_to(self.path) for each in found]


def is_model_folder(path: Path) -> bool:
    return (path / CONFIG).is_file()


def open_folder(path: str | Path) -> Folder:
    """Opens a model folder; only its config is read."""
    path = Path(path)
    file = path / CONFIG
    if not file.is_file():
        raise SourceError(f"{path} is not a model folder: it has no {CONFIG}")
    return Folder(path, read_config(file))


def model_class(folder: Folder) -> Any:
    """The model class that a folder's config names."""
    library, name = import_library(folder.library), folder.architecture
    found = getattr(library, name, None)
    if not isinstance(found, type) or not issubclass(found, getattr(library, _BASES[folder.library])):
        raise SourceError(
            f"{folder.library} {library.__version__} has no model {name!r}, and factorpack never runs code "
            f"from a folder: build the model yourself and use fp.load(file).load_into(model)"
        )
    return found


def import_library(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise SourceError(
            f"opening this folder's model needs {library}: pip install 'factorpack[{EXTRAS[library]}]'"
        ) from error
