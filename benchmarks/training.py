"""Training in the studies: batches that live on the device, FP32 nets to start from, a pool of workers."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.data import BUILDERS, Images, cifar10, normalized
from benchmarks.measure import top1
from factorpack.format.atomic import atomic_write

Case = dict[str, Any]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Augmented:
    """Shuffled batches of (normalized images, labels): random crops and flips, drawn on the device.

    Images are byte tensors. With `pad`, a crop of the same side from the image padded by that much;
    otherwise a crop of `crop` from the larger image.
    """

    def __init__(self, images: Images, batch: int, *, pad: int = 0, crop: int = 0, seed: int = 0) -> None:
        pixels, labels = images
        self.pixels = nn.functional.pad(pixels.to(device()), (pad,) * 4) if pad else pixels.to(device())
        self.labels = labels.to(device())
        self.side = crop or pixels.shape[-1]
        self.batch = batch
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.labels) // self.batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.labels), generator=self.generator)
        for rows in order.split(self.batch)[: len(self)]:
            picked = rows.to(self.pixels.device)
            yield normalized(self._crop(self.pixels[picked])), self.labels[picked]

    def _crop(self, pixels: Tensor) -> Tensor:
        count, room = len(pixels), pixels.shape[-1] - self.side + 1
        across = torch.arange(self.side)
        top, left = (torch.randint(room, (count, 1), generator=self.generator) + across for _ in range(2))
        flip = torch.rand(count, 1, generator=self.generator) < 0.5
        left = torch.where(flip, left.flip(1), left)
        index = torch.arange(count)[:, None, None]
        where = [each.to(pixels.device) for each in (index, top[:, :, None], left[:, None, :])]
        return pixels.permute(0, 2, 3, 1)[where[0], where[1], where[2]].permute(0, 3, 1, 2)


def cifar_net(model: str, seed: int, epochs: int) -> tuple[nn.Module, float]:
    """A net for CIFAR-10 and its test accuracy, trained once and kept in a temporary folder."""
    cached = Path(tempfile.gettempdir()) / f"factorpack-{model}-{seed}-{epochs}.pt"
    net: nn.Module = BUILDERS[model](num_classes=10, small_input=True)
    if not cached.exists():
        torch.manual_seed(seed)
        net = BUILDERS[model](num_classes=10, small_input=True)
        _train(net.to(device()), epochs, seed)
        with atomic_write(cached) as file:
            torch.save(net.state_dict(), file)
    net.load_state_dict(torch.load(cached, weights_only=True, map_location="cpu"))
    net.to(device()).eval()
    return net, top1(net, cifar10()[1], batch=500)


def _train(net: nn.Module, epochs: int, seed: int) -> None:
    batches = Augmented(cifar10()[0], 256, pad=4, seed=seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps, pct_start=0.25)
    net.train()
    for _ in range(epochs):
        for images, labels in batches:
            with torch.autocast(device().type, torch.bfloat16):
                loss = nn.functional.cross_entropy(net(images), labels, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def case_of(method: Case, schedule: Case) -> Case:
    """A method and its schedule: the study's own, where the method's entry does not say otherwise."""
    plain = {field: value for field, value in method.items() if field != "schedule"}
    return {"method": plain, "schedule": schedule | method.get("schedule", {})}


def share_cores(workers: int) -> None:
    """Leaves each of so many processes its share of the cores."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def run_parallel(work: Callable[[Case], Case], cases: list[Case], workers: int) -> list[Case]:
    """`work` on every case, some at a time in processes of their own, results in the cases' order."""
    results: dict[int, Case] = {}
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(work, case): number for number, case in enumerate(cases)}
        for future in as_completed(futures):
            number = futures[future]
            results[number] = future.result()
            passed = time.perf_counter() - started
            print(
                f"  {len(results)}/{len(cases)} {passed:.0f} s {results[number]}", file=sys.stderr, flush=True
            )
    return [results[number] for number in range(len(cases))]
