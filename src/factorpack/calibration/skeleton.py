"""A folder's model without its weights: parameters on the meta device, and buffers with their values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from factorpack.calibration.model_folder import Folder
from factorpack.calibration.untrusted_folder import Shapes, builder
from factorpack.record import DTYPES


def build_skeleton(folder: Folder, shapes: Shapes, dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a folder whose stored tensors have these shapes, in `dtype` or in its own."""
    with _default_dtype(dtype or _dtype(folder, shapes)), _parameters_on_meta():
        return builder(folder)().eval()


def _dtype(folder: Folder, shapes: Shapes) -> torch.dtype:
    """The type that the config names, or that most of the weights have."""
    named = folder.config.get("dtype") or folder.config.get("torch_dtype")
    if isinstance(named, str) and named in DTYPES:
        return DTYPES[named]
    sizes: Counter[torch.dtype] = Counter()
    for dtype, shape in shapes.values():
        if dtype.is_floating_point:
            sizes[dtype] += math.prod(shape)
    return sizes.most_common(1)[0][0] if sizes else torch.float32


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """New parameters go to the meta device, one by one; buffers keep the values that models compute for them."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            self._parameters[name] = nn.Parameter(param.to("meta"), param.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
