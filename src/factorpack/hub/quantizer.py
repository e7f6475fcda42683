"""A quantization method for transformers, so that its own `from_pretrained` opens packed folders."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from functools import cache
from pathlib import Path
from typing import Any

from factorpack.calibration.model_folder import METHOD
from factorpack.errors import SourceError
from factorpack.format.container import is_packed
from factorpack.packed import load


@cache
def register() -> None:
    """Lets transformers' `from_pretrained` open packed folders in this process; imports transformers.

    `import factorpack` never calls it, to stay light; `fp.hub.from_pretrained` does.
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
            folder = tempfile.mkdtemp(prefix="factorpack-")
            # Also runs if transformers fails before postprocess_model.
            self.remove_decoded = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self.shapes = _shapes(model)
            files = settings["checkpoint_files"]
            files[:] = [_decode_file(Path(file), Path(folder)) for file in files]
            return super().preprocess_model(model, *arguments, **settings)

        def postprocess_model(self, model: Any, **settings: Any) -> Any:
            self.remove_decoded()
            # transformers accepts any shape for a quantized model, as codes and weights may differ.
            for name, shape in _shapes(model).items():
                if shape != self.shapes[name]:
                    raise SourceError(
                        f"tensor {name!r} is {shape} in the file, {self.shapes[name]} by the config"
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


def _decode_file(file: Path, folder: Path) -> str:
    if not is_packed(file):
        raise SourceError(f"{file} is not a packed file, although the config says so")
    load(file).decode_to(folder / file.name, progress=False)
    return str(folder / file.name)
