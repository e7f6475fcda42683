"""GGUF files of packed language models, for llama.cpp."""

from __future__ import annotations

from factorpack.gguf.write_gguf import Exported, export

__all__ = ["Exported", "export"]
