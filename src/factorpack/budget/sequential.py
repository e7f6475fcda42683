"""Weights coded one after the other: with calibration data, each sees the layers coded before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from factorpack.batches import device_of
from factorpack.budget.coding import Aim, Coded, at_once, encode_with_step, meet_together, works_together
from factorpack.budget.following_norms import MeanOutput
from factorpack.budget.journal import NOTHING_KEPT, Finished, Journal
from factorpack.budget.knowledge import Knowledge
from factorpack.budget.mean_inputs import explain_means
from factorpack.budget.norms import correct_outputs
from factorpack.budget.phases import coding_work
from factorpack.budget.tensors import Tensors, zero_of
from factorpack.calibration.walk import Walk
from factorpack.decoding import decode
from factorpack.errors import while_compressing
from factorpack.format.encode_ahead import LargestFirst, Streams
from factorpack.format.packed_file import bytes_of, rows_of
from factorpack.methods import SecondOrder
from factorpack.passes.resident import copy_network, release, replace_weight, tensor_of
from factorpack.progress import Progress, Showing
from factorpack.record import Encoded, LayerMoments, bias_of, weight_of
from factorpack.weight import Weight

NEARLY = 0.03
"""How far a weight may be from its bytes: steps of equal slope matter more, and later weights keep the sum."""
LARGE, HALF = 0.02, 0.5
"""What the estimate of a weight with a larger share of the bytes is wrong by, later weights make up for, from where
this share of the bytes is left: until then nobody waits for its stream."""
LATE = 0.1
"""Where weights are coded on a GPU, as fast as streams are made, streams are waited for once, before the weight behind
which this share of the bytes is left: one that has just begun would hold up everything, and what is estimated after
that is little. What a table of words takes, half of the bytes perhaps, is known within a percent: a twentieth of what
is left then."""


@dataclass(slots=True)
class _Wait:
    """When streams are waited for, while weights of so many bytes together get their codes."""

    bytes: float
    on_gpu: bool
    is_over: bool = False

    def is_due(self, to_come: float, planned: float) -> bool:
        """Before a weight of `planned` bytes, which are part of those to come."""
        if not self.on_gpu:
            return to_come <= HALF * self.bytes
        due = not self.is_over and to_come - planned <= LATE * self.bytes
        self.is_over |= due
        return due


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    """A weight that has its codes; `weight` and `moments` are kept only for the one that closes the gap."""

    encoded: Encoded
    step: float
    bytes: int
    weight: Weight | None = None
    moments: LayerMoments | None = None


class SequentialCoder:
    """A `Coder` in this process. What a killed run has left in the journal is not coded again."""

    def __init__(
        self, tensors: Tensors, knowledge: Knowledge, progress: Showing, journal: Journal = NOTHING_KEPT
    ) -> None:
        self._tensors, self._knowledge, self._progress = tensors, knowledge, progress
        self._journal = journal
        self.order = knowledge.order(tensors.coded)
        self._done: dict[str, _Done] = {}
        self._ahead: dict[str, tuple[Coded, Weight, LayerMoments | None]] = {}
        """Codes of weights whose turn will come, made with those of one that has the same inputs."""
        self._compressed: nn.Module | None = None
        self._means = self._explained_means()
        self._corrected: dict[str, Tensor] = {}
        """Running means of norms, and biases, where no data but norms tell a layer's mean inputs."""
        self.streams = Streams()
        """What was encoded to measure the file, for whoever writes it."""

    def encode(
        self, methods: Mapping[str, SecondOrder], planned: Mapping[str, float], aim: float, closer: str
    ) -> None:
        """Each weight in turn spends its share of the bytes that are left."""
        self._done, self._ahead, self._compressed, left = {}, {}, self._copy_of_model(), aim
        walk = self._knowledge.walk(self._compressed)
        journal = self._journal.after("codes", dict(methods), dict(planned), aim)
        estimated: dict[str, int] = {}
        on_gpu = self._compressed is not None and works_together(device_of(self._compressed))
        wait = _Wait(sum(planned.values()), on_gpu)
        with (
            Progress("compressing", self._work(self.order), self._progress) as bar,
            LargestFirst(torch.get_num_threads()) as pool,
        ):
            for name in self.order:
                bar.show(name)
                to_come = sum(planned[later] for later in planned if later not in self._done)
                if estimated and wait.is_due(to_come, planned[name]):
                    left -= self._settle(estimated)
                share = left / max(to_come, 1.0)
                kept = journal.find(name, self.streams)
                if kept is not None:
                    done = self._resume(name, kept, walk, name == closer)
                else:
                    done = self._encode(name, methods, planned, share, walk)
                left -= done.bytes
                self.streams.begin(name, done.encoded, pool, self._tensors.numel)
                if planned[name] >= LARGE * aim:
                    estimated[name] = done.bytes
                if kept is None:
                    kept = self._finished(name, done)
                    journal.keep(name, kept, self.streams)
                journal = journal.after_finished(name, kept)
                self._done[name] = done if name == closer else replace(done, weight=None, moments=None)
                bar.advance(name, self._work([name]))
        release(self._compressed)

    def _work(self, names: Sequence[str]) -> int:
        """What some weights take, in units that a bar counts."""
        calibrated, entries = self._knowledge.calibration is not None, self._tensors.source.entries
        return sum(coding_work(entries[name].numel, calibrated) for name in names)

    def numel(self, name: str) -> int:
        return self._done[name].encoded.numel

    def step_of(self, name: str) -> float:
        return self._done[name].step

    def bytes_of(self, name: str) -> int:
        return self._done[name].bytes

    def recode(self, name: str, method: SecondOrder) -> None:
        last = self._done[name]
        assert last.weight is not None
        assert method.step is not None
        coded = encode_with_step(last.weight, method, method.step)
        moments = last.moments
        if moments is not None:  # the outputs are already corrected, for the codes it has now
            moments = replace(moments, original_mean=moments.mean, original_power=None)
        encoded = self._put(name, coded.encoded, decode(last.encoded), moments)
        self._done[name] = replace(last, encoded=encoded, step=coded.step, bytes=coded.bytes)

    def zero(self, name: str) -> None:
        zero = zero_of(self._tensors.source.entries[name])
        self._correct_mean(name, zero)
        self._done[name] = _Done(zero.noted("zero: the budget leaves no room for it"), 0.0, 0)

    def measure(self) -> tuple[int, dict[str, Encoded]]:
        coded = {name: done.encoded for name, done in self._done.items()}
        state = self._corrected if self._compressed is None else self._compressed.state_dict()
        tensors = self._tensors.join(coded, state)
        return bytes_of(rows_of(tensors, self.streams), self._tensors.source.aliases), tensors

    def _settle(self, estimated: dict[str, int]) -> int:
        """How many bytes more than estimated these weights take. They are then taken out."""
        more = 0
        while estimated:
            name, guess = estimated.popitem()
            (row,) = rows_of({name: self._done[name].encoded}, self.streams)
            more += sum(part.stored_bytes for part in row.parts.values()) - guess
        return more

    def _copy_of_model(self) -> nn.Module | None:
        """A copy of the model to compress layer by layer, with the caller's own methods applied."""
        if self._knowledge.model is None or self._knowledge.calibration is None:
            return None
        compressed = copy_network(self._knowledge.model)
        names = compressed.state_dict().keys()
        for name, encoded in self._tensors.fixed.items():
            if encoded.kind != "keep" and name in names:
                replace_weight(compressed, name, encoded, decode(encoded))
        return compressed

    def _explained_means(self) -> dict[str, tuple[str, MeanOutput]]:
        """Weights, what keeps their mean outputs, and what explains those: without calibration data."""
        if self._knowledge.calibration is not None or not self._knowledge.planner.correct_means:
            return {}
        return explain_means(self._tensors.source, self._tensors.coded)

    def _correct_mean(self, name: str, encoded: Encoded) -> None:
        """Restores the mean output of a layer whose weight has new codes."""
        if name in self._means:
            mean, explained = self._means[name]
            self._corrected[mean] = explained.with_weight(decode(encoded))

    def _encode(
        self,
        name: str,
        methods: Mapping[str, SecondOrder],
        planned: Mapping[str, float],
        share: float,
        walk: Walk | None,
    ) -> _Done:
        """One weight at about a share of its planned bytes, put into the compressed network."""
        if name not in self._ahead:
            names = self._alike(name, walk)
            seen = [self._weight(each, walk) for each in names]
            aims = [
                Aim(weight, methods[each], planned[each], planned[each] * share)
                for each, (weight, _) in zip(names, seen, strict=True)
            ]
            with while_compressing(*names):
                coded = meet_together(aims, NEARLY)
            self._ahead |= {each: (code, *of) for each, code, of in zip(names, coded, seen, strict=True)}
        found, weight, moments = self._ahead.pop(name)
        encoded = self._put(name, found.encoded, weight.values, moments)
        # Where it will be encoded: no copy of the codes stays on a GPU.
        return _Done(encoded.to("cpu"), found.step, found.bytes, weight, moments)

    def _alike(self, name: str, walk: Walk | None) -> list[str]:
        """A weight, and those of its shape whose layers have the same inputs, where they are coded together."""
        layer, model = self._knowledge.layer_of.get(name), self._knowledge.model
        if layer is None or walk is None or model is None or not works_together(device_of(model)):
            return [name]
        entries, layer_of = self._tensors.source.entries, self._knowledge.layer_of
        shape = entries[name].shape
        alike = [
            other
            for other in map(weight_of, walk.same_input(layer))
            if other in layer_of and other not in self._done and entries[other].shape == shape
        ]
        return alike[: at_once(shape)]

    def _weight(self, name: str, walk: Walk | None) -> tuple[Weight, LayerMoments | None]:
        """A weight, with the moments of its inputs in the network as compressed so far."""
        layer = self._knowledge.layer_of.get(name)
        moments = (
            None if layer is None or walk is None else self._knowledge.moments(walk, layer, self._compressed)
        )
        return self._knowledge.weight(self._tensors, name, moments), moments

    def _resume(self, name: str, kept: Finished, walk: Walk | None, is_closer: bool) -> _Done:
        """A weight that an earlier run has coded, put into the compressed network."""
        assert kept.encoded is not None
        weight, moments = self._weight(name, walk) if is_closer else (None, None)
        self._correct_mean(name, kept.encoded)
        if self._compressed is not None:
            replace_weight(self._compressed, name, kept.encoded, decode(kept.encoded))
            for key, value in kept.tensors.items():
                corrected = tensor_of(self._compressed, key)
                assert corrected is not None
                with torch.no_grad():
                    corrected.copy_(value)
        return _Done(kept.encoded, kept.document["step"], kept.document["bytes"], weight, moments)

    def _finished(self, name: str, done: _Done) -> Finished:
        """A weight's codes, and what was corrected with it, for a run that resumes this one."""
        norm = self._knowledge.norm_of.get(self._knowledge.layer_of.get(name, ""))
        keys = [bias_of(name), f"{norm}.running_mean", f"{norm}.running_var"]
        found = {} if self._compressed is None else {key: tensor_of(self._compressed, key) for key in keys}
        corrected = {key: value.detach() for key, value in found.items() if value is not None}
        return Finished({"step": done.step, "bytes": done.bytes}, corrected, done.encoded)

    def _put(self, name: str, encoded: Encoded, before: Tensor, moments: LayerMoments | None) -> Encoded:
        """Replaces a weight in the compressed network and restores its layer's mean output; returns its codes."""
        self._correct_mean(name, encoded)
        if self._compressed is None:
            return encoded
        weight = decode(encoded)
        kept = replace_weight(self._compressed, name, encoded, weight)
        layer, planner = self._knowledge.layer_of.get(name), self._knowledge.planner
        if layer is not None and moments is not None and planner.correct_means:
            norm = self._knowledge.norm_of.get(layer)
            correct_outputs(
                self._compressed.get_submodule(layer),
                self._compressed.get_submodule(norm) if norm else None,
                weight.flatten(1),
                before.flatten(1),
                moments,
                planner.correct_variances,
            )
        return kept
