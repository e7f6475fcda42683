"""Folders from anyone: nothing outside them is read, no code of theirs runs, and errors say what is wrong."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import factorpack as fp
from factorpack.calibration.model_folder import PACKED_FILE, open_folder
from factorpack.errors import FormatError, SourceError
from factorpack.hub.load import tokenizer_of
from factorpack.hub.quantizer import PREFIX, _make_folder, _remove_folder
from factorpack.source import open_source
from tests.helpers import seeded
from tests.hub.conftest import llama

TINY = {
    "hidden_size": 2,
    "intermediate_size": 2,
    "head_dim": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def made(folder: Path, config: Any = CONFIG, index: Any = None) -> Path:
    """A folder of two shards, one tensor each."""
    folder.mkdir()
    for name in ("a", "b"):
        save_file({f"{name}.weight": seeded(4, 4)}, folder / f"{name}.safetensors")
    weight_map = {"a.weight": "a.safetensors", "b.weight": "b.safetensors"} if index is None else index
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_good_one(tmp_path: Path) -> None:
    assert list(open_source(made(tmp_path / "model")).entries) == ["a.weight", "b.weight"]


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"a.weight": "../outside.safetensors"}, "beside the index"),
        ({"a.weight": "/etc/passwd"}, "beside the index"),
        ({"a.weight": "gone.safetensors"}, "no file or folder"),
        ({"a.weight": "b.safetensors"}, "in no shard"),
        ({"a.weight": 3}, "beside the index"),
        ({"a.weight": "a" * 300 + ".safetensors"}, "beside the index"),
        ([], "weight_map"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, index: Any, says: str) -> None:
    save_file({"a.weight": seeded(4, 4)}, tmp_path / "outside.safetensors")
    with pytest.raises(SourceError, match=says):
        open_source(made(tmp_path / "model", index=index))


@pytest.mark.parametrize(
    "name", ["a.safetensors", "model.safetensors.index.json", "config.json", "vocab.txt"]
)
def test_links_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path / "model", {**CONFIG, "tie_word_embeddings": True})
    (folder / "vocab.txt").write_text("words")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(SourceError, match="is a link to"):
        open_folder(folder).side_files() if name == "vocab.txt" else open_source(folder)


def test_links_of_a_hub_s_cache(tmp_path: Path) -> None:
    """There every file is a link into blobs/ beside the snapshots."""
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "blobs").mkdir()
    folder = made(tmp_path / "snapshots" / "model")
    for each in list(folder.iterdir()):
        each.rename(tmp_path / "blobs" / each.name)
        each.symlink_to(tmp_path / "blobs" / each.name)
    assert list(open_source(folder).entries) == ["a.weight", "b.weight"]
    assert open_folder(folder).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ("[" * 100_000, "not JSON"),
        (" " * (1 << 24) + "{}", "allowed are"),
    ],
)
def test_a_config_that_is_none(tmp_path: Path, text: str, says: str) -> None:
    (made(tmp_path / "model") / "config.json").write_text(text)
    with pytest.raises(SourceError, match=says):
        open_folder(tmp_path / "model")


@pytest.mark.parametrize("named", [None, [], [3], "LlamaForCausalLM"])
def test_a_config_without_architectures(tmp_path: Path, named: Any) -> None:
    folder = made(tmp_path / "model", {**CONFIG, "architectures": named})
    with pytest.raises(SourceError, match="expected a list with a class of transformers"):
        fp.hub.save_pretrained(
            fp.compress(folder, fp.Scalar(8), progress=False), tmp_path / "small", like=folder
        )
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("name", ["Mine", "AutoTokenizer", "LlamaConfig", "__class__", "os"])
def test_a_class_that_is_no_model_of_transformers(tmp_path: Path, transformers: Any, name: str) -> None:
    del transformers
    folder = made(
        tmp_path / "model", {**CONFIG, "architectures": [name], "auto_map": {"AutoModel": "code.Mine"}}
    )
    (folder / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(SourceError, match=f"no model '{name}', and factorpack never runs code"):
        fp.hub.from_pretrained(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "gone.safetensors", "a" * 300, 3, None])
def test_a_packed_file_that_is_not_in_the_folder(tmp_path: Path, name: Any) -> None:
    (tmp_path / "outside.safetensors").write_bytes(b"")
    stated = {"quant_method": "factorpack", "file": name}
    folder = made(tmp_path / "model", {**CONFIG, "quantization_config": stated})
    with pytest.raises(SourceError, match="expected one beside it"):
        fp.hub.from_pretrained(folder)


@cache
def packed_llama(transformers: Any) -> fp.Packed:
    return fp.compress(llama(transformers, tied=False, layers=1), fp.Scalar(4), progress=False)


def packed(transformers: Any, tmp_path: Path) -> Path:
    model = llama(transformers, tied=False, layers=1)
    fp.hub.save_pretrained(packed_llama(transformers), tmp_path / "small", like=model)
    return tmp_path / "small"


def test_a_damaged_packed_file(transformers: Any, tmp_path: Path) -> None:
    file = packed(transformers, tmp_path) / PACKED_FILE
    raw = bytearray(file.read_bytes())
    raw[-100] ^= 1
    file.write_bytes(raw)
    with pytest.raises(FormatError, match="checksum"):
        fp.hub.from_pretrained(tmp_path / "small")


def test_a_packed_file_of_another_model(transformers: Any, tmp_path: Path) -> None:
    """What transformers would fill with random numbers under a warning is an error."""
    folder = packed(transformers, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(SourceError, match="lacks 9 tensors of a LlamaForCausalLM"):
        fp.hub.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 95}))
    with pytest.raises(SourceError, match=r"embed_tokens\.weight' is \(96, 64\) in the file, \(95, 64\)"):
        fp.hub.from_pretrained(folder)


def changed(folder: Path, **settings: Any) -> Path:
    """The same folder with other settings in its config."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The addresses that anything tried to connect to; a library that starts up now is not offline."""
    from huggingface_hub import constants

    tried: list[Any] = []

    def refuse(_: object, address: Any) -> None:
        tried.append(address)
        raise ConnectionRefusedError("there is no network here")

    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **_: refuse(None, a))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tried


@pytest.mark.parametrize("name", ["DetrForObjectDetection", "UperNetForSemanticSegmentation"])
@pytest.mark.parametrize(
    "settings",
    [
        {"backbone": "someone/resnet-50", "use_timm_backbone": False},
        {"use_pretrained_backbone": True},
        {"use_timm_backbone": True},
        {"backbone_config": {"model_type": "timm_backbone", "backbone": "hf-hub:someone/resnet"}},
    ],
    ids=["backbone", "pretrained", "timm", "nested"],
)
def test_a_backbone_that_would_be_downloaded(
    tmp_path: Path, transformers: Any, connections: list[Any], name: str, settings: dict[str, Any]
) -> None:
    del transformers
    folder = made(tmp_path / "model", {"architectures": [name], "model_type": "detr", **settings})
    with pytest.raises(SourceError, match="not in the folder, and factorpack downloads nothing"):
        fp.hub.from_pretrained(folder)
    assert not connections


def test_libraries_are_offline_while_a_folder_is_opened(
    tmp_path: Path, transformers: Any, connections: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a model class may ask of the Hub."""
    from huggingface_hub import HfApi, constants

    def download(*_: Any, **__: Any) -> None:
        HfApi().model_info("someone/resnet-50")

    folder = packed(transformers, tmp_path)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", download)
    with pytest.raises(SourceError, match="does not open as a LlamaForCausalLM: OfflineModeIsEnabled"):
        fp.hub.from_pretrained(folder)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", download)
    with pytest.raises(SourceError, match="has no tokenizer that can be opened"):
        tokenizer_of(open_folder(folder))
    assert not connections
    assert constants.HF_HUB_OFFLINE is False


KERNEL = "kernels-community/flash-attn"


@pytest.mark.parametrize(
    "settings",
    [
        {"attn_implementation": KERNEL},
        {"_attn_implementation": KERNEL},
        {"_attn_implementation_internal": KERNEL},
        {"attn_implementation": "flash_attention_2"},
        {"experts_implementation": KERNEL},
        {"use_kernels": True, "kernel_config": {"RMSNorm": "someone/kernels:RMSNorm"}},
        {"auto_map": {"AutoModelForCausalLM": "code.Mine"}, "trust_remote_code": True},
        {"transformers_weights": "../../outside.safetensors"},
        {"fusion_config": {"patch_embeddings": True}},
        {"_name_or_path": "someone/llama"},
    ],
    ids=lambda settings: f"{next(iter(settings))}-{len(str(settings))}",
)
def test_settings_about_code_are_ignored(
    tmp_path: Path, transformers: Any, connections: list[Any], settings: dict[str, Any]
) -> None:
    folder = changed(packed(transformers, tmp_path), **settings)
    model: Any = fp.hub.from_pretrained(folder)
    assert model.config._attn_implementation in ("sdpa", "eager")
    assert not any(getattr(model.config, key, None) == value for key, value in settings.items())
    assert not connections


@pytest.mark.parametrize("stated", [{"quant_method": "gptq"}, {"quant_method": "bitsandbytes"}, {}, "awq"])
def test_weights_that_another_library_quantized(tmp_path: Path, stated: Any) -> None:
    folder = made(tmp_path / "model", {**CONFIG, "quantization_config": stated})
    with pytest.raises(SourceError, match="says that the weights are quantized by"):
        fp.hub.from_pretrained(folder)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000, allowed are"),
        ({"num_hidden_layers": 10**6, **TINY}, "has weights for at most \\d{4} modules"),
        ({"intermediate_size": 1 << 40}, "explain at most"),
        ({"vocab_size": 1 << 20}, "explain at most"),
        ({"vocab_size": 97}, r"is \(96, 64\) in the file, \(97, 64\) by its config"),
    ],
    ids=["list", "modules", "elements", "one tensor", "shape"],
)
def test_a_config_that_promises_more_than_the_weights(
    tmp_path: Path, transformers: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], says: str
) -> None:
    """Refused before memory is taken, and before anything is decoded."""
    folder = changed(packed(transformers, tmp_path), **settings)
    monkeypatch.setattr(fp.Packed, "state_dict", None)
    with pytest.raises(SourceError, match=says):
        fp.hub.from_pretrained(folder)


def test_transformers_own_loader_decodes_nothing_that_does_not_fit(
    tmp_path: Path, transformers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed(packed(transformers, tmp_path), vocab_size=97)
    fp.hub.register()
    monkeypatch.setattr(fp.Packed, "decode_to", None)
    with pytest.raises(SourceError, match=r"is \(96, 64\) in the file, \(97, 64\) by its config"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "deeper"])
def test_no_link_leads_out_of_an_opened_folder(tmp_path: Path, transformers: Any, name: str) -> None:
    folder = packed(transformers, tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir() if name == "deeper" else outside.write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(SourceError, match="is a link to"):
        fp.hub.from_pretrained(folder)
    with pytest.raises(SourceError, match="is a link to"):
        tokenizer_of(open_folder(folder))


@pytest.mark.parametrize(
    "error",
    [
        ImportError("no timm"),
        AttributeError("a"),
        ZeroDivisionError(),
        AssertionError("b\nmore"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_libraries_become_ours(
    tmp_path: Path, transformers: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    folder = packed(transformers, tmp_path)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", fail)
    with pytest.raises(SourceError, match=f"as a LlamaForCausalLM: {type(error).__name__}: .?") as caught:
        fp.hub.from_pretrained(folder)
    assert "more" not in str(caught.value)


def test_opening_needs_no_temporary_files(
    tmp_path: Path, transformers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mkdtemp", "mkstemp", "TemporaryDirectory"):
        monkeypatch.setattr(tempfile, name, None)
    fp.hub.from_pretrained(packed(transformers, tmp_path))


def test_what_a_killed_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own loader reads a decoded file from a temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / "outside").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "outside")
    killed, handle = _make_folder()
    (killed / "model.safetensors").touch()
    in_use, held = _make_folder()
    assert killed.is_dir()
    assert handle is not None
    os.close(handle)  # as the kernel does
    third, other = _make_folder()
    assert not killed.exists()
    assert in_use.is_dir()
    assert (tmp_path / "outside").is_dir()
    for each in ((in_use, held), (third, other)):
        _remove_folder(*each)
    assert not in_use.exists()


@pytest.mark.parametrize("name", ["factorpack-demo", f"{PREFIX}mine"])
def test_folders_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """`factorpack demo` writes a folder of this name into the working folder, which may be the temporary one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / name).mkdir()
    (tmp_path / name / "net.pt").touch()
    _remove_folder(*_make_folder())
    assert (tmp_path / name / "net.pt").is_file()


def test_settings_for_generation_are_kept(tmp_path: Path, transformers: Any) -> None:
    folder = packed(transformers, tmp_path)
    (folder / "generation_config.json").write_text('{"max_new_tokens": 7}')
    model: Any = fp.hub.from_pretrained(folder)
    assert model.generation_config.max_new_tokens == 7


def test_a_plain_file_under_a_packed_name(transformers: Any, tmp_path: Path) -> None:
    folder = packed(transformers, tmp_path)
    save_file({"a": seeded(3, 3)}, folder / PACKED_FILE)
    with pytest.raises(SourceError, match="is not a packed file"):
        fp.hub.from_pretrained(folder)
