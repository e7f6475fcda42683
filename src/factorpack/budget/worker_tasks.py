"""What workers do for a calibrated budget, and the files through which they get models and weights.

A task names files and settings. The model's own code comes as a pickle, which runs code where it is opened:
the task names its checksum too, and no other file is opened. All other files hold tensors and numbers alone.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import device_of
from factorpack.budget.candidates import plan_together
from factorpack.budget.coding import encode_with_steps
from factorpack.budget.curves import Curve
from factorpack.budget.planner import Planner
from factorpack.budget.sensitivity import Shown, Sums, show
from factorpack.budget.trial import SingleWeightTrial
from factorpack.calibration.calibrate import Calibration
from factorpack.errors import EngineError
from factorpack.format.atomic import atomic_write
from factorpack.methods import SecondOrder
from factorpack.record import LayerMoments
from factorpack.weight import Weight


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A model and its calibration data, as a worker finds them."""

    code: Path
    checksum: str
    parameters: Path
    device: str
    """The type of device it runs on; a worker's own is torch's current one."""


def share_model(
    model: nn.Module, calibration: Calibration, held_out: Calibration | None, folder: Path, device: str
) -> SharedModel:
    """Writes a model for workers: its parameters, and a pickle of everything else."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    absent = {id(value): _on_meta(value) for value in model.parameters()}
    calibration.segments(model)  # found once, and not by every worker
    content = io.BytesIO()
    try:
        torch.save((copy.deepcopy(model, absent), calibration, held_out), content)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        raise EngineError(
            f"a {type(model).__name__} cannot be sent to workers: {error}. Its classes must be importable, and it "
            "must hold nothing that only lives in this process, such as hooks or open files"
        ) from error
    shared = SharedModel(
        folder / "model.part",
        hashlib.sha256(content.getbuffer()).hexdigest(),
        folder / "parameters.part",
        device,
    )
    with atomic_write(shared.code) as file:
        file.write(content.getbuffer())
    with atomic_write(shared.parameters) as file:
        torch.save(parameters, file)
    return shared


def save_weights(path: Path, weights: Mapping[str, Weight]) -> None:
    """Writes weights with what is known of them. Tensors that they share are written once."""
    with atomic_write(path) as file:
        torch.save({name: _stored(weight) for name, weight in weights.items()}, file)


def show_batch(shared: SharedModel, index: int, layers: Sequence[str], state: Tensor) -> Shown | None:
    """A worker's task: the gradients of one batch, with labels drawn by a generator in a given state."""
    model, calibration, _ = _open_once(shared)
    generator = torch.Generator(device_of(model))
    generator.set_state(state)
    found = show(model, calibration.batches[index], layers, generator)
    return None if found is None else (found[0], [(name, _on_cpu(sums)) for name, sums in found[1]])


def measure_curves_of(file: Path, planner: Planner, bits: float, device: str) -> dict[str, Curve]:
    """A worker's task: the curves of weights that are planned together."""
    return plan_together(_load_weights(file, device), planner, bits)


def measure_divergence_of(
    shared: SharedModel, file: Path, name: str, method: SecondOrder, step: float
) -> float:
    """A worker's task: what a weight alone, rounded at a step, does to the model's outputs."""
    weight = _load_weights(file, shared.device)[name]
    (encoded,) = encode_with_steps([weight], [method], [step])
    return _trial_once(shared).divergence(name, encoded, weight)


@lru_cache(maxsize=1)
def _open_once(shared: SharedModel) -> tuple[nn.Module, Calibration, Calibration | None]:
    """Once per worker."""
    content = shared.code.read_bytes()
    if hashlib.sha256(content).hexdigest() != shared.checksum:
        raise EngineError(f"{shared.code} is not the file that the driver wrote: start again")
    model, calibration, held_out = torch.load(
        io.BytesIO(content), map_location=shared.device, weights_only=False
    )
    _fill(model, _load(shared.parameters, shared.device))
    return model, calibration, held_out


@lru_cache(maxsize=1)
def _trial_once(shared: SharedModel) -> SingleWeightTrial:
    model, _, held_out = _open_once(shared)
    assert held_out is not None
    return SingleWeightTrial(model, held_out)


def _fill(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Puts parameters where their places are; one that has several places stays one."""
    known = {
        id(absent): nn.Parameter(parameters[name], absent.requires_grad)
        for name, absent in model.named_parameters()
    }
    for module in model.modules():
        for name, absent in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, name, known[id(absent)])


def _on_meta(value: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(value.detach().to("meta"), value.requires_grad)


def _on_cpu(sums: Sums) -> Sums:
    parts = (getattr(sums, part.name) for part in fields(sums))
    return Sums(*(None if each is None else each.cpu() for each in parts))


def _stored(weight: Weight) -> dict[str, object]:
    inputs = weight.inputs
    assert inputs is None or isinstance(inputs, LayerMoments)
    moments = (
        None if inputs is None else {each.name: getattr(inputs, each.name) for each in fields(LayerMoments)}
    )
    found = {each.name: getattr(weight, each.name) for each in fields(Weight) if each.init}
    return found | {"values": weight.values.detach(), "inputs": moments}


def _load_weights(path: Path, device: str) -> dict[str, Weight]:
    return {
        name: Weight(**{**stored, "inputs": stored["inputs"] and LayerMoments(**stored["inputs"])})
        for name, stored in _load(path, device).items()
    }


def _load(path: Path, device: str) -> dict[str, Any]:
    """Tensors and numbers; on a CPU they stay in the file until they are used."""
    found: dict[str, Any] = torch.load(path, map_location=device, weights_only=True, mmap=device == "cpu")
    return found
