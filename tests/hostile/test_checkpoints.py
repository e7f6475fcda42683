"""Checkpoints from anywhere: code in them never runs, and what cannot be used is named."""

from __future__ import annotations

import codecs
import copy
import io
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from factorpack.commands.console import print_error
from factorpack.compression import compress
from factorpack.errors import SourceError, WeightError
from factorpack.methods import QSPCA, Scalar
from factorpack.packed import load, save
from factorpack.source import PICKLED, open_source
from tests.golden.make import GOLDEN
from tests.helpers import assert_same_tensor, compress_to, seeded


class Payload:
    """A pickle of this would make a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def pickled(value: object, zipped: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", PICKLED)
@pytest.mark.parametrize("layout", ["zip", "legacy", "bare pickle"])
@pytest.mark.parametrize("inside", [False, True])
def test_code_in_a_checkpoint_never_runs(tmp_path: Path, suffix: str, layout: str, inside: bool):
    payload: object = Payload(tmp_path / "broken-in")
    if inside:
        payload = {"state_dict": {"weight": torch.ones(2)}, "more": payload}
    blob = pickle.dumps(payload) if layout == "bare pickle" else pickled(payload, layout == "zip")
    (tmp_path / f"model{suffix}").write_bytes(blob)
    with pytest.raises(SourceError, match="factorpack never runs code from a checkpoint"):
        compress_to(tmp_path / "out", tmp_path / f"model{suffix}", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"model{suffix}"]


def test_the_payload_would_have_run(tmp_path: Path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "broken-in")))
    assert (tmp_path / "broken-in").is_dir()


@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_pickles_are_refused(tmp_path: Path, zipped: bool):
    """Every truncation, and every byte of the head set to 0 and 255, is refused or read as tensors."""
    blob = pickled({"weight": torch.arange(4.0), "bias": torch.ones(2)}, zipped)
    cuts = [blob[:length] for length in range(0, len(blob), 7)]
    edits = [blob[:i] + bytes([byte]) + blob[i + 1 :] for i in range(0, 400, 3) for byte in (0, 255)]
    path = tmp_path / "model.pt"
    refused = 0
    for damaged in cuts + edits:
        path.write_bytes(damaged)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, on pickles of an unknown protocol
                open_source(path)
        except SourceError:
            refused += 1
    assert refused >= len(cuts)


@pytest.mark.parametrize("value", [[torch.ones(1)], torch.ones(1), "text", {"a": 1}, {1: torch.ones(1)}])
def test_a_checkpoint_of_something_else(tmp_path: Path, value: object):
    (tmp_path / "model.pt").write_bytes(pickled(value, True))
    with pytest.raises(SourceError, match=r"expected a (state dict|tensor under a name)"):
        open_source(tmp_path / "model.pt")


def rezipped(blob: bytes, **settings: Any) -> bytes:
    """The same archive, written again."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(blob)) as old,
        zipfile.ZipFile(buffer, "w", **settings) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return buffer.getvalue()


def overlapping(blob: bytes) -> bytes:
    """An archive whose entry of weights is listed many times."""
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        weights = next(entry for entry in archive.infolist() if entry.filename.endswith("data/0"))
    buffer = io.BytesIO(blob)
    with zipfile.ZipFile(buffer, "a") as archive:
        for index in range(2000):
            twin = copy.copy(weights)
            twin.filename = f"archive/data/{index + 1}"
            archive.filelist.append(twin)
        archive.writestr("archive/more", b"")  # writes the list
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["constants.pkl", "code/net.py"])
def test_a_program_is_refused_before_torch_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    blob = io.BytesIO(pickled({"weight": torch.ones(2)}, True))
    with zipfile.ZipFile(blob, "a") as archive:
        archive.writestr(f"archive/{name}", b"")
    (tmp_path / "net.pt").write_bytes(blob.getvalue())
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(SourceError, match=r"net\.pt is a TorchScript archive"):
        open_source(tmp_path / "net.pt")


def test_the_advice_on_a_program_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    net = nn.Linear(2, 2)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather export programs in another way
        torch.jit.save(torch.jit.trace(net, torch.ones(1, 2)), "net.pt")
        with pytest.raises(SourceError, match="with these two lines") as caught:
            open_source("net.pt")
        exec("\n".join(caught.value.__notes__), {"torch": torch})
    assert_same_tensor(open_source("net-weights.pt").entries["weight"].load(), net.weight.detach())
    print_error(caught.value)
    assert "\n  torch.save(dict(state), 'net-weights.pt')\n" in capsys.readouterr().err


def test_archives_that_are_larger_than_they_look(tmp_path: Path):
    """Zeros compressed a thousandfold, and one entry listed two thousand times."""
    blob = pickled({"weight": torch.zeros(1 << 16)}, True)
    path = tmp_path / "net.pt"
    path.write_bytes(rezipped(blob))
    assert_same_tensor(open_source(path).entries["weight"].load(), torch.zeros(1 << 16))
    path.write_bytes(rezipped(blob, compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(
        SourceError, match=r"net\.pt has compressed entries, expected an archive as torch\.save"
    ):
        open_source(path)
    path.write_bytes(overlapping(blob))
    with pytest.raises(SourceError, match=r"declares entries of \d+: it is damaged"):
        open_source(path)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1).expand(1 << 29),
        torch.ones(1 << 12).as_strided((1 << 11, 1 << 11), (1, 1)),
    ],
    ids=["one value", "windows"],
)
def test_tensors_larger_than_their_file(tmp_path: Path, tensor: Tensor, zipped: bool):
    (tmp_path / "net.pt").write_bytes(pickled({"weight": tensor}, zipped))
    with pytest.raises(SourceError, match=r"bytes and tensors of \d+, allowed are \d+"):
        open_source(tmp_path / "net.pt")


def test_small_tensors_may_share_their_values(tmp_path: Path):
    state = {"row": torch.arange(3.0).expand(500, 3), "fused": seeded(60, 20)}
    state["query"] = state["fused"][:20]
    torch.save(state, tmp_path / "net.pt")
    for name, entry in open_source(tmp_path / "net.pt").entries.items():
        assert_same_tensor(entry.load(), state[name])


class Call:
    """A pickle of this calls one of the functions that torch's restricted reader allows."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        Call(bytearray, 1 << 40),
        Call(codecs.encode, Call(codecs.encode, "aa", "latin1"), "hex"),
        Call(torch.Tensor, [[1.0] * 9] * 9),
        Call(torch.FloatTensor, 1 << 40),
    ],
    ids=["bytearray", "encode", "Tensor", "FloatTensor"],
)
def test_calls_that_make_much_of_little(tmp_path: Path, call: Call, zipped: bool):
    (tmp_path / "net.pt").write_bytes(pickled({"state_dict": {"a": torch.ones(2)}, "more": call}, zipped))
    with pytest.raises(SourceError, match=r"net\.pt calls (bytearray|encode|Tensor|FloatTensor), which no"):
        open_source(tmp_path / "net.pt")


def shards(folder: Path, weight_map: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, folder / "one.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "..",
        ".",
        "",
        "/secret.safetensors",
        "inner/one.safetensors",
        "inner.safetensors",
        "./one.safetensors",
        "model.safetensors.index.json",
        "one.txt",
        5,
        None,
    ],
)
def test_a_shard_lies_beside_its_index(tmp_path: Path, shard: object):
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    shards(tmp_path / "model", {})
    for inner in ("inner", "inner.safetensors"):
        shards(tmp_path / "model" / inner, {"a": "one.safetensors"})
    shards(tmp_path / "model", {"a": shard})
    with pytest.raises(SourceError, match="expected a file beside the index"):
        open_source(tmp_path / "model")


@pytest.mark.parametrize("weight_map", [[], 5, None, {"a": []}, {"a": "x", "b": 1}])
def test_an_index_of_something_else(tmp_path: Path, weight_map: object):
    with pytest.raises(SourceError, match="is not an index with a weight_map"):
        open_source(shards(tmp_path / "model", weight_map))


@pytest.mark.parametrize("text", ["", "{}", "[" * 100_000, '{"weight_map":', "\0"])
def test_an_index_that_is_no_json(tmp_path: Path, text: str):
    shards(tmp_path / "model", {})
    (tmp_path / "model" / "model.safetensors.index.json").write_text(text)
    with pytest.raises(SourceError, match="is not an index with a weight_map"):
        open_source(tmp_path / "model")


def test_a_tensor_that_no_shard_holds(tmp_path: Path):
    model = shards(tmp_path / "model", {"a": "one.safetensors", "c": "one.safetensors"})
    with pytest.raises(SourceError, match=r"1 tensors of .* are in no shard, the first is 'c'"):
        open_source(model)


def test_a_shard_that_is_not_there(tmp_path: Path):
    with pytest.raises(SourceError, match=r"there is no file or folder .*two\.safetensors"):
        open_source(shards(tmp_path / "model", {"a": "two.safetensors"}))


def test_tied_tensors_of_a_pickled_shard(tmp_path: Path):
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"embed": weight, "head": weight, "unlisted": torch.ones(1)}, tmp_path / "one.bin")
    weight_map = {"head": "one.bin", "embed": "one.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = open_source(tmp_path)
    assert list(source.entries) == ["embed"]
    assert source.aliases == {"head": "embed"}
    assert_same_tensor(source.entries["embed"].load(), weight)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "method", [QSPCA(rank=4, latent_bits=3, tile=16), Scalar(bits=4)], ids=["qspca", "scalar"]
)
def test_weights_that_are_not_numbers_are_named(tmp_path: Path, bad: float, method: QSPCA | Scalar):
    state = {"fine": seeded(32, 32), "body.weight": seeded(32, 32)}
    state["body.weight"][3, 5] = bad
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(WeightError, match="1 of 1024 weights are NaN or infinite") as caught:
        compress_to(tmp_path / "out", state, method, progress=False)
    assert caught.value.__notes__ == ["while compressing tensor 'body.weight'"]
    assert (tmp_path / "out").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_vectors_of_anything_are_kept(tmp_path: Path):
    state = {"odd": torch.tensor([float("nan"), float("inf"), -0.0])}
    save(compress(state, progress=False), tmp_path / "out")
    assert_same_tensor(load(tmp_path / "out").state_dict()["odd"], state["odd"])


def test_a_packed_file_is_no_checkpoint():
    with pytest.raises(SourceError, match="is already a packed file"):
        open_source(GOLDEN)


@pytest.mark.parametrize("length", [0, 7, 8, 60, -1])
def test_a_safetensors_file_cut_short(tmp_path: Path, length: int):
    save_file({"a": torch.ones(8)}, tmp_path / "model.safetensors")
    blob = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(blob[:length])
    with pytest.raises(SourceError, match="is not a whole safetensors file"):
        open_source(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("names", "message"),
    [(["weight"], r"the file lacks \['bias'\]"), (["weight", "bias", "more"], r"the model lacks \['more'\]")],
)
def test_a_file_for_another_model(names: list[str], message: str):
    model = nn.Linear(3, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state: dict[str, Tensor] = {name: torch.zeros(3, 3) for name in names}
    with pytest.raises(SourceError, match=message):
        compress(state, progress=False).load_into(model)
    for name, value in model.state_dict().items():
        assert_same_tensor(value, before[name])
