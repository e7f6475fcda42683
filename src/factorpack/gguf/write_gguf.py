"""`export`: a packed language model as a GGUF file, written by the gguf package, one tensor at a time."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from factorpack.calibration.model_folder import Folder, open_folder
from factorpack.decoding import decode
from factorpack.errors import PlanError, SourceError
from factorpack.format.atomic import rename, scratch_folder
from factorpack.format.container import check_target
from factorpack.format.overwrite import check_output
from factorpack.gguf.llama_layout import EMBEDDING, HEAD, ROPE, Layout, read_layout
from factorpack.gguf.token_lists import Tokens, read_tokens
from factorpack.packed import Packed, cast
from factorpack.printable import printable

PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
QUANTIZED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
TYPES = (*PLAIN, *QUANTIZED)
"""Types of matrices that llama.cpp reads and the gguf package writes."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export: the file's bytes, and how many tensors have which type."""

    bytes: int
    types: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Planned:
    """A tensor of the file: where it comes from, and its type there."""

    name: str
    source: str
    shape: tuple[int, ...]
    type: str


def export(
    packed: Packed,
    path: str | Path,
    like: str | Path,
    *,
    dtype: str | None = None,
    tokenizer: bool = True,
) -> Exported:
    """Writes a Llama, Mistral or Qwen2 as a GGUF file, which llama.cpp runs.

    `like` is the model's folder, packed or not: its config says what model it is, and its `tokenizer.json` goes
    into the file unless `tokenizer` is False. Matrices get `dtype`, one of "f32", "f16", "bf16", "q8_0", "q5_1",
    "q5_0", "q4_1" and "q4_0", or else stay as they are; vectors are FP32. Needs `pip install 'factorpack[gguf]'`.

    >>> fp.gguf.export(packed, "small.gguf", like="llama", dtype="q8_0")  # doctest: +SKIP
    """
    gguf, path = _import_gguf(), Path(path)
    if dtype is not None and dtype not in TYPES:
        raise PlanError(f"dtype is {dtype!r}, a GGUF file takes {', '.join(TYPES)}")
    folder = open_folder(like)
    layout = read_layout(folder.config)
    tokens = read_tokens(folder, layout.words) if tokenizer else None
    plan = list(_plan(packed, layout, dtype, gguf))
    check_output(path, packed.path, folder.path)
    check_target(path)
    with scratch_folder(path) as scratch:
        made = scratch / "model.gguf"
        _write(gguf, made, packed, plan, layout, folder, tokens)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        rename(made, path)
    return Exported(path.stat().st_size, Counter(each.type for each in plan))


def _import_gguf() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise PlanError(
            "a GGUF file is written by the gguf package: pip install 'factorpack[gguf]'"
        ) from error


def _plan(packed: Packed, layout: Layout, dtype: str | None, gguf: Any) -> Iterator[_Planned]:
    """Every tensor of the file. A head that is tied to the embedding is not in it: llama.cpp takes that."""
    shapes = packed.shapes()
    found: dict[str, str] = {}
    for source in (*packed, *packed.aliases):
        name = layout.name(source)
        if name is not None and name in found:
            raise SourceError(f"the tensors {found[name]!r} and {source!r} would both be {name!r}")
        if name is not None:
            found[name] = source
    if HEAD in found and EMBEDDING in found and packed.aliases.get(found[HEAD]) == found[EMBEDDING]:
        del found[HEAD]
    for name, shape in layout.required():
        if name not in found:
            raise SourceError(
                f"the packed file has no tensor for {name!r}, which a {layout.architecture} needs"
            )
        if shapes[found[name]][1] != shape:
            raise SourceError(f"tensor {found[name]!r} is {shapes[found[name]][1]}, by the config {shape}")
    for name, source in found.items():
        own, shape = shapes[source]
        yield _Planned(name, source, shape, _type_of(own, shape, dtype, gguf))


def _type_of(own: torch.dtype, shape: tuple[int, ...], dtype: str | None, gguf: Any) -> str:
    if len(shape) < 2:
        return "f32"
    if dtype is None:
        return next((name for name, kind in PLAIN.items() if kind == own), "f32")
    if dtype in QUANTIZED and shape[-1] % gguf.GGML_QUANT_SIZES[_kind(gguf, dtype)][0]:
        return "f16"  # no whole number of blocks
    return dtype


def _kind(gguf: Any, name: str) -> Any:
    return gguf.GGMLQuantizationType[name.upper()]


def _write(
    gguf: Any,
    path: Path,
    packed: Packed,
    plan: list[_Planned],
    layout: Layout,
    folder: Folder,
    tokens: Tokens | None,
) -> None:
    writer = gguf.GGUFWriter(path, layout.architecture)
    try:
        main = Counter(each.type for each in plan if len(each.shape) > 1).most_common(1)[0][0]
        _add_values(gguf, writer, layout, folder, main)
        _add_tokens(writer, tokens, layout.words)
        factors = layout.rope.factors(layout.head_width)
        if factors is not None:
            writer.add_tensor_info(ROPE, tuple(factors.shape), np.dtype(np.float32), 4 * factors.numel())
        for each in plan:
            kind = _kind(gguf, each.type)
            elements, size = gguf.GGML_QUANT_SIZES[kind]
            count = torch.Size(each.shape).numel() // elements * size
            writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), count, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors.numpy())
        for each in plan:
            values = layout.arranged(each.name, decode(packed[each.source]))
            writer.write_tensor_data(_stored(gguf, each, values))
    finally:
        writer.close()


def _stored(gguf: Any, planned: _Planned, values: Tensor) -> Any:
    if planned.type in QUANTIZED:
        return gguf.quants.quantize(values.float().contiguous().numpy(), _kind(gguf, planned.type))
    values = cast(planned.source, values, PLAIN[planned.type]).contiguous()
    return values.view(torch.int16).numpy() if planned.type == "bf16" else values.numpy()


def _add_values(gguf: Any, writer: Any, layout: Layout, folder: Folder, main: str) -> None:
    writer.add_name(printable(folder.path.resolve().name))
    mostly = "ALL_F32" if main == "f32" else f"MOSTLY_{main.upper()}"
    writer.add_file_type(gguf.LlamaFileType[mostly])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(layout.positions)
    writer.add_embedding_length(layout.width)
    writer.add_block_count(layout.blocks)
    writer.add_feed_forward_length(layout.inner_width)
    writer.add_head_count(layout.heads)
    writer.add_head_count_kv(layout.kv_heads)
    writer.add_key_length(layout.head_width)
    writer.add_value_length(layout.head_width)
    writer.add_layer_norm_rms_eps(layout.epsilon)
    writer.add_rope_dimension_count(layout.head_width)
    writer.add_rope_freq_base(layout.rope.base)
    if layout.rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(layout.rope.number("factor"))


def _add_tokens(writer: Any, tokens: Tokens | None, words: int) -> None:
    writer.add_vocab_size(words)
    if tokens is None:
        writer.add_tokenizer_model("no_vocab")
        return
    writer.add_tokenizer_model(tokens.model)
    writer.add_tokenizer_pre(tokens.split)
    writer.add_token_list(tokens.texts)
    writer.add_token_types(tokens.kinds)
    writer.add_token_scores(tokens.scores)
    writer.add_token_merges(tokens.merges)
    for name, number in tokens.special.items():
        getattr(writer, f"add_{name}_token_id")(number)
    if tokens.adds_space is not None:
        writer.add_add_space_prefix(tokens.adds_space)
    if tokens.adds_bos is not None:
        writer.add_add_bos_token(tokens.adds_bos)
    if tokens.template:
        writer.add_chat_template(tokens.template)
