"""A trained Llama of 15 million weights: our files beside torchao's and llama.cpp's, at their bytes."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import factorpack as fp
from benchmarks import language_peers as peers
from benchmarks.formatting import RESULTS, format_source, format_table, is_stored, load_result
from benchmarks.llamas import FETCHED, sampled_tokens
from benchmarks.measure import log_probabilities
from factorpack.calibration.synthetic import Synthetic, make_batches

Row = dict[str, Any]
STUDY = "language"
FOLDER = FETCHED / "stories15m"
HELD_SEED = 1
"""Of the texts that are measured on; those to calibrate on have seed 0."""


def run(who: str, held: int, length: int, **settings: Any) -> Row:
    """`who` is "peers" or "ours". Divergence is measured on `held` texts of `length` tokens that the model writes."""
    torch.manual_seed(0)
    model: nn.Module = fp.hub.from_pretrained(FOLDER)
    judge = _Judge(model, sampled_tokens(model, held, length, HELD_SEED))
    original = (FOLDER / "model.safetensors").stat().st_size
    rows = (_peer_rows if who == "peers" else _our_rows)(judge, length, **settings)
    return {"original_bytes": original, "tokens": judge.tokens.numel(), "rows": list(rows)}


class _Judge:
    """A model, and texts on which others are compared with it."""

    def __init__(self, model: nn.Module, tokens: Tensor) -> None:
        self.model, self.tokens = model, tokens
        self.other = copy.deepcopy(model)
        self.expected = [log_probabilities(model, {"input_ids": each}).float() for each in tokens.split(1)]

    def measure(self, state: dict[str, Tensor]) -> float:
        """Mean Kullback-Leibler divergence from the model, in nats per token."""
        self.other.load_state_dict(state)
        total = 0.0
        for before, each in zip(self.expected, self.tokens.split(1), strict=True):
            after = log_probabilities(self.other, {"input_ids": each}).float()
            total += float((before.exp() * (before - after)).sum())
        return total / self.tokens.numel()


def _peer_rows(
    judge: _Judge, length: int, tables: list[str], ftypes: list[list[str]], samples: int
) -> Iterator[Row]:
    """torchao's with each type of table; llama.cpp's with each file type, without and with an importance matrix."""
    texts = torch.cat([batch["input_ids"] for batch in _texts(judge.model, samples, length)])
    importance = peers.importance_of(FOLDER, judge.model, texts)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for table in tables:
            yield _peer_row(judge, peers.by_torchao(judge.model, table, place / "torchao.pt"))
        original = place / "f32.gguf"
        peers.write_original(FOLDER, original)
        for ftype in ftypes:
            for matrix in ({}, importance):
                given = peers.GGUFSettings(*ftype, importance=matrix)
                yield _peer_row(judge, peers.by_llama_cpp(FOLDER, original, given, place / "coded.gguf"))


def _texts(model: nn.Module, samples: int, length: int) -> list[Any]:
    return make_batches(model, Synthetic(length=length), samples, progress=False)


def _peer_row(judge: _Judge, made: peers.Made) -> Row:
    row = {
        "tool": made.tool,
        "setting": made.setting,
        "version": made.version,
        "bytes": made.bytes,
        "divergence": judge.measure(made.state),
        "types": made.types,
    }
    print(row, flush=True)
    return row


def _our_rows(judge: _Judge, length: int, samples: int, max_bytes: int, beside: str = "") -> Iterator[Row]:
    """From the weights alone and, with `samples` texts, calibrated. `beside` says whose file has `max_bytes`."""
    texts = _texts(judge.model, samples, length) if samples else []
    ways: list[dict[str, Any]] = [{}]
    if samples:
        ways.append({"calibration": texts, "planner": fp.Planner(samples=samples)})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "packed.safetensors"
        for data in ways:
            started = time.process_time()
            fp.save(fp.compress(judge.model, max_bytes=max_bytes, progress=False, **data), path)
            row = {
                "beside": beside,
                "calibrated": bool(data),
                "bytes": path.stat().st_size,
                "processor_seconds": round(time.process_time() - started, 1),
                "divergence": judge.measure(dict(fp.load(path).state_dict())),
            }
            print(row, flush=True)
            yield row


def _our_files() -> list[dict[str, Any]]:
    """The results of every size of ours."""
    return [load_result(STUDY, path.stem) for path in sorted((RESULTS / STUDY).glob("*-*.json"))]


def _frontier(rows: list[Row]) -> list[Row]:
    """A tool's files that none of its own beats in bytes and in divergence."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["bytes"], row["divergence"])):
        if not best or row["divergence"] < best[-1]["divergence"]:
            best.append(row)
    return best


def tabulate_headline() -> str:
    """The best files of each tool and all of ours, the largest first."""
    if not is_stored(STUDY, "peers"):
        return "Not measured yet.\n"
    theirs, ours = load_result(STUDY, "peers"), _our_files()
    rows = theirs["result"]["rows"]
    files = [
        row for tool in ("torchao", "llama.cpp") for row in _frontier([r for r in rows if r["tool"] == tool])
    ]
    files += {
        (_words(row), row["bytes"]): row for document in ours for row in document["result"]["rows"]
    }.values()
    original = theirs["result"]["original_bytes"]
    lines = [
        [
            _words(row),
            f"{row['bytes'] / 1e6:.2f}",
            f"{original / row['bytes']:.1f}",
            f"{row['divergence']:.4f}",
        ]
        for row in sorted(files, key=lambda row: -row["bytes"])
    ]
    head = [f"Llama of 15 million weights ({original / 1e6:.1f} MB)", "MB", "times smaller", "divergence"]
    return f"{format_table(head, lines)}\n{format_source(theirs, *ours)}"


def _words(row: Row) -> str:
    if "tool" in row:
        return f"{row['tool']} {row['setting']}"
    return f"**factorpack, {'texts it writes itself' if row['calibrated'] else 'no data'}**"


def tabulate_peers() -> str:
    """Every setting of the peers."""
    if not is_stored(STUDY, "peers"):
        return "Not measured yet.\n"
    document = load_result(STUDY, "peers")
    lines = [
        [
            f"{row['tool']}, {row['setting']}",
            f"{row['bytes']:,}",
            f"{document['result']['original_bytes'] / row['bytes']:.2f}",
            f"{row['divergence']:.4f}",
            ", ".join(f"{count} {name}" for name, count in sorted(row["types"].items())),
        ]
        for row in sorted(document["result"]["rows"], key=lambda row: -row["bytes"])
    ]
    versions = sorted({f"{row['tool']} by {_package(row)}" for row in document["result"]["rows"]})
    head = ["file", "bytes", "times smaller", "divergence", "types of its 43 matrices"]
    return f"{format_table(head, lines)}\n{'; '.join(versions)}.\n{format_source(document)}"


def _package(row: Row) -> str:
    package = "llama-cpp-python" if row["tool"] == "llama.cpp" else row["tool"]
    return f"{package} {row['version']}"


TABLES = {"language-headline": tabulate_headline, "language-peers": tabulate_peers}
