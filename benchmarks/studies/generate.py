"""A Llama that generates text from packed weights: memory, tokens a second, and the time to the first token."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import factorpack as fp
from benchmarks.formatting import format_source, format_table, is_stored, load_result
from benchmarks.llamas import Shape, random_llama, random_tokens
from benchmarks.training import device
from factorpack.record import Encoded
from factorpack.runtime.apply import resident_bytes
from factorpack.runtime.packed_weight import PackedWeight
from factorpack.weight import Weight

NOT_RUN = "Not stored yet: `python -m benchmarks.run benchmarks/experiments/generate/h200.toml` on a GPU.\n"
WAYS = ("bf16 file", "dense", "packed", "fixed")
"""Plain BF16 weights; then the packed file: decoded, entropy-coded on a GPU, and at fixed widths."""


def run(llama: dict[str, int], bits: float, prompt: int, tokens: int, rounds: int = 3) -> dict[str, Any]:
    """A random Llama whose codes have `bits` of entropy: every way opens it and continues one prompt."""
    shape = Shape(**llama)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder) / "plain", Path(folder) / "packed"
        model = random_llama(shape, torch.bfloat16)
        parameters = sum(each.numel() for each in model.parameters())
        model.save_pretrained(plain)  # type: ignore[operator]
        started = time.perf_counter()
        fp.hub.save_pretrained(fp.Packed(rounded(model, bits)), packed, model)
        print(f"  packed in {time.perf_counter() - started:.0f} s", flush=True)
        del model
        sizes = {
            path.name: sum(file.stat().st_size for file in path.glob("*.safetensors"))
            for path in (plain, packed)
        }
        words = random_tokens(shape.vocabulary, 1, prompt).to(device())
        rows = [_measure(way, plain if way == "bf16 file" else packed, words, tokens, rounds) for way in WAYS]
    return {
        "parameters": parameters,
        "file_bytes": sizes["packed"],
        "bf16_bytes": sizes["plain"],
        "ways": rows,
    }


def rounded(model: nn.Module, bits: float) -> dict[str, Encoded]:
    """Every matrix rounded to a step that leaves codes of about `bits` of entropy; the rest as it is."""
    found = {}
    for name, weight in model.named_parameters():
        value = weight.detach().float().cpu()
        if value.dim() < 2:
            found[name] = fp.Keep().encode(Weight(weight.detach().cpu()))
            continue
        step = value.std() * 2 ** (2.047 - bits)
        codes = (value / step).round().clamp(-128, 127).to(torch.int8)
        parts = {"codes": codes, "scale": step.half().view(1, 1)}
        found[name] = Encoded("scalar", tuple(value.shape), torch.bfloat16, parts, {"codes": 8})
    return found


def _measure(way: str, folder: Path, words: Tensor, tokens: int, rounds: int) -> dict[str, Any]:
    opened = _Opened(way, folder)
    row: dict[str, Any] = {"way": way, "first_token_s": _least(lambda: opened.first_token(words), 2)}
    row["resident_bytes"] = resident_bytes(opened.model)
    row["peak_bytes"] = opened.peak_bytes
    held = [module for module in opened.model.modules() if isinstance(module, PackedWeight)]
    row["packed_weights"], row["entropy_coded"] = len(held), sum(bool(weight.lanes) for weight in held)
    generated = opened.generate(words, tokens)
    row["eager_tokens_per_s"] = tokens / _least(lambda: opened.generate(words, tokens), rounds)
    stepper = Stepper(opened.model, words, tokens)
    row["same_tokens"] = stepper.run().tolist() == generated
    row["graph_failure"] = stepper.failure
    row["graph_tokens_per_s"] = (tokens - 1) / _least(stepper.run, rounds)
    print(f"  {row}", flush=True)
    return row


class _Opened:
    """A folder opened in one way, again and again."""

    def __init__(self, way: str, folder: Path) -> None:
        self.way, self.folder = way, folder
        self.peak_bytes: int | None = None
        self.model: nn.Module = nn.Module()

    def first_token(self, words: Tensor) -> None:
        """From the file, which is in the page cache, to a token."""
        self.model = nn.Module()
        _reset_peak()
        mode: Any = {"packed": "packed", "fixed": "packed"}.get(self.way, "dense")
        limit = 1 << 62 if self.way == "fixed" else None  # everything fits at fixed widths
        self.model = fp.hub.from_pretrained(
            self.folder, mode, max_memory=limit, dtype=torch.bfloat16, device_map=str(device())
        )
        self.model.requires_grad_(False)
        with torch.inference_mode():
            self.model(words).logits[:, -1].argmax(-1).tolist()
        self.peak_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None

    def generate(self, words: Tensor, tokens: int) -> list[int]:
        """As people call it."""
        found: Tensor = self.model.generate(  # type: ignore[operator]
            words,
            attention_mask=torch.ones_like(words),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        continued: list[int] = found[0, words.shape[1] :].tolist()
        return continued


class Stepper:
    """One token after the other with a static cache; on a GPU, a step is one CUDA graph."""

    def __init__(self, model: nn.Module, words: Tensor, tokens: int) -> None:
        from transformers import StaticCache

        self.model, self.words, self.tokens = model, words, tokens
        length = words.shape[1] + tokens
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.token = torch.zeros(1, 1, dtype=torch.long, device=words.device)
        self.place = torch.zeros(1, 1, dtype=torch.long, device=words.device)
        self.graph: Any = None
        self.failure = ""
        """Why a step is no graph, where it is none."""

    def _step(self) -> None:
        logits = self.model(
            self.token, position_ids=self.place, past_key_values=self.cache, use_cache=True
        ).logits
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.place += 1

    @torch.inference_mode()
    def run(self) -> Tensor:
        """The tokens that follow the prompt."""
        self.cache.reset()
        start = torch.arange(self.words.shape[1], device=self.words.device)[None]
        logits = self.model(
            self.words, position_ids=start, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.place.fill_(self.words.shape[1])
        found = [self.token.clone()]
        for _ in range(self.tokens - 1):
            if self.graph is not None:
                self.graph.replay()
            elif self.words.is_cuda and not self.failure:
                self._capture()
            else:
                self._step()
            found.append(self.token.clone())
        return torch.cat(found, 1)[0]

    def _capture(self) -> None:
        """The first step as it is called, which compiles kernels; a graph of it is captured, and not run, after it."""
        self._step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._step()
        except RuntimeError as error:
            self.failure = str(error).splitlines()[0]
        else:
            self.graph = graph


def _least(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def _reset_peak() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def tabulate() -> str:
    if not is_stored("generate", "h200"):
        return NOT_RUN
    document = load_result("generate", "h200")
    outcome = document["result"]
    lines = [
        [
            row["way"],
            f"{row['resident_bytes'] / 1e6:,.0f}",
            f"{row['resident_bytes'] / outcome['file_bytes']:.3f}",
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}",
            f"{row['first_token_s']:.2f}",
            f"{row['eager_tokens_per_s']:.1f}",
            f"{row['graph_tokens_per_s']:.1f}",
            "yes" if row["same_tokens"] else "no",
            f"{row['entropy_coded']} of {row['packed_weights']}" if row["packed_weights"] else "-",
        ]
        for row in outcome["ways"]
    ]
    head = ["way", "held, MB", "held / file", "peak, MB", "file to first token, s", "tokens per s, generate"]
    head += ["tokens per s, CUDA graph", "same tokens", "entropy-coded weights"]
    note = (
        f"{outcome['parameters'] / 1e9:.2f} billion random weights: {outcome['file_bytes'] / 1e6:,.0f} MB packed, "
        f"{outcome['bf16_bytes'] / 1e6:,.0f} MB in BF16.\n"
    )
    return f"{format_table(head, lines)}\n{note}{format_source(document)}"


TABLES = {"generate": tabulate}
