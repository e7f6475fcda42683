"""Tiny models and a tokenizer, built here: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "dog", ".")


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = pytest.importorskip("transformers", reason="opening models needs the hf extra")
    found.utils.logging.disable_progress_bar()
    return found


def llama(transformers: Any, tied: bool, layers: int = 2, width: int = 64) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(config).eval()
    return model


def bert(transformers: Any, layers: int = 1, width: int = 64) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=96,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.BertModel(config).eval()
    return model


def save_tokenizer(transformers: Any, folder: Path) -> None:
    """Whole words, each a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(("[UNK]", "[PAD]", *WORDS))}, "[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n".join("the cat sat on a mat and looked at the dog ." for _ in range(40)))
    return path


def save_llama(transformers: Any, path: Path, tied: bool, layers: int = 2) -> Path:
    """A language model in shards, with its tokenizer."""
    llama(transformers, tied, layers).save_pretrained(path, max_shard_size="60kB")  # type: ignore[operator]
    save_tokenizer(transformers, path)
    assert (path / "model.safetensors.index.json").is_file()
    return path


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, transformers: Any, tmp_path: Path) -> Path:
    return save_llama(transformers, tmp_path / "llama", request.param)
