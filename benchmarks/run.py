"""The one harness: experiments/<study>/<case>.toml -> results/<study>/<case>.json.

python -m benchmarks.run                                  every case; those that train want a GPU
python -m benchmarks.run benchmarks/experiments/speed     the cases of one study
python -m benchmarks.run benchmarks/experiments/speed/resnet18.toml
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.measure import machine

ROOT = Path(__file__).parent
EXPERIMENTS, RESULTS = ROOT / "experiments", ROOT / "results"
STUDIES = {
    "speed": "benchmarks.studies.speed",
    "thresholding": "benchmarks.studies.thresholding",
    "cifar": "benchmarks.studies.cifar",
    "fewshot": "benchmarks.studies.fewshot",
    "rate": "benchmarks.studies.rate",
    "budget": "benchmarks.studies.budget",
    "ablation": "benchmarks.studies.budget",
    "ingredients": "benchmarks.studies.ingredients",
    "cost": "benchmarks.studies.cost",
    "timing": "benchmarks.studies.timing",
    "kept": "benchmarks.studies.kept",
    "codes": "benchmarks.studies.codes",
    "permute": "benchmarks.studies.permute",
    "baselines": "benchmarks.studies.baselines",
    "compare": "benchmarks.studies.compare",
    "paths": "benchmarks.studies.paths",
    "onnx": "benchmarks.studies.onnx",
    "runtime": "benchmarks.studies.runtime",
    "kernels": "benchmarks.studies.kernels",
    "resident": "benchmarks.studies.resident",
    "generate": "benchmarks.studies.generate",
    "overhead": "benchmarks.studies.overhead",
    "sentences": "benchmarks.studies.sentences",
    "scale": "benchmarks.studies.scale",
    "need": "benchmarks.studies.need",
    "recipes": "benchmarks.studies.recipes",
    "weights_alone": "benchmarks.studies.weights_alone",
    "peers": "benchmarks.studies.peers",
    "synthetic": "benchmarks.studies.synthetic",
    "language": "benchmarks.studies.language",
    "gallery": "benchmarks.studies.gallery",
}
"""Study -> the module whose `run(**case)` returns its result."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, default=[EXPERIMENTS])
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for case in _cases(arguments.paths):
        _run(case, arguments.results)


def _cases(paths: list[Path]) -> list[Path]:
    found = [case for path in paths for case in (sorted(path.rglob("*.toml")) if path.is_dir() else [path])]
    if not found:
        sys.exit(f"no experiment under {', '.join(map(str, paths))}")
    return found


def _run(case: Path, results: Path) -> None:
    study = case.parent.name
    if study not in STUDIES:
        sys.exit(f"unknown study {study!r}, known are {', '.join(STUDIES)}")
    settings: dict[str, Any] = tomllib.loads(case.read_text())
    print(f"{study}/{case.stem}", file=sys.stderr, flush=True)
    started = time.perf_counter()
    outcome = importlib.import_module(STUDIES[study]).run(**settings)
    document = {
        "command": f"python -m benchmarks.run benchmarks/experiments/{study}/{case.name}",
        "settings": settings,
        "machine": machine(),
        "seconds": round(time.perf_counter() - started, 1),
        "result": outcome,
    }
    target = results / study / f"{case.stem}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=1) + "\n")
    print(f"  {target} in {document['seconds']} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
