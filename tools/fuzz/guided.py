"""Packed files that reach new lines of the reader: `python -m tools.fuzz.guided CORPUS -max_total_time=600`.

Needs `pip install atheris`, which no extra of factorpack brings. Arguments are libFuzzer's. CORPUS is a folder that
is filled with the fuzzer's own valid files first. Every change is signed again, and judged as `tools.fuzz` does.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["factorpack.format", "factorpack.kinds", "factorpack.decoding"]):
    from tools.fuzz.reader import KINDS, Original, damaged, judge, originals

HOME = Path(tempfile.mkdtemp())
VALID = [original.blob for original in originals()]
NONE = Original(b"", originals()[0].schema, {})


def mutate(data: bytes, most_bytes: int, seed: int) -> bytes:
    """A forged file, where the data are still one that can be taken apart; otherwise one of the valid ones."""
    rng = random.Random(seed)
    try:
        changed = damaged(rng.choice(KINDS), data, rng)
    except Exception:
        changed = rng.choice(VALID)
    return changed[:most_bytes]


def read(data: bytes) -> None:
    (HOME / "file").write_bytes(data)
    judge(HOME / "file", NONE, True, random.Random(len(data)))


if __name__ == "__main__":
    corpus = Path(sys.argv[1])
    corpus.mkdir(parents=True, exist_ok=True)
    for index, blob in enumerate(VALID):
        (corpus / f"valid{index}").write_bytes(blob)
    atheris.Setup(sys.argv, read, custom_mutator=mutate)
    atheris.Fuzz()
