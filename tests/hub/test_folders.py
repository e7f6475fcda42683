"""Folders there and back: what opens again is the decoded model, number for number."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import factorpack as fp
from factorpack.calibration.model_folder import PACKED_FILE, open_folder
from factorpack.decoding import decode
from factorpack.errors import PlanError, SourceError
from factorpack.hub.save import write_folder
from tests.helpers import compress_to
from tests.hub.conftest import bert, llama, save_tokenizer

TOKENS = torch.arange(24).reshape(2, 12) % 96


def packed_folder(plain: Path, target: Path) -> fp.Packed:
    return write_folder(
        target, open_folder(plain), lambda path: compress_to(path, plain, fp.Scalar(5), progress=False)
    )


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        answer: Tensor = model(input_ids=TOKENS).logits
    return answer


def decoded(plain: Path, packed: fp.Packed) -> nn.Module:
    """The plain model with the packed file's weights put in by hand."""
    model = fp.hub.from_pretrained(plain)
    state = {name: decode(encoded) for name, encoded in packed.items()}
    assert set(model.load_state_dict(state, strict=False).missing_keys) <= {"lm_head.weight"}
    return model


def test_there_and_back(folder: Path, tmp_path: Path) -> None:
    packed = packed_folder(folder, tmp_path / "small")
    assert packed.path == tmp_path / "small" / PACKED_FILE
    expected = logits(decoded(folder, packed))
    model = fp.hub.from_pretrained(tmp_path / "small")
    assert not model.training
    assert torch.equal(logits(model), expected)
    assert not torch.equal(expected, logits(fp.hub.from_pretrained(folder)))
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["packed", "factored"])
def test_it_may_run_on_its_codes(folder: Path, tmp_path: Path, mode: Any) -> None:
    packed_folder(folder, tmp_path / "small")
    dense, coded = (
        fp.hub.from_pretrained(tmp_path / "small"),
        fp.hub.from_pretrained(tmp_path / "small", mode),
    )
    torch.testing.assert_close(logits(coded), logits(dense))
    with pytest.raises(PlanError, match="needs a packed folder"):
        fp.hub.from_pretrained(folder, mode)


def test_transformers_own_verb(folder: Path, tmp_path: Path, transformers: Any) -> None:
    packed_folder(folder, tmp_path / "small")
    fp.hub.register()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert torch.equal(logits(model), logits(fp.hub.from_pretrained(tmp_path / "small")))
    assert getattr(model.config, "quantization_config", None) is None
    narrow = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), logits(model))


def test_without_factorpack_nothing_opens(
    folder: Path, tmp_path: Path, transformers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights under a warning would be worse than an error."""
    packed_folder(folder, tmp_path / "small")
    fp.hub.register()
    known = transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    monkeypatch.delitem(known, "factorpack")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")


def test_what_goes_along(folder: Path, tmp_path: Path, transformers: Any) -> None:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"")
    packed = packed_folder(folder, tmp_path / "small")
    found = {
        str(each.relative_to(tmp_path / "small"))
        for each in (tmp_path / "small").rglob("*")
        if each.is_file()
    }
    assert {"README.md", "config.json", "1_Pooling/config.json", "tokenizer.json", PACKED_FILE} <= found
    assert not any(name.endswith((".py", ".bin", ".index.json")) for name in found)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "small")("the cat")["input_ids"] == [2, 3]
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "factorpack",
        "version": fp.__version__,
        "file": PACKED_FILE,
    }
    card, report = (tmp_path / "small" / "README.md").read_text(), packed.size()
    assert f"{report.file_bytes:,} bytes" in card
    assert f"{report.file_ratio:.2f} times smaller" in card
    assert all(f"| `{line.name}` |" in card for line in report.tensors)
    assert 'fp.hub.from_pretrained("small")' in card


@pytest.mark.parametrize("tied", [True, False])
def test_models_themselves(transformers: Any, tmp_path: Path, tied: bool) -> None:
    model = llama(transformers, tied, layers=1)
    packed = fp.compress(model, ratio=5, calibration=[{"input_ids": TOKENS}], progress=False)
    assert packed.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert packed["model.norm.weight"].kind in ("keep", "constant")
    fp.hub.save_pretrained(packed, tmp_path / "small", like=model)
    expected = logits(packed.load_into(model))
    assert torch.equal(logits(fp.hub.from_pretrained(tmp_path / "small")), expected)
    with pytest.raises(SourceError, match="like is a int"):
        fp.hub.save_pretrained(packed, tmp_path / "other", like=3)


def test_an_encoder(transformers: Any, tmp_path: Path) -> None:
    model = bert(transformers)
    mask = torch.ones_like(TOKENS)
    mask[1, 5:] = 0
    batches = [{"input_ids": TOKENS, "attention_mask": mask}]
    packed = fp.compress(model, ratio=6, calibration=batches, progress=False)
    fp.hub.save_pretrained(packed, tmp_path / "small", like=model)
    opened = fp.hub.from_pretrained(tmp_path / "small")
    packed.load_into(model)
    with torch.no_grad():
        found, expected = (net(**batches[0]).last_hidden_state for net in (opened, model))
    assert torch.equal(found, expected)


def test_a_folder_is_whole_or_not_there(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "small"

    def fails(path: Path) -> None:
        path.write_bytes(b"half of it")
        raise SourceError("no power")

    with pytest.raises(SourceError, match="no power"):
        write_folder(target, open_folder(folder), fails)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["llama"]
    target.mkdir()
    packed_folder(folder, target)
    with pytest.raises(FileExistsError, match="already exists"):
        packed_folder(folder, target)
    assert fp.hub.from_pretrained(target) is not None


def test_a_head_that_is_stored_beside_its_table(transformers: Any, tmp_path: Path) -> None:
    """Older checkpoints hold a tied head twice; only what the config calls tied is taken for one."""
    from safetensors.torch import load_file, save_file

    model = llama(transformers, tied=True)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    method = fp.Scalar(8)
    assert fp.compress(tmp_path, method, progress=False).aliases == {
        "lm_head.weight": "model.embed_tokens.weight"
    }
    state["lm_head.weight"][0, 0] += 1
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    assert fp.compress(tmp_path, method, progress=False).aliases == {}


def test_without_transformers_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SourceError, match=r"pip install 'factorpack\[hf\]'"):
        fp.hub.from_pretrained(tmp_path)


def test_a_tokenizer_alone_is_no_model(transformers: Any, tmp_path: Path) -> None:
    save_tokenizer(transformers, tmp_path)
    with pytest.raises(SourceError, match="is not a model folder"):
        fp.hub.from_pretrained(tmp_path)


def test_opening_draws_no_bar_and_leaves_the_library_as_it_was(
    folder: Path, transformers: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers.utils.logging.enable_progress_bar()
    try:
        fp.hub.from_pretrained(folder)
        assert capfd.readouterr() == ("", "")
        assert transformers.utils.logging.is_progress_bar_enabled()
    finally:
        transformers.utils.logging.disable_progress_bar()


def test_a_base_without_the_head_that_its_config_names(
    tmp_path: Path, transformers: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """As sentence transformers are published: their configs are those of the model before it was tuned."""
    model = bert(transformers)
    model.save_pretrained(tmp_path / "plain")  # type: ignore[operator]
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    config["architectures"] = ["BertForMaskedLM"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    packed_folder(tmp_path / "plain", tmp_path / "small")
    capfd.readouterr()
    with caplog.at_level("INFO", "factorpack"):
        opened = fp.hub.from_pretrained(tmp_path / "plain")
    assert capfd.readouterr() == ("", "")
    assert "has the weights of a BertModel, without the head of the BertForMaskedLM" in caplog.text
    for name, value in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], value)
    assert type(fp.hub.from_pretrained(tmp_path / "small")) is type(model)
    (tmp_path / "plain" / "model.safetensors").unlink()
    del (state := dict(model.state_dict()))["embeddings.word_embeddings.weight"]
    save_file(state, tmp_path / "plain" / "model.safetensors")
    with pytest.raises(SourceError, match=r"lacks .* tensors of a BertForMaskedLM"):
        fp.hub.from_pretrained(tmp_path / "plain")
