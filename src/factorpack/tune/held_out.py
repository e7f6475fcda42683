"""Which inputs are held out of training, to measure on."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from factorpack.tune.checkpoint import random_state, restore_random_state

MOST_INPUTS = 1000
PLANNED_INPUTS = 1000
"""Training inputs that a start is planned on, more than a budget takes by default: a plan fits its own inputs
much more closely than others."""


def hold_out(batches: Iterable[Any], share: float, seed: int) -> tuple[Iterable[Any], list[Any]]:
    """Training data without a share of its inputs, and batches of these, read once.

    A list gives its last batches, a loader samples from all over its dataset. Other iterables, and loaders
    with samplers of their own, may have every input in every epoch: nothing can be held out of them.
    """
    if isinstance(batches, DataLoader) and _is_plain(batches):
        return _split_loader(batches, share, seed)
    if isinstance(batches, list | tuple) and len(batches) > 1:
        count = max(round(share * len(batches)), 1)
        return batches[:-count], list(batches[-count:])
    return batches, []


def split_places(total: int, share: float, fewest: int) -> tuple[list[int], list[int]]:
    """Which of `total` inputs are trained on, and which are held out: none, where fewer than `fewest` remained."""
    count = min(max(round(share * total), 1), MOST_INPUTS) if share else 0
    if total - count < max(fewest, 1):
        count = 0
    held = even_places(total, count)
    return sorted(set(range(total)) - set(held)), held


def even_places(total: int, count: int) -> list[int]:
    """Places of `count` inputs from all over a dataset, which is often sorted."""
    return [(2 * number + 1) * total // (2 * count) for number in range(count)]


def read_once(batches: Iterable[Any], seed: int) -> list[Any]:
    """All batches, the same in every process and after a restart, whatever draws them at random."""
    before = random_state()
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002, the one that augmentations use
    random.seed(seed)
    try:
        return list(batches)
    finally:
        restore_random_state(before)


def _is_plain(loader: DataLoader[Any]) -> bool:
    sampler = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler or isinstance(loader.dataset, IterableDataset):
        return False
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return isinstance(sampler, SequentialSampler)


def _split_loader(loader: DataLoader[Any], share: float, seed: int) -> tuple[DataLoader[Any], list[Any]]:
    dataset: Any = loader.dataset
    assert loader.batch_size is not None
    rest, held = split_places(len(dataset), share, loader.batch_size if loader.drop_last else 1)
    if not held:
        return loader, []
    measured = _loader_like(loader, Subset(dataset, held), is_held_out=True)
    return _loader_like(loader, Subset(dataset, rest)), read_once(measured, seed)


def _loader_like(
    loader: DataLoader[Any], dataset: Dataset[Any], is_held_out: bool = False
) -> DataLoader[Any]:
    """A loader of a part of the dataset; held-out inputs come in order, and all of them."""
    shuffles = isinstance(loader.sampler, RandomSampler) and not is_held_out
    sampler = RandomSampler(dataset, generator=loader.sampler.generator) if shuffles else None  # type: ignore[arg-type, attr-defined]
    return DataLoader(
        dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last and not is_held_out,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=None if is_held_out else loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers and not is_held_out,
    )
