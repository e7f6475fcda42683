"""Checkpoints in every form they come in, and what is said of those that are none."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import factorpack as fp
from factorpack.checkpoints import safetensors_entries
from factorpack.checkpoints.weight_names import natural_key
from factorpack.errors import SourceError
from factorpack.record import DTYPES
from factorpack.source import open_source
from tests.helpers import assert_same_tensor, seeded

STATE = {
    "conv.weight": seeded(8, 3, 3, 3),
    "conv.bias": seeded(8, dtype=torch.float16),
    "steps": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 4),
    "fc.weight": seeded(5, 8, dtype=torch.bfloat16),
}


def assert_holds(source: fp.source.Source, expected: dict[str, Tensor] = STATE) -> None:
    assert set(source.entries) == set(expected)
    for name, entry in source.entries.items():
        assert (entry.shape, entry.dtype) == (tuple(expected[name].shape), expected[name].dtype)
        assert_same_tensor(entry.load(), expected[name])


class TestFiles:
    def test_safetensors(self, tmp_path: Path) -> None:
        save_file(STATE, tmp_path / "a.safetensors", {"format": "pt"})
        assert_holds(open_source(tmp_path / "a.safetensors"))
        assert_holds(open_source(str(tmp_path / "a.safetensors")))

    def test_every_type_safetensors_has(self, tmp_path: Path) -> None:
        tensors = {
            name: (seeded(2, 3) * 9).to(dtype) for name, dtype in DTYPES.items() if dtype != torch.complex128
        }
        save_file(tensors, tmp_path / "a.safetensors")
        assert_holds(open_source(tmp_path / "a.safetensors"), tensors)

    @pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
    def test_unsigned_numbers_are_kept_exactly(self, tmp_path: Path, dtype: torch.dtype) -> None:
        top = torch.iinfo(dtype).max
        tensors = {
            "codes.weight": torch.tensor([[0, 1, top]], dtype=dtype).repeat(16, 16),
            "one": torch.tensor(top, dtype=dtype),
            "none": torch.empty(0, 3, dtype=dtype),
        }
        save_file({"w": seeded(64, 64), **tensors}, tmp_path / "a.safetensors")
        fp.save(fp.compress(tmp_path / "a.safetensors", fp.Scalar(4), progress=False), tmp_path / "b")
        fp.load(tmp_path / "b").decode_to(tmp_path / "c.safetensors", progress=False)
        found = open_source(tmp_path / "c.safetensors").entries
        for name, tensor in tensors.items():
            assert_same_tensor(found[name].load(), tensor)

    def test_names_in_a_file_come_in_natural_order(self, tmp_path: Path) -> None:
        save_file({f"layer{i}": torch.ones(1) for i in (10, 9, 1, 2)}, tmp_path / "a.safetensors")
        assert list(open_source(tmp_path / "a.safetensors").entries) == [
            "layer1",
            "layer2",
            "layer9",
            "layer10",
        ]

    @pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
    @pytest.mark.parametrize("zipped", [True, False])
    def test_torch_files_new_and_old(self, tmp_path: Path, suffix: str, zipped: bool) -> None:
        path = tmp_path / f"a{suffix}"
        torch.save(OrderedDict(STATE), path, _use_new_zipfile_serialization=zipped)
        assert_holds(open_source(path))

    @pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict", "model", "module"])
    @pytest.mark.parametrize("zipped", [True, False])
    def test_wrapped_state_dicts(self, tmp_path: Path, wrapper: str, zipped: bool) -> None:
        path = tmp_path / "a.pt"
        torch.save({wrapper: STATE, "epoch": 3, "best": 0.7}, path, _use_new_zipfile_serialization=zipped)
        assert_holds(open_source(path))

    def test_parameters_saved_with_their_gradients(self, tmp_path: Path) -> None:
        torch.save({"w": nn.Parameter(seeded(3, 3))}, tmp_path / "a.pt")
        source = open_source(tmp_path / "a.pt")
        assert not source.entries["w"].load().requires_grad


class TestFolders:
    def save(self, folder: Path, suffix: str, shards: dict[str, dict[str, Tensor]]) -> None:
        weight_map = {}
        for shard, tensors in shards.items():
            save_file(tensors, folder / shard) if suffix == "safetensors" else torch.save(
                tensors, folder / shard
            )
            weight_map |= dict.fromkeys(tensors, shard)
        index = "model.safetensors.index.json" if suffix == "safetensors" else "pytorch_model.bin.index.json"
        (folder / index).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))

    def halves(self, suffix: str) -> dict[str, dict[str, Tensor]]:
        names = list(STATE)
        return {
            f"model-{part}-of-2.{suffix}": {name: STATE[name] for name in names[part::2]} for part in range(2)
        }

    @pytest.mark.parametrize("suffix", ["safetensors", "bin"])
    def test_sharded(self, tmp_path: Path, suffix: str) -> None:
        self.save(tmp_path, suffix, self.halves(suffix))
        assert_holds(open_source(tmp_path))
        assert_holds(open_source(next(tmp_path.glob("*.index.json"))))

    def test_shards_as_diffusers_names_them(self, tmp_path: Path) -> None:
        self.save(tmp_path, "safetensors", self.halves("safetensors"))
        plain = tmp_path / "model.safetensors.index.json"
        plain.rename(tmp_path / f"diffusion_pytorch_{plain.name}")
        assert_holds(open_source(tmp_path))

    @pytest.mark.parametrize(
        "name", ["model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin"]
    )
    def test_in_one_piece(self, tmp_path: Path, name: str) -> None:
        (save_file if name.endswith("safetensors") else torch.save)(STATE, tmp_path / name)
        assert_holds(open_source(tmp_path))

    def test_tied_tensors_of_a_pickled_shard(self, tmp_path: Path) -> None:
        weight = seeded(5, 4)
        self.save(
            tmp_path, "bin", {"a.bin": {"embed": weight, "head": weight}, "b.bin": {"other": seeded(3)}}
        )
        source = open_source(tmp_path)
        assert dict(source.aliases) == {"head": "embed"}
        assert set(source.entries) == {"embed", "other"}

    def test_tensors_that_are_in_no_shard(self, tmp_path: Path) -> None:
        self.save(tmp_path, "safetensors", {"a.safetensors": {"x": seeded(3)}})
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}))
        with pytest.raises(SourceError, match=r"1 tensors of .* are in no shard, the first is 'y'"):
            open_source(tmp_path)

    @pytest.mark.parametrize(
        "shard", ["../a.safetensors", "/etc/passwd", "..", "sub/a.safetensors", "x.index.json", "", 3]
    )
    def test_a_shard_is_a_file_beside_the_index(self, tmp_path: Path, shard: object) -> None:
        (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
        with pytest.raises(SourceError, match="expected a file beside the index"):
            open_source(tmp_path / "x.index.json")

    def test_a_shard_that_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
        with pytest.raises(SourceError, match=r"there is no file or folder .*gone.safetensors"):
            open_source(tmp_path / "x.index.json")

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}', "\x00"]
    )
    def test_an_index_that_is_none(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "x.index.json").write_text(text)
        with pytest.raises(SourceError, match="is not an index with a weight_map"):
            open_source(tmp_path / "x.index.json")

    def test_a_folder_without_a_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match=r"holds none of model.safetensors.index.json"):
            open_source(tmp_path)


class TestMemory:
    def test_a_state_dict(self) -> None:
        assert_holds(open_source(STATE))

    def test_a_model_gives_its_state_dict(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        assert_holds(open_source(model), model.state_dict())

    def test_only_a_model_tells_which_convolutions_are_transposed(self) -> None:
        model = nn.Sequential(
            nn.ConvTranspose2d(8, 4, 3, groups=4), nn.Conv2d(4, 4, 3), nn.ConvTranspose1d(2, 2, 1)
        )
        assert dict(open_source(model).transposed_groups) == {"0.weight": 4, "2.weight": 1}
        assert dict(open_source(model[0]).transposed_groups) == {"weight": 4}
        assert not open_source(model.state_dict()).transposed_groups

    def test_tied_tensors_become_aliases(self) -> None:
        model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
        model["head"].weight = model["embed"].weight
        source = open_source(model)
        assert list(source.entries) == ["embed.weight"]
        assert dict(source.aliases) == {"head.weight": "embed.weight"}

    @pytest.mark.parametrize(
        "twin",
        [
            lambda weight: weight.clone(),
            lambda weight: weight[:2],
            lambda weight: weight.T,
            lambda weight: weight.view(torch.int32),
        ],
    )
    def test_what_only_looks_tied_is_not(self, twin: Callable[[Tensor], Tensor]) -> None:
        weight = seeded(4, 4)
        assert_holds(open_source({"a": weight, "b": twin(weight)}), {"a": weight, "b": twin(weight)})

    def test_empty_tensors_share_no_storage(self) -> None:
        assert not open_source({"a": torch.empty(0), "b": torch.empty(0)}).aliases

    @pytest.mark.parametrize(
        "state", [{"a": 3}, {"a": [1.0]}, {1: torch.ones(1)}, {"a": {"b": torch.ones(1)}}]
    )
    def test_entries_that_are_no_tensors(self, state: Any) -> None:
        with pytest.raises(SourceError, match="expected a tensor under a name"):
            open_source(state)

    @pytest.mark.parametrize(
        "tensor", [torch.empty(3, device="meta"), torch.eye(3).to_sparse()], ids=["meta", "sparse"]
    )
    def test_tensors_without_plain_values(self, tensor: Tensor) -> None:
        with pytest.raises(SourceError, match="tensor 'a' has no dense values to read"):
            open_source({"a": tensor})


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (Path("executed"),)


class TestNoCheckpoint:
    @pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a.txt", "a"])
    def test_missing(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(SourceError, match="there is no file or folder"):
            open_source(tmp_path / name)

    @pytest.mark.parametrize("name", ["a.txt", "a.onnx", "a", "a.json"])
    def test_an_unknown_suffix_lists_the_known_ones(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).touch()
        with pytest.raises(SourceError, match=r"expected one of \.safetensors, \.pt, \.pth, \.bin"):
            open_source(tmp_path / name)

    def test_a_packed_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.packed.safetensors"
        fp.save(fp.compress(STATE, fp.Scalar(4)), path)
        with pytest.raises(SourceError, match="is already a packed file: decode it first"):
            open_source(path)

    @pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 100, b"hello, this is no checkpoint"])
    @pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
    def test_damaged(self, tmp_path: Path, content: bytes, suffix: str) -> None:
        (tmp_path / f"a{suffix}").write_bytes(content)
        with pytest.raises(
            SourceError, match=r"is not a whole safetensors file|cannot be read as plain tensors"
        ):
            open_source(tmp_path / f"a{suffix}")

    @pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
    def test_cut_short(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"a{suffix}"
        (save_file if suffix == ".safetensors" else torch.save)(STATE, path)
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(SourceError):
            open_source(path)

    def test_code_in_a_pickle_is_never_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        torch.save({"a": Evil()}, "zipped.pt")
        Path("plain.pt").write_bytes(pickle.dumps({"a": Evil()}))
        for name in ("zipped.pt", "plain.pt"):
            with pytest.raises(SourceError, match="never runs code from a checkpoint") as caught:
                open_source(name)
            assert "you trust" not in str(caught.value)  # torch's own advice
        assert not Path("executed").exists()

    def test_a_whole_pickled_model(self, tmp_path: Path) -> None:
        torch.save(nn.Linear(2, 2), tmp_path / "a.pt")
        with pytest.raises(SourceError, match=r"save the model's state_dict\(\) and use that"):
            open_source(tmp_path / "a.pt")

    def test_a_pickle_that_is_no_state_dict(self, tmp_path: Path) -> None:
        torch.save([1, 2], tmp_path / "a.pt")
        with pytest.raises(SourceError, match="holds a list, expected a state dict"):
            open_source(tmp_path / "a.pt")


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_numbers_in_names_sort_as_numbers(one: int, other: int) -> None:
    assert natural_key(f"layer{one}.b") == natural_key(f"layer0{one}.b")
    assert (natural_key(f"layer{one}.b") < natural_key(f"layer{other}.b")) == (one < other)


@pytest.mark.parametrize("name", ["", "1", "a1b22", "layer²", "²", "٣", "ab.0.10", "9" * 5000])
def test_any_name_has_a_place_in_it(name: str) -> None:
    assert sorted(["a", name], key=natural_key)


class Calls:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.count = function, 0

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        self.count += 1
        return self.function(*arguments, **more)


def test_a_header_is_read_once_however_many_tensors_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"layer{n}.weight": seeded(4, 4, seed=n) for n in range(40)}
    save_file(state, tmp_path / "many.safetensors")
    calls = {name: Calls(getattr(safetensors_entries, name)) for name in ("safe_open", "_read_header")}
    for name, counting in calls.items():
        monkeypatch.setattr(safetensors_entries, name, counting)
    fp.compress(tmp_path / "many.safetensors", fp.Scalar(4), to=tmp_path / "out", progress=False)
    assert {name: counting.count for name, counting in calls.items()} == {"safe_open": 1, "_read_header": 1}
    for name, entry in open_source(tmp_path / "many.safetensors").entries.items():
        assert_same_tensor(entry.load(), state[name])


@pytest.mark.parametrize("how", ["replaced", "shorter", "gone"])
def test_a_file_that_changes_after_it_was_opened(how: str, tmp_path: Path) -> None:
    """Its header is known from before: nothing is read from where a tensor was."""
    file = tmp_path / "net.safetensors"
    save_file({"a": seeded(8), "b": seeded(8, seed=1)}, file)
    entry = open_source(file).entries["b"]
    if how == "replaced":
        save_file({"0": seeded(2), "a": seeded(8), "b": seeded(6)}, tmp_path / "other")
        (tmp_path / "other").replace(file)
    elif how == "shorter":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    with pytest.raises(SourceError, match=r"has changed since it was opened|can no longer be read"):
        entry.load()


def tied_folder(folder: Path, state: dict[str, Tensor]) -> Path:
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    return folder


def test_heads_are_read_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tied_folder(tmp_path, {f"head.{n}.weight": seeded(8, 8, seed=n) for n in range(30)})
    reading = Calls(safetensors_entries._read_tensor)
    monkeypatch.setattr(safetensors_entries, "_read_tensor", reading)
    assert open_source(folder).aliases == {}
    assert reading.count == 30


def test_copies_of_heads_and_embeddings_are_aliases(tmp_path: Path) -> None:
    one, two, three = (seeded(8, 8, seed=n) for n in range(3))
    state = {
        "a.head.weight": one,
        "embed.weight": one.clone(),
        "head.0.weight": two,
        "head.1.weight": two.clone(),
        "head.2.weight": one.clone(),
        "head.3.weight": three,
        "head.4.weight": one[:4].clone(),
        "other.weight": one.clone(),
    }
    opened = open_source(tied_folder(tmp_path, state))
    assert opened.aliases == {
        "a.head.weight": "embed.weight",
        "head.0.weight": "head.1.weight",
        "head.2.weight": "embed.weight",
    }
    assert set(opened.entries) == set(state) - set(opened.aliases)


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("model.embed_tokens.weight", (90, 20), True),
        ("lm_head.weight", (90, 20), True),
        ("transformer.wte.weight", (90, 20), True),
        ("output.weight", (90, 20), True),
        ("model.embed_tokens.weight", (80, 20), False),
        ("layers.0.mlp.up_proj.weight", (90, 20), False),
        ("attention.output.dense.weight", (20, 20), False),
        ("patch_embed.proj.weight", (90, 3, 2, 2), False),
    ],
)
def test_words_are_known_by_name_and_shape(name: str, shape: tuple[int, ...], found: bool):
    assert open_source({name: torch.zeros(shape)}).weight(name).is_vocabulary is found
