"""The model card of a packed folder: the measured sizes of the file, and how to open it."""

from __future__ import annotations

from factorpack.calibration.model_folder import EXTRAS, Folder
from factorpack.printable import printable
from factorpack.size import SizeReport, TensorSize

_HOW = """```python
import factorpack as fp

model = fp.hub.from_pretrained("{folder}")  # needs pip install 'factorpack[{extra}]'
```
"""
_AUTO = """or, with transformers' own loader:

```python
import factorpack as fp
from transformers import {auto}

fp.hub.register()
model = {auto}.from_pretrained("{folder}")
```
"""


def card(name: str, like: Folder, report: SizeReport) -> str:
    """Markdown: sizes on disk, one line per tensor, and how to load the model. It claims no accuracy."""
    assert report.file_bytes is not None
    architecture = like.architecture
    use = [_HOW.format(folder=printable(name), extra=EXTRAS[like.library])]
    if like.library == "transformers":
        use.append(_AUTO.format(folder=printable(name), auto=_auto_class(architecture)))
    return "\n".join(
        [
            f"# {printable(name)}",
            "",
            f"The weights of a `{architecture}`, packed by factorpack: {report.file_bytes:,} bytes in the file, "
            f"{report.original_bytes:,} in FP32, {report.file_ratio:.2f} times smaller.",
            "",
            "The packed model's outputs were not measured here: compare it with the original on your own "
            "data before you rely on it.",
            "",
            "## Use",
            "",
            *use,
            "## Tensors",
            "",
            "| tensor | shape | bytes | bits per weight | stored as |",
            "|---|---|---|---|---|",
            *(_line(each) for each in report.tensors),
            "",
        ]
    )


def _line(size: TensorSize) -> str:
    count = max(size.original_bytes // 4, 1)
    shape = " x ".join(map(str, size.shape)) or "1"
    name = printable(size.name).replace("|", "\\|").replace("`", "'")
    return f"| `{name}` | {shape} | {size.bytes:,} | {8 * size.bytes / count:.2f} | {size.words} |"


def _auto_class(architecture: str) -> str:
    """The Auto class that opens an architecture, by transformers' naming convention."""
    for task in ("ForCausalLM", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"):
        if architecture.endswith(task):
            return f"AutoModel{task}"
    return "AutoModel"
