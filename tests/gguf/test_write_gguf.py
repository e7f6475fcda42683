"""GGUF files of packed language models: read back by the gguf package, and by transformers as the same model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.errors import PlanError, SourceError, WeightError
from factorpack.gguf.llama_layout import Rope, read_layout
from factorpack.gguf.token_lists import _LETTERS, _REST
from factorpack.source import open_source
from tests.commands.running import failure, ok
from tests.helpers import assert_same_tensor
from tests.hub.conftest import llama

NEEDED = pytest.mark.usefixtures("gguf")
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}


def weights(dtype: torch.dtype = torch.float32, head: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (48, 64),
        "model.norm.weight": (64,),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.post_attention_layernorm.weight": (64,),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.self_attn.k_proj.weight": (32, 64),
        "model.layers.0.self_attn.v_proj.weight": (32, 64),
        "model.layers.0.self_attn.o_proj.weight": (64, 64),
        "model.layers.0.mlp.gate_proj.weight": (96, 64),
        "model.layers.0.mlp.up_proj.weight": (96, 64),
        "model.layers.0.mlp.down_proj.weight": (64, 96),
    }
    state = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return state | ({"lm_head.weight": state["model.embed_tokens.weight"] + 1} if head else {})


@pytest.fixture
def gguf() -> Any:
    return pytest.importorskip("gguf", reason="GGUF files are written by the gguf extra")


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = pytest.importorskip("transformers", reason="opening models needs the hf extra")
    found.utils.logging.disable_progress_bar()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "llama"


def packed(state: dict[str, Tensor]) -> fp.Packed:
    return fp.compress(state, fp.Keep(), progress=False)


def written(state: dict[str, Tensor], folder: Path, **settings: Any) -> Path:
    path = folder.parent / "net.gguf"
    fp.gguf.export(packed(state), path, folder, **{"tokenizer": False, **settings})
    assert sorted(each.name for each in folder.parent.iterdir()) == ["llama", "net.gguf"]
    return path


def values(gguf: Any, path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@NEEDED
def test_transformers_opens_the_same_model(transformers: Any, tmp_path: Path, tied: bool, kind: str) -> None:
    model: Any = llama(transformers, tied, layers=2)
    if kind == "qwen2":
        sizes = {
            key: getattr(model.config, key) for key in CONFIG if key.startswith(("num_", "hid", "int", "voc"))
        }
        torch.manual_seed(0)
        model = transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**sizes, tie_word_embeddings=tied)
        ).eval()
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(value)
    small = fp.compress(model, fp.Scalar(bits=8), progress=False)
    fp.hub.save_pretrained(small, tmp_path / "small", like=model)
    made = fp.gguf.export(small, tmp_path / "net.gguf", tmp_path / "small", tokenizer=False)
    assert made.bytes == (tmp_path / "net.gguf").stat().st_size
    assert ("output.weight" in open_source(tmp_path / "net.gguf").entries) != tied
    opened = type(model).from_pretrained(tmp_path, gguf_file="net.gguf", dtype=torch.float32).eval()
    ids = torch.arange(20).reshape(2, 10)
    with torch.inference_mode():
        expected = fp.hub.from_pretrained(tmp_path / "small")(ids).logits
        torch.testing.assert_close(opened(ids).logits, expected)


def test_every_tensor_is_where_llama_cpp_looks_for_it(gguf: Any, folder: Path) -> None:
    state = weights()
    path = written(state, folder)
    opened = open_source(path).entries
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, value in state.items():
        found = opened[known.get_name(name, try_suffixes=(".weight",))].load()
        if "q_proj" in name or "k_proj" in name:
            heads = 4 if "q_proj" in name else 2
            found = found.reshape(heads, 8, 2, 64).transpose(1, 2).reshape(value.shape)
        assert_same_tensor(found, value)
    said = values(gguf, path)
    assert said["llama.attention.head_count_kv"] == 2
    assert said["llama.rope.freq_base"] == 5000.0
    assert said["tokenizer.ggml.model"] == "no_vocab"
    assert said["general.file_type"] == gguf.LlamaFileType.ALL_F32


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(None, "BF16"), ("f32", "F32"), ("f16", "F16"), ("bf16", "BF16"), ("q8_0", "Q8_0"), ("q4_0", "Q4_0")],
)
def test_types(gguf: Any, folder: Path, dtype: str | None, kind: str) -> None:
    state = weights(torch.bfloat16)
    reader = gguf.GGUFReader(written(state, folder, dtype=dtype))
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {types[name] for name in types if not name.endswith("norm.weight")} == {kind}
    assert {types[name] for name in types if name.endswith("norm.weight")} == {"F32"}
    down = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_down.weight")
    found = gguf.quants.dequantize(np.array(down.data), down.tensor_type)
    expected = state["model.layers.0.mlp.down_proj.weight"].float().numpy()
    if kind in gguf.GGMLQuantizationType.__members__ and kind.startswith("Q"):
        expected = gguf.quants.dequantize(gguf.quants.quantize(expected, down.tensor_type), down.tensor_type)
    np.testing.assert_array_equal(found, expected)


@NEEDED
def test_rows_that_are_no_whole_blocks_are_not_quantized(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 90}))
    state = {
        name: value[:90] if "gate" in name or "up_" in name else value for name, value in weights().items()
    }
    state["model.layers.0.mlp.down_proj.weight"] = state["model.layers.0.mlp.down_proj.weight"][
        :, :90
    ].contiguous()
    made = fp.gguf.export(packed(state), folder.parent / "a.gguf", folder, dtype="q8_0", tokenizer=False)
    assert made.types == {"q8_0": 8, "f16": 1, "f32": 3}


@NEEDED
def test_values_that_a_type_does_not_hold(folder: Path) -> None:
    state = weights()
    state["model.layers.0.mlp.up_proj.weight"][3, 4] = -1e5
    with pytest.raises(
        WeightError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' has values up to 1e\+05"
    ):
        written(state, folder, dtype="f16")
    assert [each.name for each in folder.parent.iterdir()] == ["llama"]
    written(state, folder, dtype="bf16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, r"a 'bert', and a GGUF file can be made of llama, mistral, qwen2"),
        ({"model_type": ["llama"]}, "can be made of"),
        ({"hidden_act": "gelu"}, "another activation than silu"),
        ({"num_attention_heads": 0}, "num_attention_heads 0, expected a positive integer"),
        ({"num_attention_heads": True}, "num_attention_heads True"),
        ({"hidden_size": None}, "hidden_size None"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps 'x', expected a positive number"),
        ({"head_dim": 7}, "heads of 7 values"),
        ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn'"),
        ({"rope_scaling": 3}, "rope parameters 3"),
        ({"partial_rotary_factor": 0.5}, "turns only part"),
        ({"intermediate_size": 97}, r"mlp\.gate_proj\.weight' is \(96, 64\), by the config \(97, 64\)"),
        ({"num_hidden_layers": 2}, r"no tensor for 'blk\.1\.attn_norm\.weight'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope setting low_freq_factor None"),
    ],
    ids=str,
)
@NEEDED
def test_what_no_gguf_file_is_made_of(folder: Path, changes: dict[str, Any], message: str) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(SourceError, match=message):
        written(weights(), folder)
    assert not (folder.parent / "net.gguf").exists()


@NEEDED
def test_tensors_of_another_model(folder: Path) -> None:
    state = weights()
    with pytest.raises(SourceError, match=r"'model\.layers\.0\.mlp\.router\.weight' has no place"):
        written({**state, "model.layers.0.mlp.router.weight": torch.ones(2)}, folder)
    del state["model.norm.weight"]
    with pytest.raises(SourceError, match=r"no tensor for 'output_norm\.weight'"):
        written(state, folder)


@NEEDED
def test_old_files_hold_frequencies_too(folder: Path) -> None:
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert "rope_freqs.weight" not in open_source(written({**weights(head=False), **more}, folder)).entries


def test_frequencies_of_llama_3() -> None:
    """Those that transformers computes, divided by the plain ones."""
    transformers = pytest.importorskip("transformers", reason="compared with the hf extra's")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = transformers.LlamaConfig(head_dim=64, rope_parameters=scaling, max_position_embeddings=131072)
    expected = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].double()
    plain = 500000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    found = Rope(500000.0, "llama3", scaling).factors(64)
    assert found is not None
    torch.testing.assert_close(plain / found.double(), expected, rtol=1e-5, atol=0)


@NEEDED
def test_frequencies_are_in_the_file(folder: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling["original_max_position_embeddings"] = 64
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_scaling": scaling}))
    found = open_source(written(weights(), folder)).entries["rope_freqs.weight"].load()
    expected = read_layout({**CONFIG, "rope_scaling": scaling}).rope.factors(16)
    assert expected is not None
    assert_same_tensor(found, expected)


def test_without_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(PlanError, match=r"by the gguf package: pip install 'factorpack\[gguf\]'"):
        written(weights(), folder)


BYTES = {f"<0x{number:02X}>": 3 + number for number in range(4)}
MERGES = ["a b", "ab c", "▁ a"]
SPM = {
    "model": {
        "type": "BPE",
        "byte_fallback": True,
        "unk_token": "<unk>",
        "vocab": {
            "<unk>": 0, "<s>": 1, "</s>": 2, **BYTES, "a": 7, "b": 8, "c": 9, "ab": 10, "abc": 11, "▁": 12, "▁a": 13
        },
        "merges": MERGES,
    },
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]},
    "added_tokens": [
        {"id": 0, "content": "<unk>", "special": True},
        {"id": 1, "content": "<s>", "special": True},
        {"id": 2, "content": "</s>", "special": True},
        {"id": 14, "content": "<tool>", "special": False},
    ],
}  # fmt: skip


def with_tokenizer(folder: Path, document: object, settings: object = None) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings if settings is not None else {}))
    return folder


def test_a_tokenizer_that_merges_by_score(gguf: Any, folder: Path) -> None:
    settings = {
        "eos_token": {"content": "</s>"},
        "bos_token": "<s>",
        "add_bos_token": True,
        "chat_template": "{{x}}",
    }
    said = values(gguf, written(weights(), with_tokenizer(folder, SPM, settings), tokenizer=True))
    tokens, scores = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.scores"]
    assert tokens[10:16] == ["ab", "abc", "▁", "▁a", "<tool>", "[PAD15]"]
    assert len(tokens) == 48
    ranked = [scores[tokens.index(text)] for text in ("ab", "abc", "▁a", "c")]
    assert ranked == sorted(ranked, reverse=True)
    kinds = said["tokenizer.ggml.token_type"]
    assert [kinds[n] for n in (0, 1, 3, 7, 14, 15)] == [2, 3, 6, 1, 4, 5]
    assert (said["tokenizer.ggml.model"], said["tokenizer.ggml.add_space_prefix"]) == ("llama", True)
    assert (said["tokenizer.ggml.bos_token_id"], said["tokenizer.ggml.eos_token_id"]) == (1, 2)
    assert (said["tokenizer.ggml.add_bos_token"], said["tokenizer.chat_template"]) == (True, "{{x}}")


def split_by(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}}


@pytest.mark.parametrize(
    ("steps", "split"),
    [
        ([split_by(_LETTERS + r"\p{N}{1,3}" + _REST), {"type": "ByteLevel"}], "llama-bpe"),
        ([split_by(_LETTERS + r"\p{N}" + _REST), {"type": "ByteLevel"}], "qwen2"),
        ([{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}], "smollm"),
        ([{"type": "ByteLevel"}], "gpt-2"),
    ],
)  # fmt: skip
def test_a_tokenizer_of_bytes(gguf: Any, folder: Path, steps: list[Any], split: str) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    before = {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0]
    said = values(
        gguf,
        written(weights(), with_tokenizer(folder, {"model": model, "pre_tokenizer": before}), tokenizer=True),
    )
    assert (said["tokenizer.ggml.model"], said["tokenizer.ggml.pre"]) == ("gpt2", split)
    assert said["tokenizer.ggml.merges"] == ["a b"]
    assert "tokenizer.ggml.scores" not in said


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "is not a tokenizer that can be read: KeyError"),
        ([], "holds a list, expected a JSON object"),
        ({"model": {"type": "Unigram"}}, "has a Unigram tokenizer"),
        ({"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Whitespace"}}, r"splits texts by \['Whitespace'\]"),
        ({"model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": 48}, "merges": []}}, "the model has 48 words"),
        ({"model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": -1}, "merges": []}}, "'a' as number -1"),
        ({"model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": "x"}, "merges": []}}, "'a' as number 'x'"),
        ({"model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0}, "merges": ["abc"]}}, "ValueError"),
        ({"model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0}, "merges": [5]}}, "TypeError"),
    ],
)  # fmt: skip
@NEEDED
def test_tokenizers_that_cannot_be(folder: Path, document: object, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        written(weights(), with_tokenizer(folder, document), tokenizer=True)


@NEEDED
class TestCommand:
    def test_a_packed_folder(self, folder: Path, tmp_path: Path) -> None:
        fp.hub.save_pretrained(packed(weights()), tmp_path / "small", like=with_tokenizer(folder, SPM))
        for source in (tmp_path / "small", tmp_path / "small" / "model.packed.safetensors"):
            text = ok("export", source, "--gguf", tmp_path / "net.gguf", "--dtype", "f16")
            assert "9 f16, 3 f32 tensors" in " ".join(text.split())

    def test_a_packed_file_needs_to_be_told_its_folder(self, folder: Path, tmp_path: Path) -> None:
        fp.save(packed(weights()), tmp_path / "small.safetensors")
        given = ["export", tmp_path / "small.safetensors", "--gguf", tmp_path / "net.gguf"]
        assert "name the model's Hugging Face folder with --like" in failure(*given)
        assert "has no tokenizer.json, by which llama.cpp would read texts" in failure(
            *given, "--like", folder
        )
        assert "not on texts" in ok(*given, "--like", folder, "--no-tokenizer")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ([], "give one of --onnx, --gguf and --safetensors"),
            (["--gguf", "a", "--onnx", "b"], "give one of --onnx, --gguf and --safetensors"),
            (["--safetensors", "a", "--like", "b"], "--like and --no-tokenizer are for --gguf"),
            (["--safetensors", "a", "--dtype", "q8_0"], "a safetensors file takes f32, f16, bf16"),
            (["--onnx", "a"], "say what makes it with --model"),
            (["--onnx", "a", "--dtype", "f16"], "--dtype is for --gguf and --safetensors"),
            (["--gguf", "a", "--dtype", "q3"], "a GGUF file takes f32, f16, bf16, q8_0"),
        ],
    )
    def test_what_does_not_go_together(
        self, folder: Path, tmp_path: Path, options: list[str], message: str
    ) -> None:
        fp.hub.save_pretrained(packed(weights()), tmp_path / "small", like=folder)
        assert message in failure("export", tmp_path / "small", *options)

    def test_a_folder_of_plain_weights(self, folder: Path, tmp_path: Path) -> None:
        assert "is a folder of plain weights" in failure("export", folder, "--safetensors", tmp_path / "a")


@NEEDED
@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_llama_cpp_predicts_what_transformers_does(
    dtype: str, folder: Path, tmp_path: Path, transformers: Any
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp comes with llama-cpp-python")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
    path = tmp_path / "model.gguf"
    fp.gguf.export(packed(dict(model.state_dict())), path, like=folder, dtype=dtype, tokenizer=False)
    tokens = list(range(1, 20))
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    opened = llama_cpp.Llama(str(path), n_ctx=32, n_threads=1, logits_all=True, verbose=False)
    opened.eval(tokens)
    found = torch.tensor(np.array(opened.scores[: len(tokens)]))
    error = (found - expected).norm() / expected.norm()
    assert error < (1e-3 if dtype == "f32" else 3e-2)
