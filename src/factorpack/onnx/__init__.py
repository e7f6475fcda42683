"""ONNX files that are as small as packed ones and run in any runtime: weights are rebuilt by the graph."""

from __future__ import annotations

from factorpack.onnx.exporter import Exported, export

__all__ = ["Exported", "export"]
