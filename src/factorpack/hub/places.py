"""Where the modules of a model go: a device, or devices by the beginnings of their names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from factorpack.errors import PlanError

Device = str | int | torch.device
DeviceMap = Device | Mapping[str, Device]
AUTO = ("auto", "balanced", "sequential")
"""What transformers calls a map that it chooses. Packed weights take one GPU."""


class Places:
    """A device map, as transformers takes it."""

    def __init__(self, device_map: DeviceMap | None) -> None:
        if device_map is None:
            device_map = "cpu"
        if device_map in AUTO:
            device_map = "cuda" if torch.cuda.is_available() else "cpu"
        by_name = device_map if isinstance(device_map, Mapping) else {"": device_map}
        self._devices = {name: _device(device) for name, device in by_name.items()}

    def of(self, name: str) -> torch.device:
        """The device of a tensor or module: that of the longest beginning of its name."""
        parts = name.split(".")
        for count in range(len(parts), -1, -1):
            found = self._devices.get(".".join(parts[:count]))
            if found is not None:
                return found
        raise PlanError(f"the device map has no device for {name!r}, it has {', '.join(self._devices)}")

    def settle(self, model: nn.Module) -> nn.Module:
        """Moves what is elsewhere; over several devices, modules then move their inputs to their own."""
        devices = set(self._devices.values())
        if len(devices) == 1:
            return model.to(devices.pop())
        from accelerate import dispatch_model

        moved: dict[torch.Tensor, torch.Tensor] = {}  # tied tensors stay tied
        for prefix, module in model.named_modules():
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is not None:
                        place = self.of(f"{prefix}.{key}" if prefix else key)
                        held[key] = moved.setdefault(tensor, _moved(tensor, place))
        dispatch_model(model, {name: str(device) for name, device in self._devices.items()})
        return model


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    there = tensor.detach().to(device)
    return nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there


def _device(device: Device) -> torch.device:
    if device in ("disk", "meta"):
        raise PlanError(f"the device map has {device!r}: packed weights are on a CPU or a GPU")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
