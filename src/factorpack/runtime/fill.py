"""Decoded tensors into a model's own, which are in memory or still on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from factorpack.decoding import decode, decode_into, rebuild, specs
from factorpack.errors import SourceError
from factorpack.kinds import KINDS
from factorpack.record import Encoded

Place = Callable[[str], torch.device]
"""By name: the device of a tensor that has none yet."""


def on_cpu(_: str) -> torch.device:
    return torch.device("cpu")


class Filler:
    """Fills a model's tensors by name; one on the meta device gets memory then, under all its names."""

    def __init__(self, model: nn.Module, place: Place) -> None:
        self._targets: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._place = place
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and tensor.is_meta:
                    self._owners.setdefault(id(tensor), []).append((module, key))
        _check_filled(model, self._targets)

    def like(self, name: str) -> Tensor:
        """An empty tensor of the type and on the device that a tensor has or will have."""
        target = self._targets[name]
        device = self._place(name) if target.is_meta else target.device
        return torch.empty(0, dtype=target.dtype, device=device)

    def fill(self, names: Iterable[str], encoded: Encoded) -> None:
        """Decodes into the tensors of these names, each once."""
        with torch.no_grad():
            for name, target in {
                id(self._targets[name]): (name, self._targets[name]) for name in names
            }.values():
                if target.is_meta:
                    self._make(name, target, encoded)
                elif target.device.type == "cpu" and target.is_contiguous():
                    decode_into(encoded, target)
                else:
                    target.copy_(decode_on(target.device, encoded))

    def _make(self, name: str, target: Tensor, encoded: Encoded) -> None:
        device = self._place(name)
        if device.type == "cpu":
            made = torch.empty(target.shape, dtype=target.dtype)
            decode_into(encoded, made)
        else:
            made = decode_on(device, encoded).to(target.dtype)
        if isinstance(target, nn.Parameter):
            made = nn.Parameter(made, target.requires_grad)
        for module, key in self._owners[id(target)]:
            held = module._parameters if key in module._parameters else module._buffers
            held[key] = made  # type: ignore[assignment]


def decode_on(device: torch.device, encoded: Encoded) -> Tensor:
    """The weight on a device: from its parts there, which are smaller, where no bit depends on the order of a sum."""
    kind = KINDS[encoded.kind]
    if device.type == "cpu" or kind.operations(encoded.shape, specs(encoded)):
        return decode(encoded).to(device)
    kind.check_indices(encoded)
    parts = {name: part.to(device) for name, part in encoded.parts.items()}
    return rebuild(replace(encoded, parts=parts)).contiguous()


def _check_filled(model: nn.Module, targets: dict[str, Tensor]) -> None:
    """Raises an error where a tensor on the meta device would stay there."""
    known = {id(each) for each in targets.values()}
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if each.is_meta and id(each) not in known:
            raise SourceError(
                f"the model's buffer {name!r} is on the meta device and in no file: give it its values first",
                tensor=name,
            )
