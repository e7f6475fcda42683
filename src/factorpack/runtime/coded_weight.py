"""A weight that is held in memory as its bytes in the file, and decoded each time it is read."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.decoding import decode_into
from factorpack.errors import FormatError
from factorpack.format.container import read_row
from factorpack.format.schema import TensorRow
from factorpack.format.untrusted_json import shown
from factorpack.record import Encoded
from factorpack.runtime.decode_ahead import AHEAD

_NUMBERS = count()
_BY_NUMBER: weakref.WeakValueDictionary[int, CodedWeight] = weakref.WeakValueDictionary()
"""What the operator decodes: a compiler's graph can hold a number, and no row of a schema."""


class CodedWeight(nn.Module):
    """To a layer, a `PackedWeight` whose codes are neither multiplied by nor looked up: it is decoded whole.

    The stream has been checked. Its bytes are a buffer, so that state dicts and copies have them.
    """

    has_product = False
    has_rows = False

    def __init__(self, row: TensorRow, stream: bytes, like: Tensor) -> None:
        super().__init__()
        self.row, self.shape = row, row.shape
        self.in_rows: dict[str, tuple[int, int]] = {}
        self.stream: Tensor
        self.register_buffer("stream", torch.frombuffer(bytearray(stream), dtype=torch.uint8).to(like.device))
        self.like: Tensor
        self.register_buffer("like", torch.empty(0, dtype=like.dtype, device=like.device), persistent=False)
        self._take_number()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._take_number()

    def _take_number(self) -> None:
        """Also for copies."""
        self.number = next(_NUMBERS)
        _BY_NUMBER[self.number] = self

    def forward(self) -> Tensor:
        """The weight as `load_into` would give it to the model."""
        if torch.compiler.is_compiling():
            found: Tensor = decode_stream(self.stream, self.number, self.like.dtype, list(self.shape))
            return found
        return self.rebuilt()

    def rebuilt(self) -> Tensor:
        encoded = AHEAD.take(self)
        weight = torch.empty(self.shape, dtype=self.like.dtype)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            decode_into(encoded, weight)
        return weight.to(self.like.device)

    def elements(self) -> int:
        return math.prod(self.shape)

    def decoder(self) -> Callable[[], Encoded]:
        """What reads the stream."""
        return partial(_read, self.row, self.stream)

    def encoded(self) -> Encoded:
        """The `Encoded` that the stream holds."""
        return self.decoder()()

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)} as {self.row.kind}: entropy-coded, {self.row.stored_bytes} bytes"


def _read(row: TensorRow, stream: Tensor) -> Encoded:
    try:
        return read_row(row, stream.cpu().numpy().tobytes())
    except FormatError as error:
        raise FormatError(f"tensor {shown(row.name)}: {error}", tensor=row.name) from error


@torch.library.custom_op("factorpack::decode_stream", mutates_args=())
def decode_stream(stream: Tensor, number: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """A coded weight's tensor as one operator, which a compiler neither looks into nor folds."""
    weight = _BY_NUMBER[number]
    assert stream.shape == weight.stream.shape
    assert (dtype, tuple(shape)) == (weight.like.dtype, weight.shape)
    return weight.rebuilt()


@decode_stream.register_fake
def _(stream: Tensor, number: int, dtype: torch.dtype, shape: list[int]) -> Tensor:  # noqa: ARG001
    return stream.new_empty(shape, dtype=dtype)
