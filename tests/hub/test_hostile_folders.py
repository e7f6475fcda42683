"""Folders from anyone: nothing outside them is read, no code of theirs runs, and errors say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import factorpack as fp
from factorpack.calibration.model_folder import PACKED_FILE, open_folder
from factorpack.errors import FormatError, SourceError
from factorpack.source import open_source
from tests.helpers import seeded
from tests.hub.conftest import llama

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


@pytest.mark.parametrize("name", ["../outside.safetensors", "gone.safetensors", 3, None])
def test_a_packed_file_that_is_not_in_the_folder(tmp_path: Path, name: Any) -> None:
    (tmp_path / "outside.safetensors").write_bytes(b"")
    stated = {"quant_method": "factorpack", "file": name}
    folder = made(tmp_path / "model", {**CONFIG, "quantization_config": stated})
    with pytest.raises(SourceError, match="expected one beside it"):
        fp.hub.from_pretrained(folder)


def packed(transformers: Any, tmp_path: Path) -> Path:
    model = llama(transformers, tied=False, layers=1)
    fp.hub.save_pretrained(fp.compress(model, fp.Scalar(4), progress=False), tmp_path / "small", like=model)
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


def test_a_plain_file_under_a_packed_name(transformers: Any, tmp_path: Path) -> None:
    folder = packed(transformers, tmp_path)
    save_file({"a": seeded(3, 3)}, folder / PACKED_FILE)
    with pytest.raises(SourceError, match="is not a packed file"):
        fp.hub.from_pretrained(folder)
