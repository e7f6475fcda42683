"""NNCodec, the reference software of ISO/IEC 15938-17, run by its own package: its bitstream is what is measured."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from factorpack.budget.norms import small_leftovers
from factorpack.comparison.ladders import Ladders
from factorpack.decoding import decode
from factorpack.errors import PlanError
from factorpack.methods import Keep
from factorpack.planning.rules import not_a_weight
from factorpack.source import open_source

FINER = 2
"""A qp is a quarter of an octave, and neighbouring files differ by 7 %. A size is met in quarters of a qp."""
QPS = tuple(-step / 2**FINER for step in range(60 * 2**FINER + 1))
"""Tried for a size, from the smallest file to the largest."""
VECTOR_QP = -40
"""For folded norms and biases. The package's -75 is for variances, which may be tiny."""


class NNCodec:
    """A model's tensors as NNCodec gets them, its bitstreams of them, and what they decode to.

    Dependent quantization is on. Unless `tuned` is False, all else is as it gave the least divergence on
    training images at the same bytes, without data: steps by the size of a layer (`opt_qp`); norms folded to
    a factor and a shift, which is its own `bnf`, done here because its decoder cannot undo it; and vectors at
    a coarser step. Otherwise its own defaults hold. Its other settings gained nothing.
    """

    title: ClassVar[str] = "NNCodec"
    suffix: ClassVar[str] = ".nnc"

    def __init__(self, model: nn.Module, tuned: bool = True) -> None:
        source = open_source(model)
        state = {name: entry.load().cpu() for name, entry in source.entries.items()}
        given = {name for name in state if not name.endswith("num_batches_tracked")}  # as the package does
        if tuned:
            vectors = [name for name, entry in source.entries.items() if not_a_weight(entry)]
            small = small_leftovers({name: Keep().encode(source.weight(name)) for name in vectors}, model)
            state |= {name: decode(encoded) for name, encoded in small.items()}
            given -= {name for name, encoded in small.items() if encoded.kind == "constant"}
        self._state, self._given, self._aliases, self._tuned = state, given, source.aliases, tuned
        # There is one ladder, so nothing has to be compared by its error.
        self.sizes = Ladders([QPS], lambda qp: (len(self.encode(qp)), 0.0))

    @staticmethod
    def version() -> str:
        """The installed version; raises PlanError where there is none."""
        try:
            return version("nncodec")
        except PackageNotFoundError as error:
            raise PlanError("NNCodec is not installed: pip install 'factorpack[nncodec]'") from error

    def encode(self, qp: float) -> bytes:
        finer = FINER if self._tuned else 0
        return bytes(
            _call(
                "compress",
                _arrays(self._state, self._given),
                bitstream_path=None,
                return_bitstream=True,
                qp=round(qp * 2**finer),
                qp_density=2 + finer,
                nonweight_qp=(VECTOR_QP if self._tuned else -75) * 2**finer,
                opt_qp=self._tuned,
                use_dq=True,
                row_skipping=True,
            )
        )

    def decode(self, stream: bytes) -> dict[str, Tensor]:
        """The model's state dict."""
        decoded = _call("decompress", bytearray(stream))
        state = {
            name: torch.from_numpy(np.asarray(decoded[name])).reshape(value.shape).to(value.dtype)
            if name in self._given
            else value
            for name, value in self._state.items()
        }
        return state | {alias: state[name] for alias, name in self._aliases.items()}


def _arrays(state: dict[str, Tensor], names: Iterable[str]) -> dict[str, Any]:
    """The only types it takes: FP32 and int32, in the order of the state dict."""
    chosen = set(names)
    return {
        name: value.float().numpy() if value.is_floating_point() else value.int().numpy()
        for name, value in state.items()
        if name in chosen
    }


def _call(function: str, *arguments: Any, **settings: Any) -> Any:
    """Calls the package. It prints what it does, and ends the program where it cannot do it."""
    try:
        with redirect_stdout(io.StringIO()):
            return getattr(importlib.import_module("nncodec.nnc"), function)(*arguments, **settings)
    except ImportError as error:
        raise PlanError(f"NNCodec is installed, but cannot be imported: {error}") from error
    except SystemExit as error:
        raise PlanError(f"NNCodec cannot {function} this model: {str(error)[:200]}") from error
