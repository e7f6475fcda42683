"""Texts that a language model writes itself: every token is drawn from the model's own probabilities."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import device_of, run
from factorpack.errors import SourceError
from factorpack.passes.resident import resident_of
from factorpack.progress import Progress, Showing

WRITING_TEXTS = "writing texts"
TOKENS = "input_ids"
CACHED, RECOMPUTED = 64, 8
"""Texts that are written together: by a model that keeps keys and values, and by one that reads all again."""
TEXTS_PER_BATCH = 8
"""Texts of a calibration batch; one where the model is streamed, since the logits of several may not fit a GPU."""


def why_not_a_text(model: nn.Module) -> str | None:
    """Why a model cannot write texts; None for one that predicts the next token of any text."""
    if not any(isinstance(module, nn.Embedding) for module in model.modules()):
        return "it reads no tokens"
    probe = torch.tensor([[0, 0], [0, 1]], device=device_of(model))
    try:
        logits = _logits_of(run(model, _batch_of(model, probe)))
    except (SourceError, AttributeError) as error:
        return f"it does not run on tokens alone ({error})"
    if logits is None or logits.dim() != 3 or logits.shape[:2] != probe.shape:
        return "it returns no logits for each token"
    if not torch.allclose(logits[0, 0].float(), logits[1, 0].float(), rtol=1e-3, atol=1e-3):
        return "what it predicts at a token depends on later ones"
    return None


def sample_texts(model: nn.Module, samples: int, length: int, seed: int, progress: Showing) -> list[Any]:
    """Batches of `samples` texts of `length` tokens, or as many as the model has positions."""
    length = min(length, _positions(model) or length)
    generator = torch.Generator(device_of(model)).manual_seed(seed)
    at_once = CACHED if _keeps_states(model) else RECOMPUTED
    texts: list[Tensor] = []
    with (
        Progress(WRITING_TEXTS, samples * length, progress) as bar,
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        for start in range(0, samples, at_once):
            count = min(at_once, samples - start)
            texts.append(_write(model, count, length, generator, bar))
    per_batch = TEXTS_PER_BATCH if resident_of(model) is None else 1
    return [_batch_of(model, batch) for batch in torch.cat(texts).split(per_batch)]


def _write(model: nn.Module, count: int, length: int, generator: torch.Generator, bar: Progress) -> Tensor:
    """Texts (count, length), token by token."""
    tokens = torch.empty(count, length, dtype=torch.int64, device=generator.device)
    tokens[:, 0] = _first_tokens(model, count, generator)
    states: Any = None
    for place in range(1, length):
        logits, states = _predict(model, tokens[:, :place], states)
        tokens[:, place] = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)[:, 0]
        bar.advance("", count)
    return tokens


def _predict(model: nn.Module, tokens: Tensor, states: Any) -> tuple[Tensor, Any]:
    """Logits of the token after those of each text, and the keys and values of all read so far, if it has them."""
    if _keeps_states(model):
        output = model(input_ids=tokens[:, -1:], past_key_values=states, use_cache=True)
        states = getattr(output, "past_key_values", None)
        if states is not None:
            return output.logits[:, -1], states
    logits = _logits_of(run(model, _batch_of(model, tokens)))
    assert logits is not None
    return logits[:, -1], None


def _first_tokens(model: nn.Module, count: int, generator: torch.Generator) -> Tensor:
    """The token that begins a text, or random ones where the model names none."""
    probe = torch.zeros(1, 1, dtype=torch.int64, device=generator.device)
    logits = _logits_of(run(model, _batch_of(model, probe)))
    assert logits is not None
    begin = getattr(getattr(model, "config", None), "bos_token_id", None)
    if isinstance(begin, int) and 0 <= begin < logits.shape[-1]:
        return torch.full((count,), begin, device=generator.device)
    return torch.randint(logits.shape[-1], (count,), generator=generator, device=generator.device)


def _batch_of(model: nn.Module, tokens: Tensor) -> Any:
    """Tokens as the model takes them: by name, or as its one argument."""
    return {TOKENS: tokens} if TOKENS in inspect.signature(model.forward).parameters else tokens


def _keeps_states(model: nn.Module) -> bool:
    """Whether a model takes and returns the keys and values of tokens that it has read, as transformers' do."""
    return {TOKENS, "past_key_values", "use_cache"} <= inspect.signature(model.forward).parameters.keys()


def _positions(model: nn.Module) -> int | None:
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 1 else None


def _logits_of(output: Any) -> Tensor | None:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    return found if isinstance(found, Tensor) and found.is_floating_point() else None
