"""Groups tensors by the part of the model they belong to, as finely as is informative."""

from __future__ import annotations

from collections.abc import Mapping

_TOO_LARGE = 0.6
"""A group with more than this share of all bytes is split by the next word of its names."""
_MAX_WORDS = 8


def groups_of(sizes: Mapping[str, int]) -> dict[str, str]:
    """Name -> group, from the names and the bytes under them.

    >>> groups_of({"stem.weight": 9, "blocks.0.weight": 40, "blocks.1.weight": 40, "blocks.1.bias": 1})
    {'stem.weight': 'stem', 'blocks.0.weight': 'blocks.0', 'blocks.1.weight': 'blocks.1', 'blocks.1.bias': 'blocks.1'}
    """
    found = {name: _leading_words(name, 1) for name in sizes}
    for words in range(2, _MAX_WORDS + 1):
        totals: dict[str, int] = {}
        for name, group in found.items():
            totals[group] = totals.get(group, 0) + sizes[name]
        most = _TOO_LARGE * sum(totals.values())
        large = {group for group, size in totals.items() if size > most}
        found = {
            name: _leading_words(name, words) if group in large else group for name, group in found.items()
        }
    return found


def _leading_words(name: str, words: int) -> str:
    """The first words of a layer's name, without the tensor's own last word, as in `fc.weight`."""
    layer, _, _ = name.rpartition(".")
    return ".".join((layer or name).split(".")[:words])
