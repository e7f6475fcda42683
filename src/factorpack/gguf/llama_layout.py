"""What llama.cpp must know of a Llama-like model: numbers from its config, and names and order of its tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from factorpack.errors import SourceError

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
"""The model types of transformers that are known, and what llama.cpp calls them."""
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""The parts of a block, as transformers and as llama.cpp name them."""
_IN_A_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
EMBEDDING, HEAD, ROPE = "token_embd.weight", "output.weight", "rope_freqs.weight"
_KEPT_ANYWAY = "rotary_emb.inv_freq"
"""Computed from the config, although old checkpoints hold it."""


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions are encoded."""

    base: float
    kind: str
    settings: Mapping[str, Any]

    def number(self, key: str) -> float:
        value = self.settings.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise SourceError(f"the config has the rope setting {key} {value!r}, expected a positive number")
        return float(value)

    def factors(self, head_width: int) -> Tensor | None:
        """By how much each frequency is slowed down, where the model is of the kind of Llama 3.1."""
        if self.kind != "llama3":
            return None
        factor, low, high = (self.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        exponents = torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
        wavelengths = 2 * math.pi * self.base**exponents
        turns = self.number("original_max_position_embeddings") / wavelengths
        share = ((turns - low) / (high - low)).clamp(0, 1)  # 1 where a position turns it often
        return (1 / ((1 - share) / factor + share)).float()


@dataclass(frozen=True, slots=True)
class Layout:
    """A model's sizes."""

    architecture: str
    blocks: int
    width: int
    inner_width: int
    heads: int
    kv_heads: int
    head_width: int
    positions: int
    words: int
    epsilon: float
    rope: Rope

    def name(self, tensor: str) -> str | None:
        """What llama.cpp calls a tensor; None for one that it computes itself."""
        stem, _, last = tensor.rpartition(".")
        found = _IN_A_LAYER.fullmatch(stem)
        if tensor.endswith(_KEPT_ANYWAY):
            return None
        if last in ("weight", "bias") and stem in _ENDS:
            return f"{_ENDS[stem]}.{last}"
        if last in ("weight", "bias") and found and found[2] in _LAYERS and int(found[1]) < self.blocks:
            return f"blk.{int(found[1])}.{_LAYERS[found[2]]}.{last}"
        raise SourceError(f"the tensor {tensor!r} has no place in a GGUF file of a {self.architecture} model")

    def required(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor that llama.cpp needs, with its shape; a head that is missing is the embedding."""
        query, key = self.heads * self.head_width, self.kv_heads * self.head_width
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (self.width,),
            "attn_q": (query, self.width),
            "attn_k": (key, self.width),
            "attn_v": (key, self.width),
            "attn_output": (self.width, query),
            "ffn_norm": (self.width,),
            "ffn_gate": (self.inner_width, self.width),
            "ffn_up": (self.inner_width, self.width),
            "ffn_down": (self.width, self.inner_width),
        }
        yield EMBEDDING, (self.words, self.width)
        yield "output_norm.weight", (self.width,)
        for block in range(self.blocks):
            yield from ((f"blk.{block}.{part}.weight", shape) for part, shape in shapes.items())

    def arranged(self, name: str, values: Tensor) -> Tensor:
        """A tensor as llama.cpp wants it: in a Llama's queries and keys, rows that turn together are neighbours."""
        part = name.split(".")[-2]
        if self.architecture != "llama" or part not in ("attn_q", "attn_k"):
            return values
        heads = self.heads if part == "attn_q" else self.kv_heads
        halves = values.reshape(heads, 2, self.head_width // 2, *values.shape[1:])
        return halves.transpose(1, 2).reshape(values.shape)


def read_layout(config: Mapping[str, Any]) -> Layout:
    """A model's sizes by its config; SourceError where llama.cpp would run another model than this."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise SourceError(
            f"the model is a {kind!r}, and a GGUF file can be made of {', '.join(ARCHITECTURES)}"
        )
    if config.get("hidden_act", "silu") != "silu" or config.get("use_sliding_window") is True:
        raise SourceError(
            "the model has another activation than silu, or a sliding window: llama.cpp has neither"
        )
    heads, width = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    head_width = _count(config, "head_dim") if config.get("head_dim") is not None else width // heads
    if head_width % 2 or not head_width:
        raise SourceError(f"the config has heads of {head_width} values, expected an even number")
    return Layout(
        ARCHITECTURES[kind],
        _count(config, "num_hidden_layers"),
        width,
        _count(config, "intermediate_size"),
        heads,
        _count(config, "num_key_value_heads") if config.get("num_key_value_heads") is not None else heads,
        head_width,
        _count(config, "max_position_embeddings"),
        _count(config, "vocab_size"),
        _positive(config, "rms_norm_eps"),
        _read_rope(config),
    )


def _read_rope(config: Mapping[str, Any]) -> Rope:
    """transformers 5 has one table for it, and earlier versions two entries."""
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(table, Mapping):
        raise SourceError(f"the config has the rope parameters {table!r}, expected a table")
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise SourceError(f"the model has the rope type {kind!r}, known are default, linear and llama3")
    if config.get("partial_rotary_factor", table.get("partial_rotary_factor", 1.0)) != 1.0:
        raise SourceError("the model turns only part of each head, which a GGUF file of a Llama cannot say")
    base = _positive({"rope_theta": table.get("rope_theta", config.get("rope_theta", 10000.0))}, "rope_theta")
    return Rope(base, kind, table)


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise SourceError(f"the config has {key} {value!r}, expected a positive integer")
    return value


def _positive(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
        raise SourceError(f"the config has {key} {value!r}, expected a positive number")
    return float(value)  # type: ignore[arg-type]
