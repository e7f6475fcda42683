"""From a file on disk to the first prediction, in a process of its own. The study `runtime` uses it.

python -m benchmarks.first_prediction resnet18 fp32                        the checkpoint by load_state_dict
python -m benchmarks.first_prediction resnet18 dense packed.safetensors    a packed file, in any mode but auto

Prints the seconds of loading, and of loading and one forward pass on one image. With one thread it is
processor time, so that other work on the machine is not in it; with more threads it is wall-clock time.
Importing torch and making the model, which both need, come before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file

import factorpack as fp
from benchmarks.data import BUILDERS, checkpoint
from benchmarks.measure import one_thread_clock
from factorpack.runtime.apply import Mode

FP32 = "fp32"


def time_first_predictions(
    model: str, file: Path, modes: Sequence[str], threads: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """The fastest of some processes for the checkpoint and for each mode of a packed file, taken in turns."""
    cases = [(how, count) for count in threads for how in (FP32, *modes)]
    least: dict[tuple[str, int], dict[str, float]] = {}
    for _ in range(repeats):
        for how, count in cases:
            found = _run_in_process([model, how, str(file)], count)
            before = least.setdefault((how, count), found)
            least[how, count] = min(before, found, key=lambda each: each["total_s"])
    return [{"how": how, "threads": count} | least[how, count] for how, count in cases]


def _run_in_process(arguments: list[str], threads: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_prediction", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(model: str, how: str, file: str = "") -> None:
    net = BUILDERS[model]().eval()
    image = torch.zeros(1, 3, 224, 224)
    with torch.inference_mode():
        clock = one_thread_clock()
        started = clock()
        if how == FP32:
            net.load_state_dict(load_file(checkpoint(model)))
        else:
            fp.load(file).apply(net, cast(Mode, how))
        loaded = clock()
        net(image)
        predicted = clock()
    print(json.dumps({"load_s": loaded - started, "total_s": predicted - started}))


if __name__ == "__main__":
    main(*sys.argv[1:])
