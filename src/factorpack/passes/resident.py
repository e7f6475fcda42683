"""A network whose weights are on the device only while modules use them: read when one runs, dropped for others.

All its weights are on the meta device otherwise. Vectors (biases, norms) and buffers stay, because they are
small, and because outputs are corrected in them.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.decoding import decode
from factorpack.record import Encoded

LIMIT_BYTES = 2 << 30
"""Weights of one network on the device: a few blocks of a model of 8 billion, so that each is read once."""

_RESIDENT = "_factorpack_resident"
"""The attribute of a network that says what reads its weights."""

Loads = Mapping[str, Callable[[], Tensor]]
"""A network's tensors by name, each read when it is called."""


class Resident:
    """Reads the weights of a network when its modules run, and keeps the last used ones up to a limit."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        loads: Loads,
        device: torch.device,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        """`build` makes the network, parameters on the meta device; tied ones are one parameter there."""
        self._build, self._loads, self._device, self.limit_bytes = build, loads, device, limit_bytes
        self.network = build()
        self._absent: dict[str, nn.Parameter] = {}
        """Weights as they are on the meta device."""
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        """Weights -> the modules that have them, and their names there."""
        self._replaced: dict[str, Encoded] = {}
        self._held: OrderedDict[str, None] = OrderedDict()
        """Weights on the device, the last used at the end."""
        self._in_use: Counter[str] = Counter()
        self.held_bytes, self.most_held_bytes = 0, 0
        self.network.__dict__[_RESIDENT] = self
        with torch.inference_mode(False), torch.no_grad():
            self._attach()

    def twin(self) -> Resident:
        """Another network over the same tensors, nothing replaced in it."""
        return Resident(self._build, self._loads, self._device, self.limit_bytes)

    def put(self, name: str, encoded: Encoded) -> None:
        """Replaces a weight: from now on it is decoded where it was read."""
        self._replaced[name] = encoded
        if name in self._held:
            self._drop(name)

    def release(self) -> None:
        """Takes all weights from the device."""
        for name in list(self._held):
            self._drop(name)

    def hold_blocks(self, blocks: Sequence[str]) -> None:
        """Raises the limit, if need be, to the largest of some modules and all weights outside of them."""
        modules = [self.network.get_submodule(name) for name in blocks]
        self.limit_bytes = max(self.limit_bytes, bytes_at_once(self.network, modules))

    @contextmanager
    def using(self, names: Sequence[str]) -> Iterator[None]:
        """Some weights on the device; inside the block they are not dropped for others."""
        self._in_use.update(names)
        try:
            self.load(names)
            yield
        finally:
            self._in_use.subtract(names)

    def load(self, names: Sequence[str]) -> None:
        """Puts weights on the device, and drops those not used for the longest time if there are too many."""
        for name in names:
            if name not in self._held:
                self._make_room(self._absent[name].nbytes)
                self._set(name, nn.Parameter(self._read(name), requires_grad=False))
                self.held_bytes += self._absent[name].nbytes
                self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
            self._held[name] = None
            self._held.move_to_end(name)

    def _attach(self) -> None:
        """Finds out where weights are used, and reads everything else."""
        names: dict[int, str] = {}
        for name, parameter in self.network.named_parameters(remove_duplicate=False):
            if id(parameter) not in names or name in self._loads:
                names[id(parameter)] = name
        for module in self.network.modules():
            own = [(key, each, names[id(each)]) for key, each in module.named_parameters(recurse=False)]
            for key, parameter, name in own:
                self._absent[name] = parameter
                self._places.setdefault(name, []).append((module, key))
            weights = [name for _, parameter, name in own if parameter.dim() > 1]
            if weights:
                module.forward = _Loading(self, weights, module.forward)
        for name in [name for name, parameter in self._absent.items() if parameter.dim() < 2]:
            # Copies: outputs are corrected in them, and a source may return its own tensor.
            self._set(name, nn.Parameter(self._read(name).clone(), requires_grad=False))
        for prefix, module in self.network.named_modules():
            for key, buffer in list(module.named_buffers(recurse=False)):
                name = f"{prefix}.{key}" if prefix else key
                stored = name in self._loads and key not in module._non_persistent_buffers_set
                values = self._loads[name]() if stored else buffer
                module._buffers[key] = values.to(self._device, buffer.dtype, copy=True)

    def _read(self, name: str) -> Tensor:
        replaced = self._replaced.get(name)
        values = self._loads[name]() if replaced is None else decode(replaced.to(self._device))
        return values.to(device=self._device, dtype=self._absent[name].dtype)

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        for module, key in self._places[name]:
            module._parameters[key] = parameter

    def _make_room(self, needed_bytes: int) -> None:
        for name in [name for name in self._held if not self._in_use[name]]:
            if self.held_bytes + needed_bytes <= self.limit_bytes:
                return
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._set(name, self._absent[name])
        del self._held[name]
        self.held_bytes -= self._absent[name].nbytes


class _Loading:
    """A module's forward that has its weights read first.

    A forward and not a hook: hooks also run on modules whose forward is replaced by a stub, and on those at
    which a pass is stopped.
    """

    def __init__(self, resident: Resident, names: Sequence[str], forward: Callable[..., Any]) -> None:
        self.resident, self.names = resident, names
        self.__wrapped__ = forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with self.resident.using(self.names):
            return self.__wrapped__(*arguments, **named)


def weight_bytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in module.parameters() if each.dim() > 1)


def bytes_at_once(network: nn.Module, blocks: Sequence[nn.Module]) -> int:
    """Weights of the largest of some blocks, and all outside of them."""
    sizes = [weight_bytes(block) for block in blocks]
    return weight_bytes(network) - sum(sizes) + max(sizes, default=0)


def resident_of(model: nn.Module) -> Resident | None:
    """What reads a network's weights; None for one that has them."""
    return model.__dict__.get(_RESIDENT)


def loaded(layer: nn.Module) -> nn.Module:
    """A layer with its weights on the device."""
    forward = layer.__dict__.get("forward")
    if isinstance(forward, _Loading):
        forward.resident.load(forward.names)
    return layer


def copy_network(model: nn.Module) -> nn.Module:
    """A copy whose weights can be replaced."""
    resident = resident_of(model)
    return copy.deepcopy(model) if resident is None else resident.twin().network


def tensor_of(model: nn.Module, name: str) -> Tensor | None:
    """A network's parameter or buffer; None where it has none of that name."""
    layer, _, key = name.rpartition(".")
    try:
        module = model.get_submodule(layer)
    except AttributeError:
        return None
    found = module._parameters.get(key)
    return found if found is not None else module._buffers.get(key)


def replace_weight(model: nn.Module, name: str, encoded: Encoded, values: Tensor) -> Encoded:
    """Replaces a weight of a network by `values`, which its codes decode to; returns the codes to keep.

    A network that does not fit the device has them in host memory, and decodes them when it runs.
    """
    resident = resident_of(model)
    if resident is None:
        target = tensor_of(model, name)
        assert target is not None
        with torch.no_grad():
            target.copy_(values)
        return encoded
    kept = encoded.to("cpu")
    resident.put(name, kept)
    return kept


def release(model: nn.Module | None) -> None:
    """Takes from the device what a network has read."""
    resident = None if model is None else resident_of(model)
    if resident is not None:
        resident.release()
