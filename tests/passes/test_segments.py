"""A forward pass in segments: where models are cut, and that a pass from a border is the whole pass, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo import mobilenet_v2, resnet18
from factorpack.batches import hooked, run
from factorpack.calibration.calibrate import calibrate
from factorpack.passes import cuts
from factorpack.passes.cuts import find_segments
from factorpack.passes.segments import INPUTS, Border, Forms, Segments, borders_of, run_on, run_to
from tests.helpers import raw, seeded


class Block(nn.Module):
    """A residual block that works in place, and may return a tuple."""

    def __init__(self, returns: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.first, self.second, self.returns = nn.Linear(8, 16), nn.Linear(16, 8), returns

    def forward(self, x: Tensor) -> Any:
        return self.returns(x + self.second(self.first(x).relu_()))


class Chain(nn.Module):
    def __init__(self, blocks: int = 4, returns: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Block(returns) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x.relu_()
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
            x *= 0.5
        return self.head(x)  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Every block on the way down is needed on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.middle = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.up = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x).relu()
            kept.append(x)
        x = self.middle(x)
        for block in self.up:
            x = block(x + kept.pop())
        return x


class WholeResidual(nn.Module):
    """What two layers make of the input is added at the end, so that no tensor between carries all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.neck, self.head = (nn.Linear(8, 8) for _ in range(3))
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        start = x = self.neck(self.stem(x).relu_())
        for block in self.body:
            x = block(x).relu()
        return self.head(start + x)  # type: ignore[no-any-return]


class Conditioned(nn.Module):
    """What a small layer makes of the input is used by every block, as a diffusion model's time is."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        time = self.time(x)
        for block in self.blocks:
            x = block(x * 0.5 + time)
        return x


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.shared(block(x))
        return x


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).eval()  # type: ignore[no-any-return]


def padded_tokens(samples: int = 6) -> dict[str, Tensor]:
    tokens = torch.randint(61, (samples, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def images() -> Tensor:
    return seeded(3, 3, 32, 32)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], list[str]]] = {
    "blocks": (Chain, lambda: seeded(5, 6), [f"blocks.{n}" for n in range(4)]),
    "tuples": (
        lambda: Chain(returns=lambda x: (x, None, ())),
        lambda: seeded(5, 6),
        [f"blocks.{n}" for n in range(4)],
    ),
    "tuples that carry more": (lambda: Chain(returns=lambda x: (x, x)), lambda: seeded(5, 6), []),
    "u-net": (UNet, lambda: seeded(5, 8), ["down.0"]),
    "whole residual": (WholeResidual, lambda: seeded(5, 8), []),
    "conditioned": (Conditioned, lambda: seeded(5, 8), ["blocks.1", "blocks.2"]),
    "a layer used twice": (Twice, lambda: seeded(5, 8), ["blocks.0", "blocks.1"]),
    "resnet18": (
        lambda: resnet18(10),
        images,
        [f"layer{stage}.{n}" for stage in range(1, 5) for n in range(2)],
    ),
    "mobilenet_v2": (lambda: mobilenet_v2(10), images, [f"features.{n}" for n in range(19)]),
    "llama": (lambda: llama(3), padded_tokens, [f"model.layers.{n}" for n in range(3)]),
    "one layer": (lambda: nn.Linear(6, 3), lambda: seeded(5, 6), []),
}


def made(case: str) -> tuple[nn.Module, Any, Segments]:
    torch.manual_seed(0)
    make, data, _ = MODELS[case]
    model, batch = make().eval(), data()
    return model, batch, calibrate(model, [batch]).segments(model)


def main_tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def seen_inputs(
    model: nn.Module, layers: list[str], passing: Callable[[], Any]
) -> tuple[Any, dict[str, list[bytes]]]:
    seen: dict[str, list[bytes]] = {name: [] for name in layers}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            if "forward" not in module.__dict__:  # a stub costs nothing
                seen[name].append(raw(inputs[0]))

        return hook

    with hooked(model, {name: note(name) for name in layers}):
        return passing(), seen


@pytest.mark.parametrize("case", MODELS)
def test_where_a_model_is_cut(case: str) -> None:
    _, _, segments = made(case)
    assert [cut.module for cut in segments.cuts] == MODELS[case][2]
    assert len(segments) == len(segments.cuts) + 1
    assert sorted(set(segments.segment_of.values())) == list(range(len(segments)))


@pytest.mark.parametrize("case", MODELS)
def test_a_pass_from_any_border_is_the_whole_pass(case: str) -> None:
    """The output, and what every later layer sees, on a whole batch, of which one sample found the cuts."""
    model, batch, segments = made(case)
    layers = list(segments.segment_of)
    whole, expected = seen_inputs(model, layers, lambda: run(model, batch))
    forms: Forms = {}
    border = INPUTS
    for place in range(1, len(segments)):
        border = run_to(model, batch, segments, border, forms, place)
        output, seen = seen_inputs(
            model, layers, lambda border=border: run_on(model, batch, segments, border, forms)
        )
        assert raw(main_tensor(output)) == raw(main_tensor(whole))
        for layer, segment in segments.segment_of.items():
            if segment >= place:
                assert seen[layer] == expected[layer]
    output, borders = borders_of(model, batch, segments, {})
    assert raw(main_tensor(output)) == raw(main_tensor(whole))
    if borders:
        assert borders[-1].value is not None
        assert border.value is not None
        assert raw(borders[-1].value) == raw(border.value)


def test_a_segment_runs_its_own_layers_only() -> None:
    model, batch, segments = made("resnet18")
    forms: Forms = {}
    border = run_to(model, batch, segments, INPUTS, forms, 5)
    _, seen = seen_inputs(
        model, list(segments.segment_of), lambda: run_to(model, batch, segments, border, forms, 6)
    )
    assert {name for name, calls in seen.items() if calls} == {
        name for name, segment in segments.segment_of.items() if segment == 5
    }


def test_batches_of_other_shapes_have_forms_of_their_own() -> None:
    model, _, segments = made("llama")
    for samples, length in ((1, 3), (4, 9)):
        tokens = {"input_ids": torch.arange(samples * length).reshape(samples, length)}
        forms: Forms = {}
        border = run_to(model, tokens, segments, INPUTS, forms, 2)
        found = run_on(model, tokens, segments, border, forms)
        assert raw(found.logits) == raw(run(model, tokens).logits)


def test_layers_with_one_input_are_known() -> None:
    _, _, segments = made("llama")
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    assert segments.same_input[attention + "k_proj"] == tuple(f"{attention}{key}_proj" for key in "qkv")
    assert segments.same_input[mlp + "up_proj"] == (mlp + "gate_proj", mlp + "up_proj")
    assert segments.same_input[mlp + "down_proj"] == (mlp + "down_proj",)
    _, _, segments = made("resnet18")
    assert set(segments.same_input["layer2.0.conv1"]) == {"layer2.0.conv1", "layer2.0.downsample.0"}


def test_a_tensor_changed_in_place_is_another_input() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            a = self.first(x) + self.second(x)
            x += 1
            return self.third(x) + a  # type: ignore[no-any-return]

    model = InPlace().eval()
    same = calibrate(model, seeded(4, 8)).segments(model).same_input
    assert same["first"] == same["second"] == ("first", "second")
    assert same["third"] == ("third",)


@pytest.mark.parametrize("own_forward", [False, True])
def test_stubs_are_removed_after_an_error(own_forward: bool) -> None:
    model, batch, segments = made("blocks")
    if own_forward:  # as libraries that wrap a module's forward leave it
        plain = model.blocks[0].forward
        model.blocks[0].forward = lambda x: plain(x)
    before = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    forms: Forms = {}
    border = run_to(model, batch, segments, INPUTS, forms, 2)

    def fail(*_: object) -> None:
        raise KeyError

    with hooked(model, {"head": fail}), pytest.raises(KeyError):
        run_on(model, batch, segments, border, forms)
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_finding_cuts_leaves_the_model_alone() -> None:
    model = Chain().train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    assert len(calibrate(model, seeded(4, 6)).segments(model)) == 5
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_that_cannot_be_cut_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="factorpack"):
        made("blocks")
        assert not caplog.records
        made("whole residual")
    assert "cannot be cut into blocks" in caplog.text


def test_a_border_of_a_copy_is_not_changed_by_work_in_place() -> None:
    model, batch, segments = made("blocks")
    forms: Forms = {}
    border = run_to(model, batch, segments, INPUTS, forms, 1)
    assert isinstance(border, Border)
    assert border.value is not None
    before = border.value.clone()
    run_on(model, batch, segments, border, forms)
    assert torch.equal(border.value, before)


class Taking(Block):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        return super().forward(x if other is None else x + other)


class Passing(nn.Module):
    """Blocks that hand one tensor on; with `skip` the fifth also takes what the second returned."""

    def __init__(self, skip: bool = False, scaled: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Taking() for _ in range(6))
        self.skip, self.scaled = skip, scaled

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept = None
        for index, block in enumerate(self.blocks):
            x = block(x, kept) if index == 4 else block(x)
            if index == 1 and self.skip:
                kept = x
            elif index == 4:
                kept = None
            if self.scaled:
                x *= 0.5
        return self.head(x)  # type: ignore[no-any-return]


def test_a_chain_of_blocks_is_cut_after_trying_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = Passing().eval(), seeded(2, 6)
    wanted = find_segments(model, inputs)
    tried: list[str] = []
    holds = cuts._holds

    def noted(*arguments: Any) -> bool:
        tried.append(arguments[3].name)
        return holds(*arguments)

    monkeypatch.setattr(cuts, "_holds", noted)
    assert find_segments(model, inputs, few_trials=True) == wanted
    assert tried == ["blocks.0", "blocks.5"]


@pytest.mark.parametrize("model", [Passing(skip=True), Passing(scaled=True), UNet(), nn.Linear(6, 8)])
def test_what_is_not_a_chain_of_blocks_is_not_cut_by_its_ends(model: nn.Module) -> None:
    """The ends of a list with a skip inside are valid cuts, and those that the skip crosses are not."""
    inputs = seeded(2, 8 if isinstance(model, UNet) else 6)
    assert find_segments(model.eval(), inputs, few_trials=True).cuts == ()
