"""What kind of checkpoint a file is: by its ending, or by how it begins where the ending says nothing."""

from __future__ import annotations

import zipfile
from pathlib import Path

from factorpack.format.safetensors_file import GGUF, LEGACY_TORCH, ZIP

PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".tar")
"""Endings of torch files; `.pth.tar` is one and no archive of files."""
SHARDS = (".safetensors", *PICKLED)
ENDINGS = (*SHARDS, ".npz", ".gguf", ".index.json")


def kind_of(path: Path) -> str:
    """The usual ending of files of this kind, in lower case; the file's own ending where the kind is not known."""
    if path.name.lower().endswith(".index.json"):
        return ".index.json"
    ending = path.suffix.lower()
    if ending in ENDINGS or not path.is_file():
        return ending
    return _kind_by_content(path) or ending


def _kind_by_content(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(16)
    if head.startswith(GGUF):
        return ".gguf"
    if head.startswith(LEGACY_TORCH):
        return ".pt"
    if head.startswith(ZIP):
        return _kind_of_archive(path)
    length = int.from_bytes(head[:8], "little")
    return ".safetensors" if head[8:9] == b"{" and 8 + length <= path.stat().st_size else None


def _kind_of_archive(path: Path) -> str | None:
    """Of a zip archive: torch's own have a pickle of this name, NumPy's nothing but arrays."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, NotImplementedError):
        return None
    if any(name.endswith("/data.pkl") for name in names):
        return ".pt"
    return ".npz" if names and all(name.endswith(".npy") for name in names) else None
