"""The table of docs/onnx.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.tables_common import markdown, result, source

_WAYS = {"FP32": "FP32", "planned": "`ratio=12`", "method": "`QSPCA(rank=128, latent_bits=3)`"}


def exported() -> str:
    documents = {model: result("onnx", model) for model in ("resnet18", "mobilenet_v2")}
    columns = {
        f"{model}, {words}": document["result"][way]
        for model, document in documents.items()
        for way, words in _WAYS.items()
    }
    lines: dict[str, Callable[[dict[str, Any]], str]] = {
        ".onnx, MB": lambda r: f"{r['onnx_bytes'] / 1e6:.2f}",
        "packed file, MB": lambda r: f"{r['file_bytes'] / 1e6:.2f}",
        "codes at one width a tensor, MB": lambda r: f"{r['fixed_width_bytes'] / 1e6:.2f}",
        "largest difference from torch's logits": lambda r: f"{r['largest_difference']:.1e}",
        "... with nothing folded": lambda r: f"{r['largest_difference_unfolded']:.1e}",
        "largest logit": lambda r: f"{r['largest_logit']:.1f}",
        "opening a session, s": lambda r: f"{r['load_s']:.2f}",
        "16 pictures, s": lambda r: f"{r['answer_s']:.2f}",
        "... with nothing folded, s": lambda r: f"{r['answer_unfolded_s']:.2f}",
    }
    rows = [[label, *(cell(each) for each in columns.values())] for label, cell in lines.items()]
    return f"{markdown(['', *columns], rows)}\n" + "".join(map(source, documents.values()))


EXPORTED: dict[str, Callable[[], str]] = {"exported": exported}
