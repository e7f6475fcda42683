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
    """From the weights alone and, with `samples` texts, calibrated; a peer's file with the setting `beside` has
    `max_bytes`."""
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


def _ours() -> list[dict[str, Any]]:
    """The results of every size of ours, the largest first; where a size has two, the one that is calibrated."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted((RESULTS / STUDY).glob("*-*.json")):
        document = load_result(STUDY, path.stem)
        known = found.setdefault(_limit(document), document)
        if len(document["result"]["rows"]) > len(known["result"]["rows"]):
            found[_limit(document)] = document
    return [found[limit] for limit in sorted(found, reverse=True)]


def _limit(document: dict[str, Any]) -> int:
    limit: int = document["settings"]["max_bytes"]
    return limit


def tabulate_headline() -> str:
    """One row per size of ours, beside the peer whose bytes it has."""
    if not is_stored(STUDY, "peers"):
        return "Not measured yet.\n"
    theirs, ours = load_result(STUDY, "peers"), _ours()
    original = theirs["result"]["original_bytes"]
    known = {f"{row['bytes']} {row['setting']}": row for row in theirs["result"]["rows"]}
    lines = []
    for document in ours:
        limit, beside = _limit(document), document["settings"].get("beside", "")
        peer = known[f"{limit} {beside}"] if beside else None
        numbers = [f"{row['divergence']:.4f}" for row in document["result"]["rows"]]
        numbers += [""] * (2 - len(numbers))
        named = [f"{peer['tool']}, {beside}", f"{peer['divergence']:.4f}"] if peer else ["", ""]
        lines.append([named[0], f"{limit / 1e6:.2f}", f"{original / limit:.1f}", named[1], *numbers])
    head = [
        "Llama of 15 million weights",
        "MB",
        "times smaller",
        "theirs",
        "ours, no data",
        "ours, calibrated",
    ]
    return f"{format_table(head, lines)}\n{format_source(theirs, *ours)}"


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
