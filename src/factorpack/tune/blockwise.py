"""Block-wise reconstruction: trains a packed model towards the original with a few unlabelled inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from factorpack.batches import evaluating
from factorpack.errors import PlanError, SourceError
from factorpack.packed import Packed
from factorpack.progress import Progress, ProgressOption
from factorpack.record import Encoded
from factorpack.tune.blocks import block_sample, blocks_of
from factorpack.tune.packed_model import PackedModel
from factorpack.tune.rate import RateTerm, quantized_rows
from factorpack.tune.schedule import Schedule
from factorpack.tune.steer import Controller
from factorpack.tune.trainable import TRAINABLE
from factorpack.tune.trim import remove_dead_rows, trim

BATCH = 32
FIRST_RATE = 1e-4
_DECAY = Schedule(final_share=0.0)
_UPDATE_EVERY = 10
_HORIZON = 10.0  # updates within which a size that has grown should be back


def reconstruct(
    packed: Packed,
    model: nn.Module,
    batches: Iterable[Any],
    *,
    blocks: Sequence[str] | None = None,
    steps: int = 500,
    learning_rate: float = 3e-4,
    rate: float | Literal["hold"] = "hold",
    seed: int = 0,
    progress: ProgressOption = True,
) -> Packed:
    """Trains a packed model block by block to reproduce the outputs of `model`, the original, in place.

    `batches` are inputs, or (inputs, labels) whose labels are ignored: a few hundred samples are enough.
    Blocks are trained in execution order; each gets its inputs from the trained blocks before it, and learns
    the original's output in `steps` steps of Adam with frozen batch norms. A block that does not improve is
    left unchanged. Memory is that of the inputs and outputs of one block.

    `rate` is the cost of one bit per weight, relative to the block's output energy: 0 for none, or "hold",
    which adjusts it so that a block's codes take no more bits than before.
    """
    _check(packed, steps, learning_rate, rate)
    samples = [batches] if isinstance(batches, Tensor) else list(batches)
    if not samples:
        raise SourceError("no batches to reconstruct on")
    weights = [name for name, encoded in packed.items() if encoded.kind in TRAINABLE]
    compressed = packed.load_into(copy.deepcopy(model)).eval()
    tensors = dict(packed)
    with evaluating(model):
        names = blocks_of(model, samples[0], weights, blocks)
        with Progress("reconstructing", len(names), progress) as bar:
            for name in names:
                bar.show(name)
                inputs = block_sample(compressed, name, samples, output=False)
                outputs = block_sample(model, name, samples, output=True)
                block = _Block(compressed.get_submodule(name), _subset(tensors, name), rate)
                generator = torch.Generator().manual_seed(seed)
                found = block.train(inputs, outputs, steps, learning_rate, generator)
                tensors |= {f"{name}.{key}": encoded for key, encoded in found.items()}
                bar.advance(name, 1)
    packed.replace(tensors)
    return packed


class _Block:
    """One block in its packed form, with its rate term."""

    def __init__(self, module: nn.Module, packed: Packed, rate: float | str) -> None:
        self.module, self.packed = module, packed
        self.tuned = PackedModel(packed, module)
        self.rows = quantized_rows(self.tuned)
        self.tuned.to(next(module.parameters()).device)
        self.term = RateTerm(self.rows, self.tuned.coded_weights())
        self.start_bits = self.term.refresh()
        self.hold = rate == "hold" and bool(self.rows)  # training does not change indices of codewords
        self.controller = Controller(FIRST_RATE if isinstance(rate, str) else rate)

    def train(
        self, inputs: Tensor, outputs: Tensor, steps: int, learning_rate: float, generator: torch.Generator
    ) -> dict[str, Encoded]:
        """The block's tensors after training, or as they were if that is better."""
        energy = outputs.double().square().mean().clamp_min(1e-30).item()
        before = self._cost(inputs, outputs, energy)
        trained = [parameter for parameter in self.tuned.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=learning_rate)
        for step in range(steps):
            self._update_rate(step)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * _DECAY.decay(step, steps)
            picked = torch.randint(len(inputs), (min(BATCH, len(inputs)),), generator=generator)
            picked = picked.to(inputs.device)
            error = (self.tuned(inputs[picked]) - outputs[picked]).square().mean() / energy
            loss = error + self.controller.rate * self.term() if self.controller.rate else error
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if self.hold:
            self._shrink()
        after = {name: remove_dead_rows(each) for name, each in self.tuned.encoded(self.packed).items()}
        Packed(after).load_into(self.module)
        if self._cost(inputs, outputs, energy) < before:
            return after
        self.packed.load_into(self.module)
        return dict(self.packed)

    def _update_rate(self, step: int) -> None:
        if step % _UPDATE_EVERY or not self.controller.rate:
            return
        bits = self.term.refresh()
        if self.hold:
            with torch.no_grad():
                soft = self.term().item() * self.term.weights
            self.controller.update(bits, soft, self.start_bits, _HORIZON)

    def _shrink(self) -> None:
        """Trims the bits by which the codes still exceed their start."""
        for _ in range(100):
            excess = self.term.refresh() - self.start_bits
            if excess <= 0 or not trim(self.rows, excess):
                return

    def _cost(self, inputs: Tensor, outputs: Tensor, energy: float) -> float:
        """The loaded module's relative output error, plus the cost of its codes at a fixed rate."""
        with torch.no_grad():
            pairs = zip(inputs.split(BATCH), outputs.split(BATCH), strict=True)
            error = sum(float((self.module(x.clone()) - y).double().square().sum()) for x, y in pairs)
        price = 0.0 if self.hold else self.controller.rate * self.term.refresh() / self.term.weights
        return error / outputs.numel() / energy + price


def _subset(tensors: dict[str, Encoded], name: str) -> Packed:
    prefix = f"{name}."
    return Packed(
        {key.removeprefix(prefix): encoded for key, encoded in tensors.items() if key.startswith(prefix)}
    )


def _check(packed: Packed, steps: int, learning_rate: float, rate: float | str) -> None:
    if steps < 1 or not learning_rate > 0:
        raise PlanError(f"steps {steps}, learning_rate {learning_rate}: expected at least 1, and above 0")
    if rate != "hold" and (isinstance(rate, str) or not 0 <= rate < math.inf):
        raise PlanError(f"rate is {rate!r}, allowed are 'hold', 0 for none, and positive numbers")
    if packed.aliases:
        alias, target = next(iter(packed.aliases.items()))
        raise SourceError(
            f"{alias!r} is tied to {target!r}: blocks that share a weight cannot be trained one after another"
        )
