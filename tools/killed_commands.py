"""The command lines that `tools.kill_runs` kills, and the inputs they share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors.torch import save_file

import factorpack as fp
from tests.commands.test_compress_budget import wide_net
from tests.helpers import seeded
from tests.hub.conftest import save_llama
from tests.tune.small_net import build, write_images


@dataclass(frozen=True)
class Command:
    """A command line for a folder of inputs and one of outputs, and what of its result must be the same."""

    arguments: Callable[[Path, Path], list[str]]
    content: Callable[[Path], bytes] = Path.read_bytes
    prepare: Callable[[Path], None] | None = None
    """Makes inputs of its own, where they are not there yet."""
    kept: tuple[str, ...] = ()
    """Names of what it keeps on purpose until it is done."""


def inputs(folder: Path) -> None:
    """A checkpoint of many tensors, two small nets, and images."""
    folder.mkdir()
    many = {f"layer{n}.weight": seeded(96, 200 + n, seed=n) for n in range(10)}
    save_file(many | {f"layer{n}.bias": seeded(96, seed=n) for n in range(10)}, folder / "many.safetensors")
    save_file(build().state_dict(), folder / "small.safetensors")
    save_file(wide_net().state_dict(), folder / "wide.safetensors")
    (folder / "recipe.toml").write_text(
        '[default]\nmethod = "qspca"\nrank = 6\nlatent_bits = 4\ntile = 16\n[finetune]\nepochs = 3\n'
    )
    for split in ("train", "val"):
        write_images(folder / "data" / split, 6)


def _large(folder: Path) -> None:
    """A checkpoint and its packed file, of a size that takes a while to read and write."""
    original, packed = folder / "large.safetensors", folder / "large.packed.safetensors"
    if not packed.exists():
        save_file({f"layer{n}.weight": seeded(1024, 256, seed=n) for n in range(40)}, original)
        fp.compress(original, fp.Scalar(bits=4), progress=False, to=packed)


def _images_model(folder: Path) -> None:
    fp.compress(build(), fp.Scalar(bits=4), progress=False, to=folder / "small.packed.safetensors")


def _language_model(folder: Path) -> None:
    """A folder of a language model, the packed folder of it, and a text."""
    import transformers  # takes seconds, which short runs do without

    if not (folder / "llama").exists():
        save_llama(transformers, folder / "llama", tied=False)
        packed = fp.compress(folder / "llama", fp.Scalar(bits=4), progress=False)
        fp.hub.save_pretrained(packed, folder / "llama-packed", like=folder / "llama")
        fp.hub.from_pretrained(folder / "llama-packed")  # imports what opening one takes
        (folder / "text.txt").write_text("the cat sat on a mat and looked at the dog .\n" * 400)


def _decode(given: Path, out: Path) -> list[str]:
    return ["decode", str(given / "large.packed.safetensors"), "-o", str(out / "plain.safetensors")]


def _report(given: Path, out: Path) -> list[str]:
    original = ["--original", str(given / "large.safetensors"), "--force"]
    return ["report", str(given / "large.packed.safetensors"), "-o", str(out / "page.html"), *original]


def _export(given: Path, out: Path) -> list[str]:
    model = ["--model", "tests.tune.small_net:build", "--image-size", "14"]
    return ["export", str(given / "small.packed.safetensors"), *model, "-o", str(out / "net.onnx")]


def _compress_folder(given: Path, out: Path) -> list[str]:
    return ["compress", str(given / "llama"), "-o", str(out / "packed"), "--method", "scalar", "--bits", "4"]


def _eval(given: Path, _out: Path) -> list[str]:
    """Writes to the temporary folder alone."""
    text = ["--perplexity", str(given / "text.txt"), "--length", "32"]
    return ["eval", str(given / "llama-packed"), *text]


def _demo(_given: Path, out: Path) -> list[str]:
    return ["demo", "--folder", str(out)]


def _compress(how: list[str], given: Path, out: Path) -> list[str]:
    engine = ["--engine", "local", "--workers", "2"]
    return ["compress", str(given / "many.safetensors"), "-o", str(out / "packed.safetensors"), *how, *engine]


def _calibrated(how: list[str], given: Path, out: Path) -> list[str]:
    model = ["--model", "tests.commands.test_compress_budget:wide_net", "--image-size", "14"]
    data = ["--calibration", str(given / "data" / "train")]
    target = ["-o", str(out / "packed.safetensors")]
    kept = ["--curves", str(out / "curves.json")]
    return ["compress", str(given / "wide.safetensors"), *target, *how, *model, *data, *kept]


def _finetune(given: Path, out: Path) -> list[str]:
    reading = ["--data", str(given / "data"), "--image-size", "14", "--batch-size", "4", "--workers", "0"]
    how = ["--recipe", str(given / "recipe.toml"), "--model", "tests.tune.small_net:build"]
    state = ["--checkpoint-every", "2"]
    target = ["-o", str(out / "packed.safetensors")]
    return ["finetune", str(given / "small.safetensors"), *target, *how, *reading, *state]


def _compare(name: str, net: str, ratios: str, given: Path, out: Path) -> list[str]:
    model = ["--model", net, "--image-size", "14", "--workers", "0"]
    grid = ["--methods", "planned,scalar,ttq", "--ratios", ratios]
    more = ["--data", str(given / "data"), "--engine", "local", "--engine-workers", "2"]
    return ["compare", str(given / f"{name}.safetensors"), "-o", str(out / "grid"), *model, *grid, *more]


def _point(path: Path) -> bytes:
    """A file as it is; of a point everything but the seconds it took, and of their table nothing."""
    if path.suffix == ".md":
        return b""
    if path.suffix != ".json":
        return path.read_bytes()
    document = json.loads(path.read_text())
    document.pop("checksum", None)
    for point in document.get("points", [document]):
        point.pop("compress_s")
    return json.dumps(document).encode()


COMMANDS = {
    "compress": Command(partial(_compress, ["--rank", "24", "--latent-bits", "4", "--set", "tile=32"])),
    "compress --ratio": Command(partial(_compress, ["--ratio", "12"])),
    "compress --ratio --calibration": Command(partial(_calibrated, ["--ratio", "12"])),
    "compress --max-loss": Command(partial(_calibrated, ["--max-loss", "0.01"])),
    "finetune": Command(_finetune),
    "compare": Command(
        partial(_compare, "wide", "tests.commands.test_compress_budget:wide_net", "4,8"), _point
    ),
    "decode": Command(_decode, prepare=_large),
    "report": Command(_report, prepare=_large),
    "export": Command(_export, prepare=_images_model),
    "demo": Command(_demo),
    "compress a folder": Command(
        _compress_folder, prepare=_language_model, kept=("packed.packed.safetensors", ".packed.finished")
    ),
    "eval a folder": Command(_eval, prepare=_language_model),
    "compare a small net": Command(partial(_compare, "small", "tests.tune.small_net:build", "1.9"), _point),
}
