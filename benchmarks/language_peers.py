"""A Llama by torchao and by llama.cpp, each by its own package: the bytes of a file, and what it decodes to."""

from __future__ import annotations

import copy
import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.gguf.llama_layout import read_layout
from factorpack.source import read_config

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Made:
    """A peer's file of a model."""

    tool: str
    setting: str
    version: str
    bytes: int
    state: State
    """What the file says the weights are, FP32, under transformers' names."""
    types: dict[str, int] = field(default_factory=dict)
    """How many matrices have which type, where the file says so."""


# torchao


TABLES = ("bf16", "int8", "int4")


def by_torchao(model: nn.Module, table: str, path: Path) -> Made:
    """Linear layers in int4, groups of 32, by HQQ, with BF16 scales: the config for CPUs, of which this is the best.

    The embedding and the head are one table. It is left in BF16, or stored once as a head in int8 or int4 that the
    embedding reads too, which is more than torchao does by itself.
    """
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from torchao.quantization.quantize_.workflows import Int4ChooseQParamsAlgorithm

    coded = copy.deepcopy(model).bfloat16()
    config = PrototypeInt4WeightOnlyConfig(32, Int4ChooseQParamsAlgorithm.HQQ)
    quantize_(coded, config, lambda module, name: isinstance(module, nn.Linear) and name != "lm_head")
    if table != "bf16":
        head = config if table == "int4" else Int8WeightOnlyConfig()
        quantize_(coded, head, lambda _, name: name == "lm_head")
    state = {name: value for name, value in coded.state_dict().items() if name != TABLE}
    torch.save(state, path)
    decoded = {name: _decoded(coded, name, value) for name, value in state.items()}
    setting = f"int4, groups of 32, HQQ; table {table}"
    return Made("torchao", setting, version("torchao"), path.stat().st_size, decoded | {TABLE: decoded[HEAD]})


def _decoded(model: nn.Module, name: str, value: Tensor) -> Tensor:
    """What a layer multiplies by: CPU codes of int4 have no other way to be read than a product with one."""
    if type(value) in (Tensor, nn.Parameter):
        return value.float()
    layer = model.get_submodule(name.removesuffix(".weight"))
    with torch.inference_mode():
        columns: Tensor = layer(torch.eye(value.shape[1], dtype=torch.bfloat16))
    return columns.T.float().contiguous()


# llama.cpp


def write_original(folder: Path, path: Path) -> None:
    """The model in FP32, without a tokenizer: what llama.cpp quantizes."""
    fp.gguf.export(
        fp.compress(folder, fp.Keep(), progress=False), path, like=folder, dtype="f32", tokenizer=False
    )


@dataclass(frozen=True, slots=True)
class GGUFSettings:
    """What llama-quantize is told: a file type, another type for the table of tokens, an importance matrix."""

    ftype: str
    table: str = ""
    importance: State = field(default_factory=dict)

    def __str__(self) -> str:
        table = f"; table {self.table}" if self.table else ""
        return f"{self.ftype}{table}{'; importance matrix' if self.importance else ''}"


def by_llama_cpp(folder: Path, original: Path, given: GGUFSettings, path: Path) -> Made:
    """`llama_model_quantize`, as the program llama-quantize calls it."""
    import gguf
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.nthread = torch.get_num_threads()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{given.ftype}")
    if given.table:
        settings.token_embedding_type = int(gguf.GGMLQuantizationType[given.table])
    with _as_array(given.importance) as array:
        settings.imatrix = array
        status = llama_cpp.llama_model_quantize(
            str(original).encode(), str(path).encode(), ctypes.byref(settings)
        )
    if status:
        raise RuntimeError(f"llama.cpp ends with status {status} at {given}")
    state, types = read_llama(folder, path)
    return Made("llama.cpp", str(given), version("llama-cpp-python"), path.stat().st_size, state, types)


@contextmanager
def _as_array(importance: State) -> Iterator[Any]:
    """An importance matrix as llama.cpp takes it: ends with an entry without a name. None stays None."""
    from llama_cpp import llama_model_imatrix_data as Entry

    if not importance:
        yield None
        return
    held = {name: values.float().contiguous() for name, values in importance.items()}
    array = (Entry * (len(held) + 1))()
    for entry, (name, values) in zip(array, held.items(), strict=False):
        entry.name, entry.size = name.encode(), values.numel()
        entry.data = ctypes.cast(values.data_ptr(), ctypes.POINTER(ctypes.c_float))
    yield array


def importance_of(folder: Path, model: nn.Module, tokens: Tensor) -> State:
    """The mean square of each column's inputs over some texts, under llama.cpp's names, as llama-imatrix has it."""
    layout = read_layout(read_config(folder / "config.json"))
    sums: State = {}
    counts: Counter[str] = Counter()

    def collect(name: str, inputs: Tensor) -> None:
        flat = inputs.detach().flatten(0, -2).double()
        sums[name] = sums.get(name, 0) + flat.square().sum(0)
        counts[name] += len(flat)

    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            known = layout.name(TABLE if name == "lm_head" else f"{name}.weight")
            assert known is not None
            hooks.append(
                module.register_forward_pre_hook(lambda _, args, known=known: collect(known, args[0]))
            )
    with torch.inference_mode():
        for batch in tokens.split(8):
            model(input_ids=batch)
    for hook in hooks:
        hook.remove()
    return {name: total / counts[name] for name, total in sums.items()}


def read_llama(folder: Path, path: Path) -> tuple[State, dict[str, int]]:
    """A GGUF file's weights by the gguf package, under transformers' names; and the types of its matrices."""
    import gguf

    layout = read_layout(read_config(folder / "config.json"))
    found: State = {}
    types: Counter[str] = Counter()
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
        found[tensor.name] = values.reshape(tuple(int(side) for side in reversed(tensor.shape)))
        if values.dim() > 1:
            types[tensor.tensor_type.name] += 1
    state = {}
    for name in _names(folder):
        known = layout.name(name)
        assert known is not None
        state[name] = _rearranged(layout, known, found[known])
    return state | {HEAD: state[TABLE]}, dict(types)


def _names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


def _rearranged(layout: Any, name: str, values: Tensor) -> Tensor:
    """Rows of queries and keys in transformers' order: the inverse of `layout.arranged`."""
    order = layout.arranged(name, torch.arange(len(values)))
    return values[order.argsort()]
