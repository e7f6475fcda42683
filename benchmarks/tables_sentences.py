"""The table of a sentence transformer's embeddings."""

from __future__ import annotations

from benchmarks.tables_common import markdown, result, source


def sentences() -> str:
    document = result("sentences", "minilm")
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
    head = [
        "all-MiniLM-L6-v2: times smaller, bytes on disk",
        "file, MB",
        "mean cosine to the original's embeddings",
        "least cosine",
        "rank correlation of pairwise similarities",
    ]
    words = (
        f"No training; calibrated on {settings['samples']} sentences, measured on {outcome['sentences']} of other "
        f"packages' docstrings, {outcome['tokens_not_calibrated_on']:.0%} of whose tokens calibration never showed."
    )
    return f"{markdown(head, rows)}\n{words}\n{source(document)}"


SENTENCES = {"sentences": sentences}
