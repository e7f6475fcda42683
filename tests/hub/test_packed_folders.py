"""Folders opened on their codes: the answers of the dense model bit for bit, which is never in memory."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.format.container import Reader, stored
from factorpack.format.encode_ahead import Stored, Streams
from factorpack.hub.places import Places
from factorpack.record import Encoded
from factorpack.runtime.packed_layers import PackedLayer
from factorpack.weight import Weight
from tests.forking import run_forked
from tests.helpers import assert_same_tensor
from tests.hub.conftest import llama

TOKENS = torch.tensor([[3, 17, 4, 95, 0, 21], [1, 2, 3, 4, 5, 6]])


@pytest.fixture
def small(folder: Path, tmp_path: Path) -> Path:
    fp.hub.save_pretrained(fp.compress(folder, fp.Scalar(4), progress=False), tmp_path / "small", folder)
    return tmp_path / "small"


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(input_ids=TOKENS).logits
    return found


def is_packed(model: nn.Module) -> bool:
    return any(isinstance(layer, PackedLayer) for layer in model.modules())


@pytest.mark.parametrize("mode", ["packed", "coded"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_logits_are_those_of_the_dense_model(small: Path, mode: Any, dtype: torch.dtype | None) -> None:
    model = fp.hub.from_pretrained(small, mode, dtype=dtype)
    dense = fp.hub.from_pretrained(small, dtype=dtype)
    assert is_packed(model)
    assert not model.training
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))
    assert_same_tensor(logits(model), logits(dense))
    assert {each.dtype for each in model.parameters()} == {dtype or torch.float32}
    assert model.config.dtype == dense.config.dtype == (dtype or torch.float32)  # type: ignore[union-attr]


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("mode", ["packed", "coded"])
def test_transformers_generates_as_with_the_dense_model(small: Path, mode: Any, cache: str | None) -> None:
    settings: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        "cache_implementation": cache,
        "pad_token_id": 0,
        "disable_compile": True,
    }
    mask = torch.ones_like(TOKENS)
    # Torch multiplies by a weight that requires a gradient in another order, and packed ones do not require it.
    dense = fp.hub.from_pretrained(small).requires_grad_(False)
    found, expected = (
        model.generate(TOKENS, attention_mask=mask, **settings)  # type: ignore[operator]
        for model in (fp.hub.from_pretrained(small, mode), dense)
    )
    assert torch.equal(found.sequences, expected.sequences)
    for own, other in zip(found.logits, expected.logits, strict=True):
        assert_same_tensor(own, other)


def test_a_limit_of_memory_and_auto(small: Path) -> None:
    expected = logits(fp.hub.from_pretrained(small))
    sizes = {
        mode: sum(each.nbytes for each in {*model.parameters(), *model.buffers()})
        for mode in ("coded", "packed")
        if (model := fp.hub.from_pretrained(small, mode))  # type: ignore[arg-type]
    }
    limit = sum(sizes.values()) // 2
    model = fp.hub.from_pretrained(small, "packed", max_memory=limit)
    held = sum(each.nbytes for each in {*model.parameters(), *model.buffers()})
    assert sizes["coded"] < held <= limit < sizes["packed"]
    assert_same_tensor(logits(model), expected)
    model = fp.hub.from_pretrained(small, "auto", {"input_ids": TOKENS}, max_memory=2 * limit)
    assert sum(each.nbytes for each in {*model.parameters(), *model.buffers()}) <= 2 * limit
    assert_same_tensor(logits(model), expected)


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, torch.device("cpu")])
@pytest.mark.parametrize("mode", ["dense", "packed"])
def test_device_maps(small: Path, mode: Any, device_map: Any) -> None:
    model = fp.hub.from_pretrained(small, mode, device_map=device_map)
    assert is_packed(model) == (mode == "packed")
    assert_same_tensor(logits(model), logits(fp.hub.from_pretrained(small)))


def test_a_device_for_every_name() -> None:
    places = Places({"model.layers": "cpu", "model": 0, "model.layers.3": "cuda:2"})
    assert places.of("model.layers.1.mlp.weight") == torch.device("cpu")
    assert places.of("model.layers.3.mlp.weight") == torch.device("cuda:2")
    assert places.of("model.layers3.weight") == torch.device("cuda:0")
    with pytest.raises(fp.PlanError, match=r"no device for 'lm_head\.weight', it has model\.layers, model"):
        places.of("lm_head.weight")
    with pytest.raises(fp.PlanError, match="has 'disk': packed weights are on a CPU or a GPU"):
        Places({"model": "disk"})


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize("mode", ["packed", "coded"])
def test_torch_compile(transformers: Any, tmp_path: Path, mode: Any) -> None:
    plain = llama(transformers, tied=True, layers=1)
    fp.hub.save_pretrained(fp.compress(plain, fp.Scalar(4), progress=False), tmp_path / "small", plain)
    model = fp.hub.from_pretrained(tmp_path / "small", mode)
    expected = logits(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled), expected)  # type: ignore[arg-type]


# The kernel's mark of one process, for each mode in a child that has imported everything. A model of one layer is
# opened before, so that only holding more of them shows.
SCRIPT = """
import ctypes, os, re, sys
from pathlib import Path
import torch
import factorpack as fp
from transformers import LlamaForCausalLM

def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
ctypes.CDLL(None).mallopt(-3, 1 << 16)  # large arrays are given back when they are freed
tokens = torch.arange(6)[None]
for mode in ("dense", "packed", "coded"):
    child = os.fork()
    if not child:
        with torch.inference_mode():
            fp.hub.from_pretrained(sys.argv[1], mode)(tokens)
            before = peak_bytes()
            fp.hub.from_pretrained(sys.argv[2], mode)(tokens)
        print(mode, peak_bytes() - before, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, mode
"""


def save_repeated(transformers: Any, path: Path, layers: int) -> int:
    """A packed model whose layers are all alike, so that each weight is encoded once; and its bytes in FP32."""
    plain = llama(transformers, tied=True, layers=layers, width=512)
    tensors: dict[str, Encoded] = {}
    made: dict[str, tuple[Encoded, Stored]] = {}
    streams = Streams()
    for name, value in plain.named_parameters():
        part = re.sub(r"layers\.\d+", "", name)
        if part not in made:
            encoded = (fp.Scalar(2) if value.dim() > 1 else fp.Keep()).encode(Weight(value.detach()))
            made[part] = encoded, stored(name, encoded)
        tensors[name], (row, stream) = made[part]
        streams.keep(name, tensors[name], (replace(row, name=name), stream))
    fp.hub.save_pretrained(fp.Packed(tensors, streams=streams), path, plain)
    return sum(each.nbytes for each in plain.parameters())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system has no /proc")
def test_the_dense_model_is_never_in_memory(transformers: Any, tmp_path: Path) -> None:
    sizes = {layers: save_repeated(transformers, tmp_path / str(layers), layers) for layers in (1, 12)}
    done = run_forked([sys.executable, "-c", SCRIPT, tmp_path / "1", tmp_path / "12"], check=True)
    grown = {mode: int(count) for mode, count in (line.split() for line in done.stdout.splitlines())}
    large = sizes[12] - sizes[1]
    assert grown["dense"] > 0.7 * large
    assert grown["packed"] < 0.35 * large
    assert grown["coded"] < 0.35 * large


@pytest.mark.parametrize("mode", ["dense", "packed"])
def test_every_tensor_is_decoded_once(small: Path, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, found = Reader.__getitem__, []

    def noted(self: Reader, name: str) -> Encoded:
        found.append(name)
        return read(self, name)

    monkeypatch.setattr(Reader, "__getitem__", noted)
    fp.hub.from_pretrained(small, mode)
    assert len(found) == len(set(found)) > 0


def test_weights_that_transformers_must_arrange_are_left_to_it(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a model keeps some modules in FP32, whatever its type."""
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"norm"})
    model = fp.hub.from_pretrained(small, dtype=torch.bfloat16)
    assert model.model.norm.weight.dtype == torch.float32  # type: ignore[union-attr]
    assert model.lm_head.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
