"""A walk: the moments are those of whole passes, bit for bit, and depth costs once."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.batches import hooked
from factorpack.budget.knowledge import Knowledge, learn
from factorpack.budget.planner import BudgetRequest, Planner
from factorpack.budget.tensors import split_tensors
from factorpack.calibration import joined
from factorpack.calibration import walk as walk_module
from factorpack.calibration.calibrate import Calibration, calibrate
from factorpack.calibration.walk import Walk
from factorpack.record import LayerMoments
from factorpack.solve.moments import has_moments
from factorpack.source import open_source
from tests.helpers import assert_close, assert_same_tensor, seeded
from tests.passes.test_segments import MODELS, Chain, llama, padded_tokens


def assert_same(found: LayerMoments, expected: LayerMoments) -> None:
    for part in ("second", "mean", "cross", "original_mean", "original_power"):
        mine, wanted = getattr(found, part), getattr(expected, part)
        assert (mine is None) == (wanted is None), part
        if part == "cross" and wanted is not None:  # a product of three, in one order or the other
            assert_close(mine, wanted.double())
        elif wanted is not None:
            assert_same_tensor(mine, wanted)


def halves(batch: Any) -> list[Any]:
    if isinstance(batch, Tensor):
        return [batch[:2], batch[2:]]
    return [{key: value[part] for key, value in batch.items()} for part in (slice(2), slice(2, None))]


def made(case: str) -> tuple[nn.Module, Calibration, list[str]]:
    torch.manual_seed(0)
    model, batch = MODELS[case][0]().eval(), MODELS[case][1]()
    calibration = calibrate(model, halves(batch))
    layers = [name for name in calibration.order if has_moments(model.get_submodule(name))]
    small = [name for name in layers if not name.startswith(("layer3", "layer4"))]  # the others take seconds
    return model, calibration, small


@contextmanager
def counted(model: nn.Module, counts: Counter[str]) -> Iterator[None]:
    """Counts the layers that compute: neither stubs, nor those at which a pass stops."""

    def hook(module: nn.Module, _inputs: Any, _output: Any) -> None:
        if "forward" not in module.__dict__:
            counts["calls"] += 1

    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    with hooked(model, after=dict.fromkeys(layers, hook)):
        yield


def change(model: nn.Module, layer: str) -> None:
    with torch.no_grad():
        weight = model.get_submodule(layer).weight
        assert isinstance(weight, Tensor)
        weight.mul_(0.9)


@pytest.mark.parametrize(
    ("case", "limit"),
    [(case, 1 << 40) for case in MODELS if case != "one layer"] + [("llama", 0), ("blocks", 0)],
)
def test_moments_along_the_way_are_those_of_whole_passes(
    case: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer is changed once it is visited, as compression does; `limit` 0 keeps no borders at all."""
    monkeypatch.setattr(walk_module, "free_bytes", lambda: limit)
    model, calibration, layers = made(case)
    compressed = copy.deepcopy(model)
    walk = Walk(calibration, model, compressed, layers)
    for layer in layers:
        assert_same(walk.moments(layer), calibration.moments([layer], model, compressed)[layer])
        change(compressed, layer)


def test_a_walk_that_begins_anywhere_finds_the_same_bits() -> None:
    """As a resumed run does, also amid layers that share their input, whose sums are made together."""
    model = llama(2)
    calibration = calibrate(model, [padded_tokens()])
    layers = [name for name in calibration.order if has_moments(model.get_submodule(name))]
    compressed = copy.deepcopy(model)
    walk = Walk(calibration, model, compressed, layers)
    for layer in layers:
        found, begun = walk.moments(layer), Walk(calibration, model, compressed, layers).moments(layer)
        for part in ("second", "mean", "cross", "original_mean", "original_power"):
            assert_same_tensor(getattr(begun, part), getattr(found, part))
        change(compressed, layer)


@pytest.mark.parametrize(
    ("case", "size", "limit"),
    [(case, 3, 1 << 40) for case in MODELS]
    + [(case, *how) for case in ("llama", "blocks") for how in ((1, 1 << 40), (100, 1 << 40), (3, 0))],
)
def test_moments_of_one_network_are_collected_in_passing(
    case: str, size: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk_module, "free_bytes", lambda: limit)
    model, calibration, layers = made(case)
    walk = Walk(calibration, model, None, layers)
    for start in range(0, len(layers), size):
        part = layers[start : start + size]
        found = walk.collect(part)
        assert list(found) == part
        for layer, expected in calibration.moments(part, model).items():
            assert_same(found[layer], expected)


def test_samples_along_the_way() -> None:
    model, calibration, layers = made("blocks")
    compressed = copy.deepcopy(model)
    walk = Walk(calibration, model, compressed)
    for layer in layers:
        found, expected = walk.sample(layer), calibration.sample(layer, model, compressed)
        assert_same_tensor(found.inputs, expected.inputs)
        assert_same_tensor(found.outputs, expected.outputs)
        change(compressed, layer)


def test_a_layer_behind_and_a_layer_skipped() -> None:
    model, calibration, layers = made("blocks")
    walk = Walk(calibration, model, model, layers)
    for layer in (layers[0], layers[-1], layers[2], layers[-1]):
        assert_same(walk.moments(layer), calibration.moments([layer], model, model)[layer])


def test_a_change_behind_the_walk_is_seen() -> None:
    """Two layers may share a weight that is coded at the later one."""
    model, calibration, layers = made("llama")
    compressed = copy.deepcopy(model)
    walk = Walk(calibration, model, compressed, layers)
    walk.moments("model.layers.2.self_attn.q_proj")
    change(compressed, "model.layers.0.mlp.up_proj")
    for layer in ("model.layers.2.self_attn.k_proj", "model.layers.2.mlp.down_proj"):
        assert_same(walk.moments(layer), calibration.moments([layer], model, compressed)[layer])


def test_layers_with_one_input_share_its_moments() -> None:
    model, calibration, layers = made("llama")
    walk = Walk(calibration, model, copy.deepcopy(model), layers)
    counts: Counter[str] = Counter()
    with counted(model, counts):
        q, k, v = (walk.moments(f"model.layers.1.self_attn.{key}_proj") for key in "qkv")
        # two batches to the border, and from there to the block's last layer, for what the others of it get
        assert counts["calls"] == 2 * (7 + 6)
    assert q.second is k.second is v.second
    assert q.original_mean is k.original_mean
    assert q.original_power is not None
    assert k.original_power is not None
    assert q.original_power.shape != k.original_power.shape


def calls_of_a_sequential_pass(depth: int) -> int:
    model = llama(depth)
    calibration = calibrate(model, [padded_tokens()])
    layers = [name for name in calibration.order if has_moments(model.get_submodule(name))]
    compressed, counts = copy.deepcopy(model), Counter[str]()
    walk = Walk(calibration, model, compressed, layers)
    with counted(model, counts), counted(compressed, counts):
        for layer in layers:
            walk.moments(layer)
    return counts["calls"]


def test_depth_costs_once() -> None:
    """A block of seven layers: four different inputs, found after 0, 3, 4 and 6 layers, and the way on, 7.

    In the original, which does not change, one pass of 6 layers finds all four.
    """
    assert [calls_of_a_sequential_pass(depth) for depth in (2, 4, 8)] == [(20 + 13) * d for d in (2, 4, 8)]


def test_inputs_that_take_much_memory_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes then stop where memory ends, at the first of their layers if need be, and begin again from the border."""
    monkeypatch.setattr(walk_module, "SEEN_BYTES", 1)
    assert calls_of_a_sequential_pass(2) == (20 + 20) * 2
    width, tokens = llama(2).config.hidden_size, padded_tokens()["input_ids"].numel()
    monkeypatch.setattr(
        walk_module, "SEEN_BYTES", 4 * width * tokens
    )  # two inputs: those of q and o, gate and down
    assert calls_of_a_sequential_pass(2) == (20 + 3 + 6 + 7) * 2


def test_a_plan_s_moments_cost_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many groups the layers are gathered in."""
    model = llama(4)
    groups, calls = [], []
    for limit in (1 << 30, 1):
        monkeypatch.setitem(Knowledge._groups.__globals__, "MOMENT_BYTES", limit)
        calibration = calibrate(model, [padded_tokens()])
        request = BudgetRequest(open_source(model), model, calibration, Planner(equal_slope=False), {}, ())
        tensors = split_tensors(request)
        knowledge = learn(tensors, request.planner, calibration)
        calibration.segments(model)
        counts: Counter[str] = Counter()
        with counted(model, counts):
            groups.append(len(list(knowledge.original_moments(tensors))))
        calls.append(counts["calls"])
    layers = 4 * 7 + 1
    assert groups[0] < groups[1]
    assert calls[0] <= layers
    assert calls[1] <= 4 * layers  # a segment's layers do not fit at once: from its border for each


def test_a_budget_of_a_deep_model_is_the_same_with_and_without_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Chain(3).eval()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight)
    data = [seeded(40, 6)]
    files = []
    for cut in (True, False):
        if not cut:
            monkeypatch.setattr("factorpack.passes.cuts._candidates", lambda _model: [])
        packed = fp.compress(model, ratio=2.2, calibration=data, progress=False)
        files.append({name: value.clone() for name, value in packed.state_dict().items()})
    for name, value in files[0].items():
        assert_same_tensor(value, files[1][name])


def test_nothing_is_left_on_the_models() -> None:
    model, calibration, layers = made("resnet18")
    compressed = copy.deepcopy(model)
    walk = Walk(calibration, model, compressed, layers)
    for layer in layers[:6]:
        walk.moments(layer)
    for each in (model, compressed):
        assert not any("forward" in module.__dict__ for module in each.modules())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in each.modules())


def test_more_tokens_pass_through_blocks_than_to_the_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: four batches of 18 tokens, of which two at once may reach the logits."""
    monkeypatch.setattr(joined, "_pays", lambda _model: True)
    monkeypatch.setattr(joined, "PREDICTED_TOKENS", 36)
    model, layer = llama(2), "model.layers.1.mlp.up_proj"
    tokens = torch.randint(0, 50, (8, 9), generator=torch.Generator().manual_seed(0))
    calibration = calibrate(model, [{"input_ids": part} for part in tokens.split(2)])
    layers = [name for name in calibration.order if has_moments(model.get_submodule(name))]
    widest = max(model.get_submodule(name).in_features for name in layers)
    found = []
    for at_once, passes in ((72, 1), (40, 2), (1, 2)):
        monkeypatch.setattr(joined, "INSIDE_BYTES", 4 * joined.INSIDE * widest * at_once)
        rows: list[int] = []
        with hooked(
            model, after={"model.norm": lambda _module, _inputs, output, rows=rows: rows.append(len(output))}
        ):
            walk = Walk(calibration, model, None, layers)
            rows.clear()
            walk.moments("lm_head")
        assert rows == [8 // passes] * passes
        found.append(walk.moments(layer).second)
    for each in found:
        assert_close(each, calibration.moments([layer], model)[layer].second.double())


def test_batches_of_tokens_are_merged_where_they_are_alike() -> None:
    model = llama(2)
    tokens = torch.randint(0, 50, (12, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    batches: list[Any] = [
        {"input_ids": tokens[start : start + 3], "attention_mask": mask[start : start + 3]}
        for start in range(0, 12, 3)
    ]
    batches.append({"input_ids": tokens[:2, :5], "attention_mask": mask[:2, :5]})
    calibration = calibrate(model, batches)
    merged = calibration.merged(1 << 14)
    assert [len(batch["input_ids"]) for batch in merged.batches] == [12, 2]
    assert len(merged) == len(calibration) == 14
    layer = "model.layers.1.mlp.up_proj"
    one, other = (Walk(each, model, None, [layer]).moments(layer) for each in (calibration, merged))
    assert_close(one.second, other.second.double())
    images = calibrate(nn.Linear(3, 2), [seeded(4, 3), seeded(4, 3, seed=1)])
    assert len(images.merged(1 << 14).batches) == 2


@pytest.mark.parametrize(("room", "tokens"), [(36, 36), (35, 35), (1 << 20, 54)])
def test_batches_are_joined_as_memory_for_all_activations_allows(
    room: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, up to as many as predictions allow; on a CPU none are."""
    model = llama(2)
    calibration = calibrate(model, [{"input_ids": torch.zeros(2, 9, dtype=torch.long)}])
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    values = sum(layer.in_features + layer.out_features for layer in linear)
    monkeypatch.setattr(joined, "PREDICTED_TOKENS", 54)
    monkeypatch.setattr(joined, "ACTIVATION_BYTES", 4 * values * room)
    assert joined.tokens_kept(calibration, model) == 0
    monkeypatch.setattr(joined, "_pays", lambda _model: True)
    assert joined.tokens_kept(calibration, model) == tokens
