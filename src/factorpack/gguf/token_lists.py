"""A tokenizer as llama.cpp wants it: its tokens, their kinds and merges, from a folder's tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from factorpack.calibration.model_folder import Folder
from factorpack.errors import SourceError
from factorpack.source import check_inside

LARGEST_TOKENIZER = 1 << 26
FILE, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""llama.cpp's kinds of tokens."""
_NEVER_MERGED = -1e9
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_LETTERS + r"\p{N}{1,3}" + _REST: "llama-bpe", _LETTERS + r"\p{N}" + _REST: "qwen2"}
"""How texts are split into words before merging: the pattern of a tokenizer, and llama.cpp's name for it."""
_SPECIAL = ("bos", "eos", "unk", "pad")


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenizer in lists, one element for each token."""

    model: str
    """llama.cpp's name: "llama" merges by score, as SentencePiece does, "gpt2" by a list of merges."""
    split: str
    texts: list[str]
    kinds: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    special: Mapping[str, int] = field(default_factory=dict)
    adds_space: bool | None = None
    adds_bos: bool | None = None
    template: str = ""


def read_tokens(folder: Folder, words: int) -> Tokens:
    """The tokenizer of a model with that many words; SourceError where llama.cpp has none like it."""
    document = _read_json(folder, FILE)
    settings = _read_json(folder, SETTINGS) if (folder.path / SETTINGS).is_file() else {}
    try:
        return _tokens(folder, document, settings, words)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise SourceError(f"{folder.path / FILE} is not a tokenizer that can be read: {error!r}") from error


def _tokens(folder: Folder, document: dict[str, Any], settings: dict[str, Any], words: int) -> Tokens:
    model = document["model"]
    if model.get("type") != "BPE":
        raise SourceError(
            f"{folder.path} has a {model.get('type')} tokenizer, and a GGUF file is made of BPE alone"
        )
    split = _split(document)
    texts, kinds = _list_tokens(document, words)
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    by_score = split == "default"
    added = settings.get("add_bos_token")
    return Tokens(
        "llama" if by_score else "gpt2",
        split,
        texts,
        kinds,
        _scores(texts, kinds, model["merges"]) if by_score else [],
        [] if by_score else merges,
        _special_tokens(folder, settings, texts),
        "Prepend" in str(document.get("normalizer")) or _metaspace_adds(document) if by_score else None,
        added if isinstance(added, bool) else None,
        _template(folder, settings),
    )


def _split(document: dict[str, Any]) -> str:
    """llama.cpp's name for how a tokenizer splits texts into words."""
    if document["model"].get("byte_fallback") is True:
        return "default"
    steps = document.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    kinds = [step.get("type") for step in steps]
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    if kinds == ["Split", "ByteLevel"] and patterns[0] in _SPLITS:
        return _SPLITS[patterns[0]]
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") is True:
        return "smollm"
    raise SourceError(f"the tokenizer splits texts by {kinds} {patterns}, which llama.cpp may not know")


def _list_tokens(document: dict[str, Any], words: int) -> tuple[list[str], list[int]]:
    """Texts and kinds in the order of their numbers; a model may have more words than its tokenizer."""
    texts = [f"[PAD{number}]" for number in range(words)]
    kinds = [UNUSED] * words
    unknown = document["model"].get("unk_token")
    for text, number in document["model"]["vocab"].items():
        is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        kind = UNKNOWN if text == unknown else BYTE if is_byte else NORMAL
        _put(texts, kinds, number, text, kind)
    for each in document.get("added_tokens", []):
        kind = CONTROL if each.get("special") else USER_DEFINED
        _put(texts, kinds, each["id"], each["content"], UNKNOWN if each["content"] == unknown else kind)
    return texts, kinds


def _put(texts: list[str], kinds: list[int], number: int, text: str, kind: int) -> None:
    if type(number) is not int or not 0 <= number < len(texts) or not isinstance(text, str):
        raise SourceError(
            f"the tokenizer has {text!r} as number {number!r}, and the model has {len(texts)} words"
        )
    texts[number], kinds[number] = text, kind


def _scores(texts: list[str], kinds: list[int], merges: list[Any]) -> list[float]:
    """Earlier merges score higher: llama.cpp then merges in the same order."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    return [
        -float(ranks.get(text, 0) + 1) if text in ranks else _NEVER_MERGED if kind == NORMAL else 0.0
        for text, kind in zip(texts, kinds, strict=True)
    ]


def _metaspace_adds(document: dict[str, Any]) -> bool:
    step = document.get("pre_tokenizer") or {}
    return step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"


def _special_tokens(folder: Folder, settings: dict[str, Any], texts: list[str]) -> dict[str, int]:
    """Numbers of the tokens that begin, end and fill texts: by the tokenizer's settings, or the config."""
    numbers = {text: number for number, text in enumerate(texts)}
    found = {}
    for name in _SPECIAL:
        named = settings.get(f"{name}_token")
        text = named.get("content") if isinstance(named, dict) else named
        number = numbers.get(text) if isinstance(text, str) else folder.config.get(f"{name}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if type(number) is int and 0 <= number < len(texts):
            found[name] = number
    return found


def _template(folder: Folder, settings: dict[str, Any]) -> str:
    file = folder.path / TEMPLATE
    if file.is_file():
        return _read_bytes(folder, TEMPLATE).decode()
    template = settings.get("chat_template")
    return template if isinstance(template, str) else ""


def _read_json(folder: Folder, name: str) -> dict[str, Any]:
    if not (folder.path / name).is_file():
        raise SourceError(
            f"{folder.path} has no {name}, by which llama.cpp would read texts: save it there with the tokenizer's "
            "save_pretrained, or do without (--no-tokenizer, tokenizer=False in Python)"
        )
    try:
        found = json.loads(_read_bytes(folder, name))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{folder.path / name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise SourceError(f"{folder.path / name} holds a {type(found).__name__}, expected a JSON object")
    return found


def _read_bytes(folder: Folder, name: str) -> bytes:
    file: Path = folder.path / name
    check_inside(folder.path, file)
    if file.stat().st_size > LARGEST_TOKENIZER:
        raise SourceError(f"{file} has {file.stat().st_size} bytes, allowed are {LARGEST_TOKENIZER}")
    return file.read_bytes()
