"""What triton's interpreter lacks of the language: ranges up to a number that is an argument, and BF16."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest


def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = importlib.import_module("triton.runtime.interpreter")
    bfloat16 = importlib.import_module("triton.language").bfloat16
    builder, patch = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor
    subtract, convert, multiply = builder.create_fsub, builder.create_si_to_fp, builder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)  # its scalars are arrays of one number, which numpy takes for no index
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def is_bfloat16(type_: Any) -> bool:
        return bool(type_.scalar == bfloat16)

    def wide(handle: Any) -> np.ndarray:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def narrow(numbers: np.ndarray) -> Any:
        bits = numbers.astype(np.float32).view(np.uint32)
        assert not (bits & 0xFFFF).any(), "a kernel's BF16 arithmetic is exact"
        return interpreter.TensorHandle((bits >> 16).astype(np.uint16), bfloat16)

    def get_bf16(self: Any, value: float) -> Any:  # noqa: ARG001
        return narrow(np.array([value]))

    def create_fsub(self: Any, left: Any, right: Any) -> Any:
        if is_bfloat16(left.dtype):
            return narrow(wide(left) - wide(right))
        return subtract(self, left, right)

    def create_si_to_fp(self: Any, source: Any, type_: Any) -> Any:
        return narrow(source.data) if is_bfloat16(type_) else convert(self, source, type_)

    def create_dot(self: Any, left: Any, right: Any, total: Any, *rest: Any) -> Any:
        if is_bfloat16(left.dtype):
            return interpreter.TensorHandle(wide(left) @ wide(right) + total.data, total.dtype.scalar)
        return multiply(self, left, right, total, *rest)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(builder, "get_bf16", get_bf16, raising=False)
    monkeypatch.setattr(builder, "create_fsub", create_fsub)
    monkeypatch.setattr(builder, "create_si_to_fp", create_si_to_fp)
    monkeypatch.setattr(builder, "create_dot", create_dot)
