"""The operator that multiplies by packed rows of codes, and the choice of what computes it.

On a GPU, 16-bit inputs use the kernel of multiply_triton.py, except in very large batches. Everything else
uses the plain reference, a few rows of codes at a time. That includes a GPU without the kernel, with one
warning, and batches so large that unpacking costs little beside the product.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from factorpack.errors import WeightError
from factorpack.runtime.code_rows import check_rows, unpack_rows, unpack_rows_reference

MOST_INPUTS = 1024
"""Largest batch for which the kernel is used: on an H200 it is then still twice as fast as unpacking first."""
CODES_AT_A_TIME = 1 << 24
"""Codes that the reference unpacks at a time, which bounds its memory."""


def multiply_reference(inputs: Tensor, packed: Tensor, bits: int, scale: Tensor | None) -> Tensor:
    """x (q s)^T: inputs (batch, columns), rows of codes q, and scales s: one per row, one for all, or none.

    Products are in the inputs' type, but at least FP32 on a CPU, where that is no slower.
    """
    columns = inputs.shape[1]
    dtype = inputs.dtype if inputs.is_cuda else torch.promote_types(inputs.dtype, torch.float32)
    some = max(CODES_AT_A_TIME // max(columns, 1), 1)
    products = []
    for start in range(0, len(packed), some):
        codes = unpack_rows_reference(packed[start : start + some], bits, columns)
        if scale is None:
            weight = codes.to(dtype)
        else:
            own = (scale if len(scale) == 1 else scale[start : start + some]).float()
            weight = (codes * own[:, None]).to(dtype)
        products.append(inputs.to(dtype) @ weight.T)
    return torch.cat(products, 1).to(inputs.dtype)


def multiply(inputs: Tensor, packed: Tensor, bits: int, scale: Tensor | None) -> Tensor:
    """`multiply_codes`, without the operator where it is not needed: calling it takes longer than a kernel.

    Shapes are not checked: a layer has made them.
    """
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and inputs.requires_grad):
        product: Tensor = multiply_codes(inputs, packed, bits, scale)
        return product
    return _fastest(inputs, packed, bits, scale)


@torch.library.custom_op("factorpack::multiply_codes", mutates_args=())
def multiply_codes(inputs: Tensor, packed: Tensor, bits: int, scale: Tensor | None) -> Tensor:
    """`multiply_reference` by the fastest available way: (batch, columns) -> (batch, rows)."""
    check_rows(packed, bits, inputs.shape[1])
    if scale is not None and scale.shape not in ((1,), (len(packed),)):
        raise WeightError(
            f"scales of shape {tuple(scale.shape)} for {len(packed)} rows: expected one per row, or one for all"
        )
    return _fastest(inputs, packed, bits, scale)


def _fastest(inputs: Tensor, packed: Tensor, bits: int, scale: Tensor | None) -> Tensor:
    if not on_gpu(inputs) or not 0 < len(inputs) <= MOST_INPUTS:
        return multiply_reference(inputs, packed, bits, scale)
    obstacle = why_no_kernel(inputs)
    if not obstacle:
        from factorpack.runtime.multiply_triton import UNSUITED, multiply_rows  # only where there is a GPU

        try:
            with on_device(inputs):
                return multiply_rows(inputs, packed, bits, scale)
        except UNSUITED as error:
            obstacle = f"the kernel does not suit this GPU or triton ({error})"
    warn_once(f"packed layers are computed in plain torch, which is slower: {obstacle}")
    return multiply_reference(inputs, packed, bits, scale)


@multiply_codes.register_fake
def _(inputs: Tensor, packed: Tensor, bits: int, scale: Tensor | None) -> Tensor:  # noqa: ARG001
    return inputs.new_empty(len(inputs), len(packed))


def _keep_codes(
    ctx: torch.autograd.function.FunctionCtx,
    inputs: tuple[Tensor, Tensor, int, Tensor | None],
    output: Tensor,  # noqa: ARG001
) -> None:
    values, packed, ctx.bits, scale = inputs  # type: ignore[attr-defined]
    ctx.columns = values.shape[1]  # type: ignore[attr-defined]
    ctx.save_for_backward(packed, *(() if scale is None else (scale,)))


def _gradient(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
    """The gradient of the inputs alone: codes and scales are not trained here."""
    packed, *scale = ctx.saved_tensors  # type: ignore[attr-defined]
    codes = unpack_rows(packed, ctx.bits, ctx.columns)  # type: ignore[attr-defined]
    weight = codes * scale[0].float()[:, None] if scale else codes
    return grad @ weight.to(grad.dtype), None, None, None


multiply_codes.register_autograd(_gradient, setup_context=_keep_codes)


def on_gpu(inputs: Tensor) -> bool:
    """Whether a kernel may be used."""
    return inputs.is_cuda


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device; to change that takes longer than to look."""
    if not tensor.is_cuda or torch.cuda.current_device() == tensor.device.index:
        return nullcontext()
    return torch.cuda.device_of(tensor)


def why_no_kernel(inputs: Tensor) -> str:
    """Why the kernel cannot take these inputs; empty where it can."""
    if inputs.dtype not in (torch.float16, torch.bfloat16):
        return f"inputs are {inputs.dtype}, the kernel takes torch.float16 and torch.bfloat16"
    if not has_triton():
        return "the kernel needs triton, which is not installed"
    major, minor = torch.cuda.get_device_capability(inputs.device)
    if torch.version.cuda is not None and major < 8:
        return f"the kernel needs a GPU of compute capability 8.0, this one has {major}.{minor}"
    return ""


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=2)
