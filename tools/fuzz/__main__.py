"""Gives every reader what nobody would: `python -m tools.fuzz --what reader,sources --cases 100000 --seed 1`.

A case is fixed by its seed and its number. It may end well or with an error of ours, within its time and memory,
and in no other way. The counts are left as JSON in benchmarks/results/fuzz; the exit status says whether all of
this held.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tools.fuzz import cli, inputs, reader, recipes
from tools.fuzz.loop import Outcome, Target, fuzz

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "fuzz"
TARGETS: dict[str, Target] = {
    "reader": reader.TARGET,
    "sources": inputs.SOURCES,
    "folders": inputs.FOLDERS,
    "recipes": recipes.TARGET,
    "curves": inputs.CURVES,
    "checkpoints": inputs.CHECKPOINTS,
    "cli": cli.TARGET,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", default=",".join(TARGETS), help="some of %(default)s")
    parser.add_argument("--cases", type=int, default=3_000, help="of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="first case, to repeat one that failed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    failed = 0
    for what in chosen.what.split(","):
        if what not in TARGETS:
            parser.error(f"there is no {what!r} to fuzz, known are {', '.join(TARGETS)}")
        outcome = fuzz(TARGETS[what], chosen.cases, chosen.seed, chosen.start)
        record(chosen.results, what, chosen.seed, outcome)
        failed += bool(outcome.violations)
    return min(failed, 1)


def record(folder: Path, what: str, seed: int, outcome: Outcome) -> None:
    """Leaves the counts as JSON, and says them."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "command": f"python -m tools.fuzz --what {what} --cases {outcome.cases} --seed {seed}",
        "cases": outcome.cases,
        "counts": dict(sorted(outcome.counts.items())),
        "violations": outcome.violations,
        "seconds": round(outcome.seconds, 1),
        "slowest_s": round(outcome.slowest_s, 3),
        "slowest": outcome.slowest,
        "most_bytes_over": outcome.most_bytes_over,
    }
    (folder / f"{what}.json").write_text(json.dumps(document, indent=1) + "\n")
    shown = {key: document[key] for key in ("counts", "slowest_s", "slowest", "most_bytes_over")}
    print(f"{what}: {outcome.cases} cases in {outcome.seconds:.0f} s: {shown}", flush=True)
    for line in outcome.violations[:20]:
        print(line[:600], flush=True)


if __name__ == "__main__":
    sys.exit(main())
