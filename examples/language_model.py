"""Compress a small language model to a folder, and measure perplexity before and after. Needs transformers."""

import argparse
import inspect
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import factorpack as fp
from factorpack.hub.texts import perplexity

LENGTH = 64


def windows() -> torch.Tensor:
    """A Python module's source in windows, one token per byte. Any text and tokenizer will do."""
    tokens = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


def trained(texts: torch.Tensor, steps: int = 80) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, steps)
    for _ in range(steps):
        batch = texts[torch.randint(len(texts), (16,))]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def main(folder: Path) -> None:
    found = windows()
    texts, unseen = found[:-100], list(found[-100:])
    model = trained(texts)
    batches = [{"input_ids": batch} for batch in texts[:256].split(64)]

    packed = fp.compress(model, ratio=8, calibration=batches)
    packed = fp.hub.save_pretrained(packed, folder / "small", like=model)
    restored = fp.hub.from_pretrained(folder / "small")

    print(
        f"{packed.size().file_ratio:.1f} times smaller:",
        *sorted(each.name for each in (folder / "small").iterdir()),
    )
    before, after = perplexity(model, unseen).perplexity, perplexity(restored, unseen).perplexity
    print(f"perplexity of unseen text: {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        main(Path(name))
