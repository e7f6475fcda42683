"""Real models at three sizes each, by the commands that a user types: bytes, quality and time."""

from __future__ import annotations

import resource
import shlex
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import factorpack as fp
from benchmarks.formatting import format_source, format_table, is_stored, load_result
from benchmarks.gallery_quality import MEASURES
from benchmarks.llamas import FETCHED
from factorpack.budget.goals import original_bytes
from factorpack.calibration.model_folder import PACKED_FILE
from factorpack.source import open_source

STUDY = "gallery"
MODEL_FOLDER = ".work/models"
Row = dict[str, Any]


def run(source: str, quality: str, count: int, runs: list[str], options: str = "") -> Row:
    """Each of `runs` are the options of one command; `quality` is measured on `count` inputs."""
    path = FETCHED / source
    judge = MEASURES[quality](path, count)
    rows = []
    for some in runs:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(_row(path, f"{some} {options}".strip(), judge, Path(folder)))
            print(rows[-1], flush=True)
    return {"original_bytes": original_bytes(open_source(path)), "words": judge.words, "rows": rows}


def _row(source: Path, options: str, judge: Any, folder: Path) -> Row:
    name = "small" if source.is_dir() else "small.safetensors"
    command = ["compress", f"{MODEL_FOLDER}/{source.name}", "-o", name, *shlex.split(options)]
    started, used = time.perf_counter(), _processor_seconds()
    words = [str(source) if word.startswith(MODEL_FOLDER) else word for word in command]
    subprocess.run([sys.executable, "-m", "factorpack", *words, "--quiet"], cwd=folder, check=True)
    seconds, processor = time.perf_counter() - started, _processor_seconds() - used
    file = folder / name / PACKED_FILE if source.is_dir() else folder / name
    return {
        "command": shlex.join(["factorpack", *command]),
        "bytes": file.stat().st_size,
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor, 1),
        "quality": judge.measure(dict(fp.load(file).state_dict())),
    }


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tabulate(case: str) -> str:
    """One row per command."""
    if not is_stored(STUDY, case):
        return "Not measured yet.\n"
    document = load_result(STUDY, case)
    result = document["result"]
    lines = [
        [
            f"`{row['command']}`",
            f"{row['bytes'] / 1e6:.2f}",
            f"{result['original_bytes'] / row['bytes']:.1f}",
            result["words"].format(**row["quality"]),
            f"{row['processor_seconds']:.0f}",
        ]
        for row in result["rows"]
    ]
    head = ["command", "MB", "times smaller", "quality", "processor seconds"]
    return f"{format_table(head, lines)}\n{format_source(document)}"


CASES = ("resnet18", "mobilenet_v2", "efficientnet_lite0", "minilm", "mpnet", "stories15m", "crepe")
TABLES = {f"gallery-{case.replace('_', '-')}": partial(tabulate, case) for case in CASES}
