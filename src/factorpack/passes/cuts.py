"""Where a model's forward pass can be cut: found by trial on one sample."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import forward, hooked, slice_batch
from factorpack.errors import SourceError
from factorpack.passes.segments import Cut, Form, Segments, form_of, stubbed, tensor_in

MOST_TRIALS = 256
"""Modules that are tried, those that hold the others first."""
FEW_LAYERS = 8
"""A block of at most so many layers is not cut further."""
_CONTAINERS = (nn.Sequential, nn.ModuleList)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a module, and the calls inside it."""

    name: str
    start: int
    end: int = -1
    form: Form | None = None
    output: Tensor | None = None
    layers_seen: int = 0
    """How many layers had run when it ended."""
    continues: bool = False
    """Whether it got the very tensor that the candidate before it returned, and no earlier one is left."""
    inner: list[_Call] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Run:
    """What a forward pass showed."""

    calls: list[_Call] = field(default_factory=list)
    """In the order they started."""
    layers: list[str] = field(default_factory=list)
    """Those with a weight, in the order they ran."""
    same_input: dict[str, list[str]] = field(default_factory=dict)
    seen: list[Tensor] = field(default_factory=list)
    """Checksums of what the layers saw, on the device."""
    inputs: list[int] = field(default_factory=list)
    """The same, known at the end: a GPU is waited for once, not for every layer."""
    outputs: list[int] = field(default_factory=list)

    def finish(self, output: Any) -> None:
        found = [*self.seen, *_output_checksums(output)]
        values = torch.stack([each.to(found[0].device) for each in found]).tolist() if found else []
        self.inputs, self.outputs = values[: len(self.layers)], values[len(self.layers) :]


def find_segments(model: nn.Module, batch: Any, few_trials: bool = False) -> Segments:
    """Cuts a model at the outputs of blocks, on the evidence of one sample.

    A cut is valid if the model's output, and what every later layer sees, stay the same bit for bit where
    the module returns its stored output and everything skipped before it returns NaN. Each trial runs the
    model. With `few_trials` only the list with the most weights is cut, and only its ends are tried: the
    blocks between must each get the very tensor that the one before returned.
    """
    layers = [name for name, module in model.named_modules() if has_weight(module)]
    with torch.inference_mode(False), torch.no_grad():
        sample = slice_batch(batch, 0, 1)
        candidates = largest_list(model) if few_trials else _candidates(model)
        seen = _observe(model, sample, layers, candidates)
        find = _cuts_of_chain if few_trials else _valid_cuts
        cuts = find(model, sample, seen, layers, candidates)
    times = {call.name: call.start for call in reversed(seen.calls)}
    order = list(dict.fromkeys(seen.layers))
    cuts = _with_layers_between(cuts, [times[name] for name in order if _is_matrix(model, name)])
    ends = [call.end for call, _ in cuts]
    segment_of = {name: sum(end <= times[name] for end in ends) for name in order}
    runs = Counter(seen.layers)
    once = {name for name, count in runs.items() if count == 1}
    same = {
        name: tuple(each for each in group if each in once)
        for group in seen.same_input.values()
        for name in group
        if name in once
    }
    return Segments(tuple(cut for _, cut in cuts), segment_of, same)


def has_weight(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), Tensor)


def _is_matrix(model: nn.Module, name: str) -> bool:
    weight = model.get_submodule(name).weight
    return isinstance(weight, Tensor) and weight.dim() > 1


def _observe(model: nn.Module, sample: Any, layers: Sequence[str], candidates: Sequence[str]) -> _Run:
    """Runs the model once: who calls whom, and what every module returns."""
    seen, stack, wanted = _Run(), [_Call("", -1)], set(candidates)
    names = [name for name, _ in model.named_modules() if name]
    clock = iter(range(1 << 62))
    returned: list[tuple[weakref.ref[Tensor], int]] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: Any) -> None:
            call = _Call(name, next(clock))
            if name in wanted:
                call.continues = _is_last(inputs[0] if inputs else None, returned)
            stack[-1].inner.append(call)
            stack.append(call)
            seen.calls.append(call)

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            call = stack.pop()
            call.end, call.form, call.layers_seen = next(clock), form_of(output), len(seen.layers)
            if name in wanted and call.form is not None:
                tensor = output[0] if isinstance(output, tuple) else output
                returned.append((weakref.ref(tensor), version_of(tensor)))
                call.output = tensor_in(output).clone()

        return hook

    with (
        hooked(model, {name: enter(name) for name in names}, {name: leave(name) for name in names}),
        _watching(model, layers, seen),
    ):
        seen.finish(forward(model, sample))
    if "" in layers:  # the model is a layer itself
        seen.calls.append(_Call("", -1))
    return seen


@contextmanager
def _watching(model: nn.Module, layers: Sequence[str], seen: _Run) -> Iterator[None]:
    """Notes what each layer sees, and which of them see the very same tensor."""
    groups: list[tuple[weakref.ref[Tensor], int, list[str]]] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: Sequence[Any]) -> None:
            tensor = inputs[0] if inputs else None
            seen.layers.append(name)
            seen.seen.append(_checksum(tensor) if isinstance(tensor, Tensor) else torch.tensor(0))
            if not isinstance(tensor, Tensor):
                return
            version = version_of(tensor)
            for reference, its_version, members in groups:
                if reference() is tensor and its_version == version:
                    members.append(name)
                    return
            members = [name]
            groups.append((weakref.ref(tensor), version, members))
            seen.same_input[name] = members

        return hook

    with hooked(model, {name: watch(name) for name in layers}):
        yield


def _is_last(value: Any, returned: Sequence[tuple[weakref.ref[Tensor], int]]) -> bool:
    """Whether a value is the last tensor returned, unchanged, and nobody holds one of those before."""
    if not returned or not isinstance(value, Tensor):
        return False
    *earlier, (last, version) = returned
    return last() is value and version_of(value) == version and all(each() is None for each, _ in earlier)


def _valid_cuts(
    model: nn.Module, sample: Any, seen: _Run, layers: Sequence[str], candidates: Sequence[str]
) -> list[tuple[_Call, Cut]]:
    """Calls after which the model can be cut, in the order they end."""
    runs = Counter(call.name for call in seen.calls)
    calls = {call.name: call for call in seen.calls if runs[call.name] == 1 and call.output is not None}
    found: list[tuple[_Call, Cut]] = []
    closed: list[str] = []
    trials = 0
    for name in candidates:
        matrices = [layer for layer in _layers_in(name, layers) if _is_matrix(model, layer)]
        if name not in calls or not matrices or any(name.startswith(f"{block}.") for block in closed):
            continue
        if trials == MOST_TRIALS:
            break
        trials += 1
        cut = _try(model, sample, seen, calls[name], layers)
        if cut is not None:
            found.append((calls[name], cut))
            if len(matrices) <= FEW_LAYERS:
                closed.append(name)
    return sorted(found, key=lambda each: each[0].end)


def _cuts_of_chain(
    model: nn.Module, sample: Any, seen: _Run, layers: Sequence[str], candidates: Sequence[str]
) -> list[tuple[_Call, Cut]]:
    """All of the candidates, which are a chain, if the first and the last of them are valid cuts; else none."""
    chain = [call for call in seen.calls if call.name in set(candidates)]
    once = len({call.name for call in chain}) == len(chain)
    if not chain or not once or any(call.output is None for call in chain):
        return []
    if not all(call.continues for call in chain[1:]):
        return []
    ways = {call.name: _ways_to_skip(model, seen, call, layers) for call in chain}
    for way in range(min(map(len, ways.values()))):
        if all(
            _holds(model, sample, seen, end, ways[end.name][way], layers) for end in (chain[0], chain[-1])
        ):
            return [(call, Cut(call.name, ways[call.name][way])) for call in chain]
    return []


def largest_list(model: nn.Module) -> list[str]:
    """Children of the container that has the most weights, the outermost of several."""
    sizes = {
        name: sum(each.numel() for each in model.get_submodule(name).parameters())
        for name in _containers(model)
    }
    if not sizes:
        return []
    largest = max(sizes, key=lambda name: sizes[name])
    return [
        f"{largest}.{key}" if largest else key for key, _ in model.get_submodule(largest).named_children()
    ]


def _candidates(model: nn.Module) -> list[str]:
    """Children of containers, the outermost first."""
    names = [
        f"{name}.{key}" if name else key
        for name in _containers(model)
        for key, _ in model.get_submodule(name).named_children()
    ]
    return sorted(names, key=lambda name: name.count("."))


def _containers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, _CONTAINERS)]


def _try(model: nn.Module, sample: Any, seen: _Run, call: _Call, layers: Sequence[str]) -> Cut | None:
    """A cut that skips all it can."""
    for skipped in dict.fromkeys(_ways_to_skip(model, seen, call, layers)):
        if _holds(model, sample, seen, call, skipped, layers):
            return Cut(call.name, skipped)
    return None


def _ways_to_skip(model: nn.Module, seen: _Run, call: _Call, layers: Sequence[str]) -> list[tuple[str, ...]]:
    """Every module that is done before a call, or those with weights, or blocks of its own list.

    The last is for models in which all blocks use what a small layer made of the input.
    """
    runs = Counter(each.name for each in seen.calls)
    done = [each.name for each in _finished_before(_top(seen), call, runs)]
    heavy = [name for name in done if _layers_in(name, layers)]
    lists = [name for name in _containers(model) if call.name.startswith(f"{name}." if name else "")]
    blocks = [name for name in heavy if any(name.startswith(f"{each}." if each else "") for each in lists)]
    again = len(_layers_in_all(heavy, layers)) - len(_layers_in_all(blocks, layers))
    worth_it = 0 < again < len(_layers_in_all(blocks, layers))
    return [tuple(done), tuple(heavy), *([tuple(blocks)] if worth_it else [])]


def _layers_in(name: str, layers: Sequence[str]) -> list[str]:
    return [layer for layer in layers if layer == name or layer.startswith(f"{name}.")]


def _layers_in_all(names: Sequence[str], layers: Sequence[str]) -> list[str]:
    return [layer for name in names for layer in _layers_in(name, layers)]


def _top(seen: _Run) -> list[_Call]:
    inner = {id(each) for call in seen.calls for each in call.inner}
    return [call for call in seen.calls if id(call) not in inner]


def _finished_before(calls: Sequence[_Call], call: _Call, runs: Mapping[str, int]) -> Iterator[_Call]:
    """The outermost calls that ended before a call began and that a stub can stand for."""
    for each in calls:
        if each.start >= call.start:
            return
        if 0 <= each.end < call.start and each.form is not None and runs[each.name] == 1:
            yield each
        else:
            yield from _finished_before(each.inner, call, runs)


def _holds(
    model: nn.Module,
    sample: Any,
    seen: _Run,
    call: _Call,
    skipped: Sequence[str],
    layers: Sequence[str],
) -> bool:
    """Whether everything after a call is the same with what is skipped replaced by NaN."""
    again, forms = _Run(), {each.name: each.form for each in seen.calls}
    passed: list[int] = []

    def lost(name: str) -> Callable[..., Any]:
        form = forms[name]
        assert form is not None
        blank = torch.full(form.shape, torch.nan, dtype=form.dtype, device=form.device)
        return lambda *_args, **_named: form.wrap(blank.clone())

    def stored(*_args: Any, **_named: Any) -> Any:
        assert call.output is not None
        assert call.form is not None
        passed.append(len(again.layers))
        return call.form.wrap(call.output.clone())

    stubs = {name: lost(name) for name in skipped} | {call.name: stored}
    try:
        with stubbed(model, stubs), _watching(model, layers, again):
            again.finish(forward(model, sample))
    except SourceError:  # a weight that cannot be read
        raise
    except Exception:  # whatever a model may do with NaN: it cannot be cut here
        return False
    if len(passed) != 1 or again.outputs != seen.outputs:
        return False
    after, expected = slice(passed[0], None), slice(call.layers_seen, None)
    return again.layers[after] == seen.layers[expected] and again.inputs[after] == seen.inputs[expected]


def _with_layers_between(cuts: Sequence[tuple[_Call, Cut]], times: Sequence[int]) -> list[tuple[_Call, Cut]]:
    """The cuts that have a layer with a weight of two dimensions or more between any two, and after the last."""
    kept: list[tuple[_Call, Cut]] = []
    last = -1
    for call, cut in cuts:
        if any(last < time < call.end for time in times) and any(time > call.end for time in times):
            kept.append((call, cut))
            last = call.end
    return kept


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _output_checksums(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [_checksum(output)]
    if isinstance(output, list | tuple):
        values = list(output)
    else:
        values = list((output if isinstance(output, Mapping) else getattr(output, "__dict__", {})).values())
    # Keys and values kept for the next token are not compared: nothing later in this pass reads them.
    return [_checksum(value) for value in values if isinstance(value, Tensor)]


def _checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits, read as integers."""
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.contiguous().view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)
