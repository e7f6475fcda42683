"""Without an extra's package, one sentence says what needs it and the command to type."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import factorpack as fp
from factorpack.calibration.model_folder import import_library
from factorpack.checkpoints.gguf_file import _gguf
from factorpack.comparison.figure import pareto
from factorpack.comparison.nncodec import NNCodec
from factorpack.digits import digits
from factorpack.engine import Ray, Task
from factorpack.hub import quantizer
from factorpack.tune.images import _open_image
from factorpack.tune.processes import open_accelerator
from tests.helpers import seeded

ROOT = Path(__file__).parent.parent
NOT_OURS = {"docs", "bench", "dev"}
"""Extras that the package itself imports nothing of."""


def export_onnx(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    packed = fp.compress(model, fp.Scalar(4), progress=False)
    fp.onnx.export(packed, model, seeded(1, 8), folder / "net.onnx")


def export_gguf(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    packed = fp.compress({"a.weight": torch.eye(32)}, fp.Scalar(4), progress=False)
    fp.gguf.export(packed, folder / "net.gguf", folder)


NEEDS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "the demo's digits": ("demo", "sklearn", lambda _: digits()),
    "fine-tuning": ("train", "accelerate", lambda _: open_accelerator("no")),
    "images": ("images", "PIL", lambda folder: _open_image(folder / "a.png")),
    "a figure": ("plots", "matplotlib", lambda _: pareto([], None)),
    "a model's folder": ("hf", "transformers", lambda _: import_library("transformers")),
    "transformers' from_pretrained": (
        "hf",
        "transformers",
        lambda _: quantizer.register.__wrapped__(),
    ),
    "a diffusers folder": ("diffusers", "diffusers", lambda _: import_library("diffusers")),
    "an ONNX file": ("onnx", "onnx", export_onnx),
    "an ONNX graph": ("onnx", "onnxscript", export_onnx),
    "reading quantized GGUF": ("gguf", "gguf", lambda _: _gguf()),
    "writing GGUF": ("gguf", "gguf", export_gguf),
    "a cluster": ("ray", "ray", lambda _: list(Ray().run([Task("one", print)]))),
    "NNCodec": ("nncodec", "nncodec", lambda _: NNCodec.version()),
}


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Makes a package and what is imported of it look as if it were not installed."""
    for name in [package, *(each for each in sys.modules if each.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("factorpack.comparison.nncodec.version", version)


@pytest.mark.parametrize("work", NEEDS)
def test_an_absent_package_is_one_sentence(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, package, use = NEEDS[work]
    hide(monkeypatch, package)
    with pytest.raises(fp.FactorpackError) as raised:
        use(tmp_path)
    assert f"pip install 'factorpack[{extra}]'" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_every_extra_is_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - NOT_OURS
    assert extras == {extra for extra, _, _ in NEEDS.values()}
