"""What each operation of a traced model does to the channels of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from factorpack.comparison.permute.ties import Axis, Ties

Axes = tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """The dimensions of a tensor in the traced model."""

    axes: Axes


Arguments = Mapping[str, Any]
"""An operation's arguments by their names in its schema, tensors as `Value`."""
Rule = Callable[[Ties, tuple[int, ...], Arguments], Axes]
"""Ties what must be permuted together, freezes what may not move, and returns the result's dimensions."""

_POSITIONS = "positions, not channels"


def convolution(ties: Ties, shape: tuple[int, ...], arguments: Arguments) -> Axes:
    inputs, weight, bias = (arguments[name] for name in ("input", "weight", "bias"))
    space = len(weight.axes) - 2
    *batch, channels = inputs.axes[:-space]
    outputs = weight.axes[0]
    multiplier, indivisible = divmod(ties.size(outputs), ties.size(channels))
    if arguments["groups"] == 1:
        ties.tie(channels, weight.axes[1])
    elif arguments["groups"] == ties.size(channels) and not indivisible:
        ties.tie(channels.times(multiplier), outputs)
    else:
        _freeze(ties, (channels, *weight.axes), f"a convolution of {arguments['groups']} groups")
    _freeze(ties, (*inputs.axes[-space:], *weight.axes[2:]), _POSITIONS)
    if bias is not None:
        ties.tie(outputs, bias.axes[0])
    return (*batch, outputs, *_fresh(ties, shape[-space:], _POSITIONS))


def linear(ties: Ties, _shape: tuple[int, ...], arguments: Arguments) -> Axes:
    inputs, weight, bias = (arguments[name] for name in ("input", "weight", "bias"))
    ties.tie(inputs.axes[-1], weight.axes[1])
    if bias is not None:
        ties.tie(weight.axes[0], bias.axes[0])
    return (*inputs.axes[:-1], weight.axes[0])


def embedding(ties: Ties, _shape: tuple[int, ...], arguments: Arguments) -> Axes:
    words, width = arguments["weight"].axes
    _freeze(ties, (words,), "they are selected by index")
    return (*arguments["indices"].axes, width)


def channel_norm(ties: Ties, _shape: tuple[int, ...], arguments: Arguments) -> Axes:
    """Batch and instance norm, and prelu: vectors with one element per channel."""
    inputs = arguments.get("input", arguments.get("self"))
    assert isinstance(inputs, Value)
    for name in ("weight", "bias", "running_mean", "running_var"):
        vector = arguments.get(name)
        if vector is not None and ties.size(vector.axes[0]) > 1:
            ties.tie(inputs.axes[1], vector.axes[0])
    return inputs.axes


def group_norm(ties: Ties, shape: tuple[int, ...], arguments: Arguments) -> Axes:
    inputs, groups = arguments["input"], arguments["num_groups"]
    if groups not in (1, shape[1]):
        _freeze(ties, (inputs.axes[1],), f"a norm of {groups} groups")
    return channel_norm(ties, shape, arguments)


def layer_norm(ties: Ties, _shape: tuple[int, ...], arguments: Arguments) -> Axes:
    inputs = arguments["input"]
    for name in ("weight", "bias"):
        if arguments[name] is not None:
            axes = arguments[name].axes
            for mine, theirs in zip(inputs.axes[-len(axes) :], axes, strict=True):
                ties.tie(mine, theirs)
    axes_of_inputs: Axes = inputs.axes
    return axes_of_inputs


def elementwise(ties: Ties, shape: tuple[int, ...], arguments: Arguments) -> Axes:
    """Broadcasting: dimensions aligned at the last one are tied, except those of size 1."""
    values = [value for value in arguments.values() if isinstance(value, Value)]
    result = []
    for place in range(-len(shape), 0):
        met = [value.axes[place] for value in values if len(value.axes) >= -place]
        met = [axis for axis in met if ties.size(axis) == shape[place]]
        for other in met[1:]:
            ties.tie(met[0], other)
        result.append(met[0] if met else ties.fresh(shape[place], _POSITIONS))
    return tuple(result)


def pooling(dimensions: int) -> Rule:
    """Pooling or resizing over the last dimensions."""

    def rule(ties: Ties, shape: tuple[int, ...], arguments: Arguments) -> Axes:
        axes = _first(arguments).axes
        _freeze(ties, axes[-dimensions:], _POSITIONS)
        return (*axes[:-dimensions], *_fresh(ties, shape[-dimensions:], _POSITIONS))

    return rule


def padding(ties: Ties, shape: tuple[int, ...], arguments: Arguments) -> Axes:
    return pooling(len(arguments["pad"]) // 2)(ties, shape, arguments)


def reduction(ties: Ties, _shape: tuple[int, ...], arguments: Arguments) -> Axes:
    """A mean or sum, for which order does not matter."""
    axes = _first(arguments).axes
    dims = arguments.get("dim")
    gone = {place % len(axes) for place in (range(len(axes)) if dims in (None, []) else _as_list(dims))}
    if arguments.get("keepdim"):
        return tuple(ties.fresh(1) if place in gone else axis for place, axis in enumerate(axes))
    return tuple(axis for place, axis in enumerate(axes) if place not in gone)


def reshape(ties: Ties, shape: tuple[int, ...], arguments: Arguments) -> Axes:
    """Merges or splits dimensions; a group survives as the first of those merged, or of those it splits into."""
    before = list(_first(arguments).axes)
    result: list[Axis] = []
    after = list(shape)
    while before or after:
        mine, new = _block(ties, before, after)
        result += _reshaped(ties, mine, new)
    return tuple(result)


def _block(ties: Ties, before: list[Axis], after: list[int]) -> tuple[list[Axis], list[int]]:
    """Takes the fewest leading dimensions of both with equally many elements."""
    mine, new = [before.pop(0)] if before else [], [after.pop(0)] if after else []
    while (have := math.prod(map(ties.size, mine))) != (want := math.prod(new)):
        if have < want:
            mine.append(before.pop(0))
        else:
            new.append(after.pop(0))
    return mine, new


def _reshaped(ties: Ties, before: list[Axis], after: list[int]) -> list[Axis]:
    wide = [axis for axis in before if ties.size(axis) > 1]
    inner = math.prod([size for size in after if size > 1][1:])  # elements per step of the first
    behind = math.prod(map(ties.size, wide[1:]))
    leads = wide and ties.resolve(wide[0]).repeat * behind % inner == 0 and (len(wide) == 1 or inner == 1)
    if not leads:
        _freeze(ties, wide, "a reshape splits the channels")
    _freeze(ties, wide[1:], "a reshape merges them into another dimension")
    result = []
    for size in after:
        if size > 1 and leads:
            lead = ties.resolve(wide[0])
            result.append(Axis(lead.group, lead.repeat * behind // inner))
            leads = False
        else:
            result.append(ties.fresh(size, _POSITIONS))
    return result


def transpose(_ties: Ties, _shape: tuple[int, ...], arguments: Arguments) -> Axes:
    axes = list(_first(arguments).axes)
    if len(axes) > 1:
        one, other = arguments.get("dim0", 0), arguments.get("dim1", 1)
        axes[one], axes[other] = axes[other], axes[one]
    return tuple(axes)


def permute(_ties: Ties, _shape: tuple[int, ...], arguments: Arguments) -> Axes:
    axes = _first(arguments).axes
    return tuple(axes[place] for place in arguments["dims"])


def select(ties: Ties, _shape: tuple[int, ...], arguments: Arguments) -> Axes:
    axes = list(_first(arguments).axes)
    _freeze(ties, (axes.pop(arguments["dim"]),), "they are selected by index")
    return tuple(axes)


def slicing(ties: Ties, shape: tuple[int, ...], arguments: Arguments) -> Axes:
    """A slice along one dimension; a full slice changes nothing."""
    axes = list(_first(arguments).axes)
    place = arguments["dim"]
    if shape[place] != ties.size(axes[place]):
        _freeze(ties, (axes[place],), "a slice takes some of them")
        axes[place] = ties.fresh(shape[place], "a slice of other channels")
    return tuple(axes)


def concatenation(ties: Ties, shape: tuple[int, ...], arguments: Arguments) -> Axes:
    """Freezes the dimension along which the parts are concatenated."""
    place = arguments["dim"] % len(shape)
    parts = [list(value.axes) for value in arguments["tensors"]]
    for part in parts:
        _freeze(ties, (part[place],), "a concatenation")
        part[place] = ties.fresh(shape[place], "a concatenation")
    return elementwise(ties, shape, {str(number): Value(tuple(part)) for number, part in enumerate(parts)})


def freeze_all(ties: Ties, argument: Any, reason: str) -> None:
    """Freezes every dimension in an operation's arguments."""
    if isinstance(argument, Value):
        _freeze(ties, argument.axes, reason)
    elif isinstance(argument, Mapping):
        freeze_all(ties, list(argument.values()), reason)
    elif isinstance(argument, Sequence) and not isinstance(argument, str):
        for each in argument:
            freeze_all(ties, each, reason)


def _freeze(ties: Ties, axes: Sequence[Axis], reason: str) -> None:
    for axis in axes:
        ties.freeze(axis, reason)


def _fresh(ties: Ties, sizes: Sequence[int], reason: str) -> Axes:
    return tuple(ties.fresh(size, reason) for size in sizes)


def _first(arguments: Arguments) -> Value:
    return next(value for value in arguments.values() if isinstance(value, Value))


def _as_list(places: int | Sequence[int]) -> Sequence[int]:
    return [places] if isinstance(places, int) else places


_POOLS = ("max_pool{}d", "avg_pool{}d", "adaptive_avg_pool{}d", "upsample_nearest{}d")
_RESIZES = ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")

RULES: dict[str, Rule] = {
    **{f"conv{dimensions}d": convolution for dimensions in (1, 2, 3)},
    **{pool.format(dimensions): pooling(dimensions) for pool in _POOLS for dimensions in (1, 2, 3)},
    **{resize: pooling(int(resize[-2])) for resize in _RESIZES},
    "linear": linear,
    "embedding": embedding,
    **dict.fromkeys(("batch_norm", "instance_norm", "prelu"), channel_norm),
    "group_norm": group_norm,
    "layer_norm": layer_norm,
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout"), elementwise),
    **dict.fromkeys(("contiguous", "detach", "alias", "to", "softmax", "log_softmax"), elementwise),
    **dict.fromkeys(("hardswish", "log_sigmoid", "rsub"), elementwise),
    **dict.fromkeys(("mean", "sum", "amax", "amin"), reduction),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), reshape),
    **dict.fromkeys(("transpose", "t"), transpose),
    "permute": permute,
    "select": select,
    "slice": slicing,
    "cat": concatenation,
    "pad": padding,
}
"""aten operation, in place or not -> its rule; operations tagged pointwise need none."""
