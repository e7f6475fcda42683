"""Components of diffusers: their folders there and back, and the models themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import factorpack as fp
from factorpack.calibration.model_folder import CARD, CONFIG, open_folder
from factorpack.commands import app
from factorpack.errors import SourceError


@pytest.fixture
def diffusers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("diffusers", reason="opening components needs the diffusers extra")


def unet(diffusers: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = diffusers.UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()
    return model


def answer(model: nn.Module) -> Tensor:
    images = torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8)
    with torch.no_grad():
        found: Tensor = model(images, torch.tensor([3, 500])).sample
    return found


@pytest.fixture
def folder(diffusers: Any, tmp_path: Path) -> Path:
    """A unet in shards."""
    unet(diffusers).save_pretrained(tmp_path / "unet", max_shard_size="500KB")  # type: ignore[operator]
    assert (tmp_path / "unet" / "diffusion_pytorch_model.safetensors.index.json").is_file()
    return tmp_path / "unet"


def test_a_folder_there_and_back_on_the_command_line(folder: Path, tmp_path: Path) -> None:
    small = tmp_path / "small-unet"
    done = CliRunner().invoke(
        app, ["compress", str(folder), "-o", str(small), "--method", "scalar", "--bits", "6"]
    )
    assert done.exit_code == 0, done.output
    config = json.loads((small / CONFIG).read_text())
    assert config["_class_name"] == "UNet2DModel"
    assert config["quantization_config"]["quant_method"] == "factorpack"
    assert "dtype" not in config
    card = (small / CARD).read_text()
    assert "factorpack[diffusers]" in card
    assert "transformers" not in card
    opened = fp.hub.from_pretrained(small)
    assert not opened.training
    expected = fp.load(small / "model.packed.safetensors").load_into(fp.hub.from_pretrained(folder))
    assert torch.equal(answer(opened), answer(expected))
    assert 0 < (answer(opened) - answer(fp.hub.from_pretrained(folder))).abs().max() < 1


@pytest.mark.parametrize("mode", ["packed", "factored"])
def test_it_may_run_on_its_codes(folder: Path, tmp_path: Path, mode: Any) -> None:
    fp.hub.save_pretrained(fp.compress(folder, fp.Scalar(4), progress=False), tmp_path / "small", folder)
    dense, coded = (
        fp.hub.from_pretrained(tmp_path / "small"),
        fp.hub.from_pretrained(tmp_path / "small", mode),
    )
    torch.testing.assert_close(answer(coded), answer(dense))


def test_the_model_itself(diffusers: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), latent_channels=4, norm_num_groups=8).eval()
    packed = fp.compress(vae, fp.Scalar(8), progress=False)
    fp.hub.save_pretrained(packed, tmp_path / "small", vae)
    opened = fp.hub.from_pretrained(tmp_path / "small")
    assert type(opened) is type(vae)
    state = packed.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in opened.state_dict().items())


@pytest.mark.parametrize("name", ["DDPMScheduler", "logging", "NoSuchModel", "__version__"])
def test_a_class_that_is_no_model_of_diffusers(folder: Path, name: str) -> None:
    config = json.loads((folder / CONFIG).read_text()) | {"_class_name": name}
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(SourceError, match=f"has no model '{name}', and factorpack never runs code"):
        fp.hub.from_pretrained(folder)


@pytest.mark.parametrize("name", [None, 3, ["UNet2DModel"]])
def test_a_class_name_that_is_none(folder: Path, name: Any) -> None:
    config = json.loads((folder / CONFIG).read_text()) | {"_class_name": name}
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(SourceError, match="expected a list with a class of transformers"):
        _ = open_folder(folder).architecture


def test_a_packed_file_of_another_model(folder: Path, tmp_path: Path) -> None:
    fp.hub.save_pretrained(fp.compress(folder, fp.Scalar(4), progress=False), tmp_path / "small", folder)
    config = json.loads((tmp_path / "small" / CONFIG).read_text()) | {"block_out_channels": [32, 96]}
    (tmp_path / "small" / CONFIG).write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"tensor .* in the file"):
        fp.hub.from_pretrained(tmp_path / "small")


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_config_that_promises_more_than_the_weights(
    diffusers: Any, tmp_path: Path, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some 400 million elements beside a few thousand; refused before memory is taken."""
    folder = tmp_path / "unet"
    model = unet(diffusers)
    if is_packed:
        fp.hub.save_pretrained(fp.compress({"conv_in.bias": torch.ones(32)}, progress=False), folder, model)
    else:
        folder.mkdir()
        model.save_config(folder)  # type: ignore[operator]
        save_file({"conv_in.bias": torch.ones(32)}, folder / "diffusion_pytorch_model.safetensors")
    config = json.loads((folder / CONFIG).read_text()) | {"block_out_channels": [32, 2048]}
    (folder / CONFIG).write_text(json.dumps(config))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 6000
    on_meta = []
    register = nn.Module.register_parameter

    def watch(self: nn.Module, name: str, value: nn.Parameter | None) -> None:
        on_meta.append(value is None or value.is_meta)
        register(self, name, value)

    monkeypatch.setattr(nn.Module, "register_parameter", watch)
    with pytest.raises(SourceError, match=r"a UNet2DModel has \d+ elements or more, and the weights in"):
        fp.hub.from_pretrained(folder)
    assert on_meta
    assert all(on_meta)


def test_without_diffusers_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / CONFIG).write_text('{"_class_name": "UNet2DModel"}')
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(SourceError, match=r"needs diffusers: pip install 'factorpack\[diffusers\]'"):
        fp.hub.from_pretrained(tmp_path)
