"""Packed folders: config, packed file, what goes along, and a card; whole or not there at all."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from factorpack.errors import SourceError
from factorpack.format.atomic import atomic_folder
from factorpack.format.packed_file import write_packed
from factorpack.hub.card import card
from factorpack.hub.folder import CARD, CONFIG, METHOD, PACKED_FILE, QUANTIZATION, Folder, open_folder
from factorpack.packed import Packed, load
from factorpack.record import dtype_name
from factorpack.version import __version__


def save_pretrained(packed: Packed, folder: str | Path, like: Any) -> Packed:
    """Writes a packed model as a folder that `from_pretrained` opens; its tokenizer and settings go along.

    `like` says whose weights they are: the Hugging Face folder they came from, or the model itself, of
    transformers or of diffusers (a tokenizer is then saved into the folder by its own `save_pretrained`).

    >>> fp.hub.save_pretrained(packed, "small-llama", like="llama")  # doctest: +SKIP
    """
    if isinstance(like, str | Path):
        return write_folder(folder, open_folder(like), _writes(packed))
    with tempfile.TemporaryDirectory() as plain:
        _save_config(like, plain)
        return write_folder(folder, open_folder(plain), _writes(packed))


def _save_config(model: Any, folder: str) -> None:
    """A config of transformers saves itself; of diffusers it is the model that does."""
    if hasattr(model, "config") and hasattr(model.config, "save_pretrained"):
        model.config.architectures = model.config.architectures or [type(model).__name__]
        model.config.save_pretrained(folder)
    elif hasattr(model, "save_config"):
        model.save_config(folder)
    else:
        raise SourceError(
            f"a packed folder is like a {type(model).__name__}, expected a folder or a model of transformers "
            "or diffusers"
        )


def write_folder(target: str | Path, like: Folder, write: Callable[[Path], object]) -> Packed:
    """A packed folder with the file that `write` puts where it is told, and all else of `like`."""
    target = Path(target)
    _ = like.architecture  # one that has none is refused before any work
    with atomic_folder(target) as made:
        write(made / PACKED_FILE)
        for carried in like.carried():
            (made / carried).parent.mkdir(exist_ok=True)
            shutil.copyfile(like.path / carried, made / carried)
        stated = {"quant_method": METHOD, "version": __version__, "file": PACKED_FILE}
        packed = load(made / PACKED_FILE)
        typed = _typed(like.config, packed) if like.library == "transformers" else like.config
        config = typed | {QUANTIZATION: stated}
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        (made / CARD).write_text(card(target.name, like, packed.size()))
    return load(target / PACKED_FILE)


def _typed(config: dict[str, Any], packed: Packed) -> dict[str, Any]:
    """The config with the weights' type, which transformers would else read off the packed file's bytes."""
    if config.get("dtype") or config.get("torch_dtype"):
        return config
    sizes: Counter[str] = Counter()
    for dtype, shape in packed.shapes().values():
        if dtype.is_floating_point:
            sizes[dtype_name(dtype)] += math.prod(shape)
    return {**config, "dtype": sizes.most_common(1)[0][0]} if sizes else config


def _writes(packed: Packed) -> Callable[[Path], None]:
    return lambda path: write_packed(path, packed.items(), packed.aliases)
