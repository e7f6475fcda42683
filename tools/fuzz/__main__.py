"""Gives every reader what nobody would: `python -m tools.fuzz --what reader,sources --cases 100000 --seed 1`.

A case is fixed by its seed and its number. It may end well or with an error of ours, within its time and memory,
and in no other way. The counts are left as JSON in benchmarks/results/fuzz, and are written again every few thousand
cases: those of a run that was stopped stay. The exit status says whether all of this held.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from factorpack.format.atomic import atomic_write
from tools.fuzz import cli, inputs, reader, recipes
from tools.fuzz.loop import Outcome, Target, fuzz_in_pieces

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
    parser.add_argument(
        "--workers", type=int, default=1, help="processes to share the cases of each; 0: all cores"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    failed = 0
    for what in chosen.what.split(","):
        if what not in TARGETS:
            parser.error(f"there is no {what!r} to fuzz, known are {', '.join(TARGETS)}")
        outcome = Outcome()
        for outcome in fuzz_in_pieces(TARGETS[what], chosen.cases, chosen.seed, chosen.start, chosen.workers):
            record(what, chosen, outcome)
        show(what, outcome)
        failed += bool(outcome.violations)
    return min(failed, 1)


def record(what: str, chosen: argparse.Namespace, outcome: Outcome) -> None:
    """Leaves the counts so far as JSON."""
    chosen.results.mkdir(parents=True, exist_ok=True)
    first = f" --start {chosen.start}" if chosen.start else ""
    document = {
        "command": f"python -m tools.fuzz --what {what} --cases {chosen.cases} --seed {chosen.seed}{first}",
        "workers": chosen.workers,
        "cases": outcome.cases,
        "counts": dict(sorted(outcome.counts.items())),
        "violations": outcome.violations,
        "seconds": round(outcome.seconds, 1),
        "slowest_s": round(outcome.slowest_s, 3),
        "slowest": outcome.slowest,
        "most_bytes_over": outcome.most_bytes_over,
    }
    with atomic_write(chosen.results / f"{what}.json") as file:
        file.write(f"{json.dumps(document, indent=1)}\n".encode())


def show(what: str, outcome: Outcome) -> None:
    print(f"{what}: {outcome.cases} cases in {outcome.seconds:.0f} s: {dict(sorted(outcome.counts.items()))}")
    print(
        f"slowest {outcome.slowest_s:.3f} s ({outcome.slowest}), most bytes over {outcome.most_bytes_over}",
        flush=True,
    )
    for line in outcome.violations[:20]:
        print(line[:600], flush=True)


if __name__ == "__main__":
    sys.exit(main())
