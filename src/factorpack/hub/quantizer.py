"""A quantization method for transformers, so that its own `from_pretrained` opens packed folders."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from factorpack.calibration.model_folder import METHOD
from factorpack.calibration.untrusted_folder import check_shapes
from factorpack.errors import SourceError
from factorpack.format.container import is_packed
from factorpack.format.locks import is_same_file, lock
from factorpack.packed import Packed, load

PREFIX = "factorpack-decoded-"
"""How the names of temporary folders begin."""


@cache
def register() -> None:
    """Lets transformers' `from_pretrained` open packed folders in this process; imports transformers.

    `import factorpack` never calls it, to stay light, and `fp.hub.from_pretrained` does without.
    """
    try:
        from transformers.quantizers.auto import register_quantization_config, register_quantizer
        from transformers.quantizers.base import HfQuantizer
        from transformers.utils.quantization_config import QuantizationConfigMixin
    except ImportError as error:
        raise SourceError("packed folders need a newer transformers: pip install 'factorpack[hf]'") from error

    @register_quantization_config(METHOD)
    class FactorpackConfig(QuantizationConfigMixin):  # type: ignore[misc, unused-ignore]
        """The entry in `config.json`; the loaded model is an ordinary dense one."""

        dequantize = True

        def __init__(self, file: str = "", version: str = "", **_: Any) -> None:
            self.quant_method = METHOD
            self.file, self.version = file, version

    @register_quantizer(METHOD)
    class FactorpackQuantizer(HfQuantizer):  # type: ignore[misc, unused-ignore]
        """Decodes the packed file, tensor by tensor, into a plain one that transformers reads like any other."""

        requires_calibration = True

        def update_attn_implementation(self, config: Any) -> Any:
            """Names the packed file: no other hook sees the config before transformers looks for files.

            With the name in `config.json`, a transformers without factorpack would open the file, find none
            of its tensors, and initialise the model at random.
            """
            config.transformers_weights = self.quantization_config.file
            return super().update_attn_implementation(config)

        def preprocess_model(self, model: Any, *arguments: Any, **settings: Any) -> Any:
            self.shapes = _shapes(model)
            files = settings["checkpoint_files"]
            packed = [_open_file(Path(file), self.shapes) for file in files]
            folder, handle = _make_folder()
            # Also runs if transformers fails before postprocess_model.
            self.remove_decoded = weakref.finalize(self, _remove_folder, folder, handle)
            for index, each in enumerate(packed):
                files[index] = str(folder / Path(files[index]).name)
                each.decode_to(files[index], progress=False)
            return super().preprocess_model(model, *arguments, **settings)

        def postprocess_model(self, model: Any, **settings: Any) -> Any:
            self.remove_decoded()
            # transformers accepts any shape for a quantized model, as codes and weights may differ.
            for name, shape in _shapes(model).items():
                if shape != self.shapes[name]:
                    raise SourceError(
                        f"tensor {name!r} is {shape} in the file, {self.shapes[name]} by its config"
                    )
            if hasattr(model.config, "transformers_weights"):
                del model.config.transformers_weights
            return super().postprocess_model(model, **settings)

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _open_file(file: Path, shapes: dict[str, tuple[int, ...]]) -> Packed:
    if not is_packed(file):
        raise SourceError(f"{file} is not a packed file, although the config says so")
    packed = load(file)
    check_shapes(shapes, packed.shapes())
    return packed


def _make_folder() -> tuple[Path, int | None]:
    """A temporary folder, and the handle whose lock marks it as in use; None where folders have no locks.

    One that no process holds is left from a killed process, and removed here.
    """
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return Path(tempfile.mkdtemp(prefix=PREFIX)), None
    for each in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # gone already, no folder, or another user's
            handle = os.open(each, os.O_DIRECTORY | os.O_NOFOLLOW)
            _remove_folder(each, handle) if lock(handle) and _is_ours(each) else os.close(handle)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        handle = os.open(folder, os.O_DIRECTORY)
        if lock(handle) is not False and is_same_file(handle, folder):
            return folder, handle
        os.close(handle)  # another process has just taken it for one that was left


def _is_ours(folder: Path) -> bool:
    """Whether nothing but decoded files is in a folder: someone may have named theirs like ours."""
    return all(each.suffix == ".safetensors" and each.is_file() for each in folder.iterdir())


def _remove_folder(folder: Path, handle: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if handle is not None:
        os.close(handle)
