"""Writes packed folders: config, packed file, tokenizer and a model card, all or nothing."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from factorpack.calibration.model_folder import (
    CARD,
    CONFIG,
    METHOD,
    PACKED_FILE,
    QUANTIZATION,
    Folder,
    open_folder,
)
from factorpack.errors import SourceError
from factorpack.format.atomic import atomic_folder
from factorpack.format.packed_file import write_packed
from factorpack.hub.card import card
from factorpack.packed import Packed, load
from factorpack.record import dtype_name
from factorpack.version import __version__


def save_pretrained(packed: Packed, folder: str | Path, like: Any) -> Packed:
    """Writes a packed model as a folder that `from_pretrained` opens, with its tokenizer and settings.

    `like` is where the weights came from: the Hugging Face folder, or the transformers or diffusers model
    itself (save its tokenizer into the folder with the tokenizer's own `save_pretrained`).

    >>> fp.hub.save_pretrained(packed, "small-llama", like="llama")  # doctest: +SKIP
    """
    if isinstance(like, str | Path):
        return write_folder(folder, open_folder(like), _writer(packed))
    return write_folder(folder, Folder(Path(), _config_of(like), has_files=False), _writer(packed))


def _config_of(model: Any) -> dict[str, Any]:
    """In transformers the config makes its JSON, in diffusers the model does."""
    maker: Any = model if hasattr(model, "save_config") else getattr(model, "config", None)
    if not hasattr(maker, "to_json_string"):
        raise SourceError(
            f"like is a {type(model).__name__}, expected a folder or a model of transformers or diffusers"
        )
    config: dict[str, Any] = json.loads(maker.to_json_string())
    if maker is not model:
        config["architectures"] = config.get("architectures") or [type(model).__name__]
    return config


def write_folder(target: str | Path, like: Folder, write: Callable[[Path], object]) -> Packed:
    """Writes a packed folder: the packed file by calling `write`, everything else copied from `like`."""
    target = Path(target)
    _ = like.architecture  # raises before any work if there is none
    with atomic_folder(target) as made:
        write(made / PACKED_FILE)
        for name in like.side_files():
            (made / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(like.path / name, made / name)
        quantization = {"quant_method": METHOD, "version": __version__, "file": PACKED_FILE}
        packed = load(made / PACKED_FILE)
        config = _with_dtype(like.config, packed) if like.library == "transformers" else like.config
        config = config | {QUANTIZATION: quantization}
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (made / CARD).write_text(card(target.name, like, packed.size()), encoding="utf-8")
    return load(target / PACKED_FILE)


def _with_dtype(config: dict[str, Any], packed: Packed) -> dict[str, Any]:
    """The config with the weights' dtype, which transformers would otherwise infer from the packed bytes."""
    if config.get("dtype") or config.get("torch_dtype"):
        return config
    sizes: Counter[str] = Counter()
    for dtype, shape in packed.shapes().values():
        if dtype.is_floating_point:
            sizes[dtype_name(dtype)] += math.prod(shape)
    return {**config, "dtype": sizes.most_common(1)[0][0]} if sizes else config


def _writer(packed: Packed) -> Callable[[Path], None]:
    return lambda path: write_packed(path, packed.items(), packed.aliases)
