"""ONNX files about as small as packed ones that run in any runtime: the graph rebuilds the weights."""

from __future__ import annotations

from factorpack.onnx.exporter import Exported, export

__all__ = ["Exported", "export"]
