"""Image folders: which image is which class, which pixels a model sees, and what is no image."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from factorpack.errors import PlanError, SourceError
from factorpack.tune.images import MEAN, STD, ImageFolder, image_folder, loader, unlabelled_batches
from tests.helpers import assert_close


def write_image(path: Path, width: int = 8, height: int = 8, mode: str = "RGB", colour: int = 90) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (colour, 255 - colour, 7)).convert(mode).save(path)


def coordinates(path: Path, width: int, height: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """A image whose pixels say where they are: red is x, green is y, blue tells both apart."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x % 256, y % 256, (3 * x + 5 * y) % 256], axis=2).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


def pixels_of(normalized: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The bytes behind what the model sees; each must come back to within rounding."""
    mean, std = torch.tensor(MEAN).double().view(3, 1, 1), torch.tensor(STD).double().view(3, 1, 1)
    raw = (normalized.double() * std + mean) * 255
    assert_close(raw, raw.round(), torch.float32)
    return raw.round().to(torch.uint8).permute(1, 2, 0).numpy()


# -- which images ----------------------------------------------------------------------------------


def test_classes_are_numbered_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, count in {"b": 2, "a": 1, "c9": 1, "c10": 3}.items():
        for number in range(count):
            write_image(tmp_path / name / f"{number}.png")
    (tmp_path / "notes.txt").write_text("no class")
    folder = ImageFolder(tmp_path, side=8)
    assert folder.classes == ["a", "b", "c10", "c9"]
    assert [folder[index][1] for index in range(len(folder))] == [0, 1, 1, 2, 2, 2, 3]


def test_images_are_those_with_a_image_s_suffix_in_order(tmp_path: Path) -> None:
    for name in ("z.png", "a.JPG", "m.jpeg", "b.webp", "k.bmp"):
        write_image(tmp_path / "cat" / name)
    (tmp_path / "cat" / "labels.csv").write_text("1,2")
    found = [path.name for path, _ in ImageFolder(tmp_path).files]
    assert found == ["a.JPG", "b.webp", "k.bmp", "m.jpeg", "z.png"]


def test_a_class_without_images_keeps_its_number(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_image(tmp_path / "b" / "0.png")
    assert ImageFolder(tmp_path, side=8)[0][1] == 1


@pytest.mark.parametrize("content", ["nothing", "a file", "an empty class", "a class of texts"])
def test_a_folder_without_images(tmp_path: Path, content: str) -> None:
    if content == "a file":
        write_image(tmp_path / "cat.png")
    elif content != "nothing":
        (tmp_path / "cat").mkdir()
    if content == "a class of texts":
        (tmp_path / "cat" / "cat.txt").write_text("meow")
    with pytest.raises(SourceError, match=f"{tmp_path.name} holds no class folders with images"):
        ImageFolder(tmp_path)


def test_train_and_val_are_used_where_they_are(tmp_path: Path) -> None:
    assert image_folder(tmp_path, "train") == tmp_path
    (tmp_path / "val").mkdir()
    assert image_folder(tmp_path, "val") == tmp_path / "val"
    assert image_folder(tmp_path, "train") == tmp_path
    (tmp_path / "train").mkdir()
    assert image_folder(tmp_path, "train") == tmp_path / "train"
    with pytest.raises(SourceError, match=r"there is no folder .*missing"):
        image_folder(tmp_path / "missing", "val")


# -- which pixels ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(256, 256), (300, 256), (256, 333), (257, 256)])
def test_evaluation_takes_the_centre_pixel_by_pixel(tmp_path: Path, width: int, height: int) -> None:
    """A short side of 256 is not resized."""
    pixels = coordinates(tmp_path / "a" / "0.png", width, height)
    found, _ = ImageFolder(tmp_path)[0]
    left, top = (width - 224) // 2, (height - 224) // 2
    assert found.shape == (3, 224, 224)
    assert np.array_equal(pixels_of(found), pixels[top : top + 224, left : left + 224])


def test_pixels_are_normalized_as_imagenet_s_are(tmp_path: Path) -> None:
    write_image(tmp_path / "a" / "0.png", colour=200)
    found, _ = ImageFolder(tmp_path, side=7)[0]
    assert found.dtype == torch.float32
    expected = [
        (value / 255 - mean) / std
        for value, mean, std in zip((200, 55, 7), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)
    ]
    assert_close(found[:, 3, 3], torch.tensor(expected, dtype=torch.float64), torch.float32)


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize(("width", "height"), [(100, 50), (50, 100), (3, 3), (1, 60), (31, 31), (640, 480)])
def test_any_size_becomes_the_model_s(tmp_path: Path, width: int, height: int, augment: bool) -> None:
    write_image(tmp_path / "a" / "0.png", width, height, colour=123)
    found, _ = ImageFolder(tmp_path, side=28, augment=augment)[0]
    assert found.shape == (3, 28, 28)
    assert np.array_equal(pixels_of(found), np.full((28, 28, 3), (123, 132, 7), dtype=np.uint8))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "LA"])
def test_any_mode_becomes_three_colours(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a" / ("0.jpg" if mode == "CMYK" else "0.png")
    write_image(path, mode=mode)
    assert ImageFolder(tmp_path, side=7)[0][0].shape == (3, 7, 7)


def test_augmentation_crops_and_mirrors(tmp_path: Path) -> None:
    """8 to 100 % of the area, sides 3:4 to 4:3, mirrored or not, each within a pixel of the result."""
    coordinates(tmp_path / "a" / "0.png", 256, 256)
    folder = ImageFolder(tmp_path, side=64, augment=True)
    torch.manual_seed(0)
    mirrored = []
    for _ in range(30):
        seen = pixels_of(folder[0][0]).astype(float)
        across, down = seen[:, :, 0].mean(0), seen[:, :, 1].mean(1)
        mirrored.append(bool(across[0] > across[-1]))
        assert down[0] < down[-1]
        # The first and the last column's centres are 63/64 of the crop apart.
        wide, high = abs(across[-1] - across[0]) * 64 / 63, (down[-1] - down[0]) * 64 / 63
        slack = 256 / 64
        assert (wide + slack) * (high + slack) >= 0.08 * 256 * 256
        assert max(wide, high) <= 256 + slack
        assert (wide + slack) / (high - slack) >= 3 / 4
        assert (wide - slack) / (high + slack) <= 4 / 3
    assert {True, False} == set(mirrored)


def test_augmentation_draws_from_torch_s_generator(tmp_path: Path) -> None:
    coordinates(tmp_path / "a" / "0.png", 64, 48)
    folder = ImageFolder(tmp_path, side=16, augment=True)
    torch.manual_seed(3)
    first, second = folder[0][0], folder[0][0]
    torch.manual_seed(3)
    assert torch.equal(folder[0][0], first)
    assert not torch.equal(first, second)


# -- what is no image ------------------------------------------------------------------------------


def png() -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((40, 40), 90).save(buffer, "PNG")
    return buffer.getvalue()


def bomb() -> bytes:
    """A bitmap that says it has 10^10 pixels."""
    header = struct.pack("<2sIHHI", b"BM", 100, 0, 0, 54)
    return header + struct.pack("<IiiHHIIiiII", 40, 100_000, 100_000, 1, 24, 0, 0, 0, 0, 0, 0) + bytes(46)


NO_PICTURES = {
    "empty": b"",
    "a text": b"meow",
    "cut off": png()[:500],
    "only a signature": png()[:12],
    "a chunk with a wrong name": png()[:37] + b"\xff\xff\xff\xff" + png()[41:],
    "a broken header": png()[:16] + b"\xff" * 16 + png()[32:],
    "a bomb": bomb(),
}


@pytest.mark.parametrize("case", NO_PICTURES)
@pytest.mark.parametrize("augment", [False, True])
def test_what_cannot_be_read_is_named(tmp_path: Path, case: str, augment: bool) -> None:
    path = tmp_path / "cat" / "broken.png"
    path.parent.mkdir()
    path.write_bytes(NO_PICTURES[case])
    with pytest.raises(SourceError, match=r"cat/broken\.png cannot be read as an image"):
        ImageFolder(tmp_path, side=8, augment=augment)[0]


def test_a_broken_image_is_named_by_a_worker_too(tmp_path: Path) -> None:
    write_image(tmp_path / "cat" / "0.png")
    (tmp_path / "cat" / "1.png").write_bytes(b"meow")
    batches = loader(ImageFolder(tmp_path, side=8), batch_size=2, workers=1)
    with pytest.raises(SourceError, match=r"cat/1\.png cannot be read as an image"):
        list(batches)


# -- batches -----------------------------------------------------------------------------------------


def test_training_drops_the_last_batch_and_evaluation_does_not(tmp_path: Path) -> None:
    for number in range(7):
        write_image(tmp_path / "cat" / f"{number}.png")
    folder = ImageFolder(tmp_path, side=8)
    assert [len(labels) for _, labels in loader(folder, 3, 0)] == [3, 3, 1]
    assert [len(labels) for _, labels in loader(folder, 3, 0, shuffle=True)] == [3, 3]
    inputs, labels = next(iter(loader(folder, 7, 0, shuffle=True)))
    assert (tuple(inputs.shape), labels.tolist()) == ((7, 3, 8, 8), [0] * 7)
    with pytest.raises(SourceError, match="7 images do not fill a batch of 8"):
        loader(folder, 8, 0, shuffle=True)


def test_numbers_that_would_stop_the_machine_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "a" / "x.png")
    for side in (0, -3, 10**6):
        with pytest.raises(PlanError, match=f"the image size is {side}, allowed are 1 to 4096"):
            ImageFolder(tmp_path, side)
        with pytest.raises(PlanError, match="the image size"):
            next(unlabelled_batches(tmp_path, 1, side))
    images = ImageFolder(tmp_path, 8)
    for workers in (-1, 10**6):
        with pytest.raises(PlanError, match=r"loading processes is .*, allowed are 0 to 64"):
            loader(images, 1, workers)
    with pytest.raises(PlanError, match="a batch of 0 images"):
        loader(images, 0, 0)
