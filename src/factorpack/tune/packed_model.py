"""A model whose compressed weights are rebuilt from their packed form in every forward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from factorpack.budget.norm_bits import is_norm, round_as
from factorpack.errors import SourceError
from factorpack.kinds import KINDS
from factorpack.kinds.base import cast_clamped
from factorpack.methods import Keep
from factorpack.packed import Packed
from factorpack.quantize.straight_through import straight_through
from factorpack.quantize.uniform import root_mean_square
from factorpack.record import Encoded
from factorpack.tune.trainable import TRAINABLE, Trainable
from factorpack.weight import Weight


class PackedModel(nn.Module):
    """The user's model, unmodified, called with weights decoded from its packed form.

    Parameters that the packed form replaces are frozen, and so are tensors of a kind that cannot be trained,
    such as constants: they are stored unchanged. All others (norms, biases, kept layers) are trained.
    `frozen` keeps the codes too, and trains their scales.
    """

    def __init__(self, packed: Packed, model: nn.Module, frozen: bool = False) -> None:
        super().__init__()
        packed.load_into(model)
        self.model = model
        self.names = [name for name, encoded in packed.items() if encoded.kind in TRAINABLE]
        parameters = dict(model.named_parameters(remove_duplicate=False))
        unknown = sorted(set(self.names) - set(parameters))
        if unknown:
            raise SourceError(f"the packed tensors {unknown[:3]} are not parameters of the model")
        self.weights = nn.ModuleList(
            TRAINABLE[packed[name].kind](packed[name], frozen) for name in self.names
        )
        self.dtypes = [(packed[name].dtype, parameters[name].dtype) for name in self.names]
        fixed = [name for name, encoded in packed.items() if not KINDS[encoded.kind].is_raw]
        for name in fixed:
            if name in parameters:
                parameters[name].requires_grad_(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = next(self.parameters()).device.type
        # Decoding a file multiplies in FP32, so training must too, even with mixed precision.
        with torch.autocast(device, enabled=False):
            weights: dict[str, Tensor] = {
                name: _as_loaded(weight(), *dtypes)
                for name, weight, dtypes in zip(self.names, self.weights, self.dtypes, strict=True)
            }
        return torch.func.functional_call(self.model, weights, args, kwargs)

    def relative_units(self) -> list[tuple[nn.Parameter, float]]:
        """What is trained, and how much of each a learning rate of 1 is: the RMS of tensors in units of their own."""
        own = ("growth", "shares", "numbers")
        named = [(name, each) for name, each in self.named_parameters() if each.requires_grad]
        return [
            (each, 1.0 if name.endswith(own) else root_mean_square(each.detach()) or 1.0)
            for name, each in named
        ]

    def coded_weights(self) -> int:
        """Number of weights that are coded."""
        return sum(cast(Trainable, weight).like.numel for weight in self.weights)

    def encoded(self, packed: Packed) -> dict[str, Encoded]:
        """Every tensor of `packed` with its trained values."""
        current = self.model.state_dict()
        trained = {
            name: cast(Trainable, weight).encoded()
            for name, weight in zip(self.names, self.weights, strict=True)
        }
        for name, encoded in packed.items():
            if name in trained:
                continue
            if KINDS[encoded.kind].is_raw:
                stored = encoded.parts["values"]
                method = Keep(stored.dtype if stored.is_floating_point() else None)
                (kept,) = method.encode(Weight(current[name].detach().cpu())).parts.values()
                if is_norm(name, encoded.shape):  # with more bits the file would be larger
                    kept = round_as(kept, stored)
                trained[name] = replace(encoded, parts={"values": kept})
            else:
                trained[name] = encoded
        return {name: trained[name] for name in packed}


def _as_loaded(weight: Tensor, decoded: torch.dtype, loaded: torch.dtype) -> Tensor:
    """A weight as `load_into` would load it: rounded to the decoded dtype, then in the model's."""
    if decoded.itemsize < 4:
        weight = straight_through(weight, cast_clamped(weight, decoded).to(weight.dtype))
    return weight.to(loaded)
