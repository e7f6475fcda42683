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
from benchmarks.formatting import format_source, format_table, is_stored, load_result
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
    rows = _peer_rows(judge, length, **settings) if who == "peers" else _our_rows(judge, length, **settings)
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
    judge: _Judge, length: int, tables: list[str], ftypes: list[str], samples: int
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
                yield _peer_row(
                    judge, peers.by_llama_cpp(FOLDER, original, ftype, matrix, place / "coded.gguf")
                )


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


def _our_rows(
    judge: _Judge, length: int, samples: int, ratios: list[float], beside: list[str]
) -> Iterator[Row]:
    """At the bytes of the peers' settings `beside`, and at `ratios`: from the weights alone, and calibrated."""
    texts = _texts(judge.model, samples, length)
    original = (FOLDER / "model.safetensors").stat().st_size
    theirs = {row["setting"]: row["bytes"] for row in _stored_rows("peers")}
    goals = [(setting, theirs[setting]) for setting in beside]
    goals += [("", int(original / ratio)) for ratio in ratios]
    with tempfile.TemporaryDirectory() as folder:
        for setting, limit in sorted(goals, key=lambda goal: -goal[1]):
            for calibrated in (False, True):
                data = {"calibration": texts, "planner": fp.Planner(samples=samples)} if calibrated else {}
                curves = Path(folder) / f"{calibrated}.json"
                started = time.process_time()
                path = Path(folder) / "packed.safetensors"
                packed = fp.compress(judge.model, max_bytes=limit, curves=curves, progress=False, **data)
                fp.save(packed, path)
                row = {
                    "beside": setting,
                    "calibrated": calibrated,
                    "bytes": path.stat().st_size,
                    "divergence": judge.measure(dict(fp.load(path).state_dict())),
                    "processor_seconds": round(time.process_time() - started, 1),
                }
                print(row, flush=True)
                yield row


def _stored_rows(case: str) -> list[Row]:
    rows: list[Row] = load_result(STUDY, case)["result"]["rows"] if is_stored(STUDY, case) else []
    return rows


def _beside(bytes_: int, setting: str) -> list[str]:
    """Our two divergences at a peer's bytes."""
    found = [row for row in _stored_rows("ours") if row["beside"] == setting]
    assert all(row["bytes"] <= bytes_ for row in found)
    return [f"{row['divergence']:.4f}" for row in sorted(found, key=lambda row: row["calibrated"])]


def tabulate_headline() -> str:
    """The peers' settings that ours are beside, then our smaller files."""
    theirs, ours = load_result(STUDY, "peers"), load_result(STUDY, "ours")
    original = theirs["result"]["original_bytes"]
    wanted = {row["beside"] for row in ours["result"]["rows"]}
    lines = [
        [
            f"{row['tool']} {row['setting']}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{original / row['bytes']:.1f}",
            f"{row['divergence']:.4f}",
            *_beside(row["bytes"], row["setting"]),
        ]
        for row in sorted(theirs["result"]["rows"], key=lambda row: -row["bytes"])
        if row["setting"] in wanted
    ]
    alone = [row for row in ours["result"]["rows"] if not row["beside"]]
    for plain, calibrated in zip(alone[::2], alone[1::2], strict=True):
        size = max(plain["bytes"], calibrated["bytes"])
        numbers = [f"{row['divergence']:.4f}" for row in (plain, calibrated)]
        lines.append(["ours alone", f"{size / 1e6:.2f}", f"{original / size:.1f}", "", *numbers])
    head = ["15 M Llama", "MB", "times smaller", "theirs", "ours, no data", "ours, calibrated"]
    return f"{format_table(head, lines)}\n{format_source(theirs, ours)}"


def tabulate_peers() -> str:
    """Every setting of the peers."""
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
