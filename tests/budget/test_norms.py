"""Norms and biases around compressed layers: what is found, put right and made small."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from benchmarks.zoo import resnet18
from factorpack.budget.norms import (
    LARGEST_CORRECTION,
    constant,
    correct_outputs,
    half,
    norms_after,
    shrink,
    small_leftovers,
)
from factorpack.decoding import decode
from factorpack.methods import Keep
from factorpack.record import Encoded
from factorpack.solve.moments import MomentAccumulator
from factorpack.weight import Weight
from tests.helpers import assert_close, assert_same_tensor, relative_error, seeded

# -- which norm a layer goes into --------------------------------------------------------------------


class Block(nn.Module):
    """A residual block as ResNet has them: conv, norm, relu, conv, norm, and a shortcut of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6))

    def forward(self, images: Tensor) -> Tensor:
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(images)))))
        return self.relu(x.add_(self.shortcut(images)))  # type: ignore[no-any-return]


def test_a_residual_block() -> None:
    found = norms_after(Block().eval(), seeded(2, 4, 5, 5))
    assert found == {"conv1": "bn1", "conv2": "bn2", "shortcut.0": "shortcut.1"}


def test_a_whole_resnet() -> None:
    model = resnet18().eval()
    found = norms_after(model, seeded(1, 3, 32, 32))
    convolutions = {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert set(found) == convolutions
    assert set(found.values()) == norms


CHAINS: dict[str, tuple[list[nn.Module], dict[str, str]]] = {
    "linear": ([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)], {"0": "1"}),
    "relu between": ([nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4)], {}),
    "relu in place between": ([nn.Linear(4, 4), nn.ReLU(inplace=True), nn.BatchNorm1d(4)], {}),
    "dropout between": ([nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)], {"0": "2"}),
    "norm first": ([nn.BatchNorm1d(4), nn.Linear(4, 4)], {}),
    "layer norm": ([nn.Linear(4, 4), nn.LayerNorm(4)], {}),
}


@pytest.mark.parametrize("case", CHAINS)
def test_chains(case: str) -> None:
    """Only what the norm gets untouched: a mean put right behind a relu would be the wrong one."""
    layers, expected = CHAINS[case]
    model = nn.Sequential(*layers).eval()
    assert norms_after(model, seeded(5, 4)) == expected
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_hooks_go_when_the_model_fails() -> None:
    model = Block().eval()
    with pytest.raises(RuntimeError):
        norms_after(model, seeded(2, 3, 5, 5))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# -- mean outputs ------------------------------------------------------------------------------------


def per_channel(values: Tensor) -> Tensor:
    return values.movedim(1, -1).flatten(0, -2).double().mean(0)


def spread(values: Tensor) -> Tensor:
    return values.movedim(1, -1).flatten(0, -2).double().std(0, correction=0)


LAYERS: dict[str, tuple[Callable[[], nn.Module], type[nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 8), nn.BatchNorm1d, (50, 6)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d, (5, 4, 6, 6)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.BatchNorm2d, (5, 4, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d, (5, 4, 6, 6)),
}


@pytest.mark.parametrize("with_norm", [True, False], ids=["norm", "bias"])
@pytest.mark.parametrize("case", LAYERS)
def test_the_mean_output_is_the_original_s_again(case: str, with_norm: bool) -> None:
    """Behind the norm, or of the layer itself, over the calibration data; inputs have changed too."""
    make, norm_type, shape = LAYERS[case]
    layer = make()
    weight = layer.weight.detach()
    norm = norm_type(len(weight)).eval() if with_norm else nn.Identity()
    if with_norm:
        for index, values in enumerate((norm.weight, norm.bias, norm.running_mean)):
            values.data.copy_(seeded(*values.shape, seed=index))
    original = seeded(*shape) + 1.0
    inputs = original + 0.3 * seeded(*shape, seed=1) + 0.2
    running = MomentAccumulator(layer, 1 << 30)
    running.add(inputs, original)
    with torch.no_grad():
        wanted = per_channel(norm(layer(original)))
        changed = weight + 0.2 * seeded(*weight.shape, seed=2)
        before = weight.flatten(1).clone()
        layer.weight.copy_(changed)
        assert relative_error(per_channel(norm(layer(inputs))), wanted) > 0.05
        bias = layer.bias.detach().clone()
        assert correct_outputs(
            layer, norm if with_norm else None, changed.flatten(1), before, running.result()
        )
        assert_close(per_channel(norm(layer(inputs))), wanted, torch.float32)
    assert torch.equal(layer.bias, bias) == with_norm


@pytest.mark.parametrize("case", LAYERS)
def test_behind_a_norm_outputs_have_the_spread_they_had(case: str) -> None:
    make, norm_type, shape = LAYERS[case]
    layer = make()
    weight = layer.weight.detach().clone()
    norm = norm_type(len(weight)).eval()
    norm.running_mean.copy_(seeded(len(weight)))
    norm.running_var.copy_(seeded(len(weight), seed=1).abs() + 0.1)
    original = seeded(*shape) + 1.0
    inputs = 0.8 * original + 0.2
    running = MomentAccumulator(layer, 1 << 30)
    running.add(inputs, original)
    with torch.no_grad():
        mean, deviation = per_channel(norm(layer(original))), spread(norm(layer(original)))
        shrunk = weight * 0.7
        layer.weight.copy_(shrunk)
        assert relative_error(spread(norm(layer(inputs))), deviation) > 0.3
        correct_outputs(layer, norm, shrunk.flatten(1), weight.flatten(1), running.result())
        assert_close(per_channel(norm(layer(inputs))), mean, torch.float32)
        assert_close(spread(norm(layer(inputs))), deviation, torch.float32)


def test_a_channel_that_never_varied_keeps_its_norm() -> None:
    layer, norm = nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3).eval()
    running = MomentAccumulator(layer, 1 << 30)
    running.add(seeded(9, 4))
    weight = layer.weight.detach().clone()
    weight[1] = 0.0
    correct_outputs(layer, norm, 5 * weight, weight, running.result())
    assert norm.running_var[1] == 1.0
    assert norm.running_var[0] == pytest.approx(LARGEST_CORRECTION, rel=1e-3)


def test_a_layer_with_neither_norm_nor_bias_stays_as_it_is() -> None:
    layer = nn.Linear(4, 3, bias=False)
    running = MomentAccumulator(layer, 1 << 30)
    running.add(seeded(9, 4))
    weight = layer.weight.detach()
    assert not correct_outputs(layer, None, weight, weight + 1.0, running.result())
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    assert not correct_outputs(layer, norm, weight, weight + 1.0, running.result())


# -- leftovers ---------------------------------------------------------------------------------------


def kept(model: nn.Module) -> dict[str, Encoded]:
    return {name: Keep().encode(Weight(values)) for name, values in model.state_dict().items()}


def decoded(tensors: dict[str, Encoded]) -> dict[str, Tensor]:
    return {name: decode(encoded) for name, encoded in tensors.items()}


def with_statistics(model: nn.Module) -> nn.Module:
    """Norms as training leaves them."""
    for index, module in enumerate(model.modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            size = module.num_features
            module.running_mean.copy_(seeded(size, seed=index))
            assert module.running_var is not None
            assert module.num_batches_tracked is not None
            module.running_var.copy_(seeded(size, seed=index + 1).square() + 0.1)
            module.num_batches_tracked.fill_(12_345)
            if module.affine:
                module.weight.data.copy_(seeded(size, seed=index + 2))
                module.bias.data.copy_(seeded(size, seed=index + 3))
    return model


def test_a_folded_model_computes_the_same() -> None:
    model = with_statistics(Block()).eval()
    vectors = {name: encoded for name, encoded in kept(model).items() if len(encoded.shape) < 2}
    small = small_leftovers(vectors, model)  # FP16 weights would be in the comparison too
    folded = copy.deepcopy(model)
    folded.load_state_dict(decoded(small), strict=False)
    images = seeded(3, 4, 6, 6)
    with torch.no_grad():
        assert relative_error(folded(images), model(images)) < 4 * torch.finfo(torch.float16).eps


def test_what_folding_stores() -> None:
    model = with_statistics(Block()).eval()
    small = small_leftovers(kept(model), model)
    assert list(small) == list(model.state_dict())
    for norm in ("bn1", "bn2", "shortcut.1"):
        assert small[f"{norm}.weight"].parts["values"].dtype == torch.float16
        assert small[f"{norm}.bias"].parts["values"].dtype == torch.float16
        for part in ("running_mean", "running_var", "num_batches_tracked"):
            assert small[f"{norm}.{part}"].kind == "constant" or part == "num_batches_tracked"
        assert small[f"{norm}.running_mean"].note == "folded batch norm"
    state = decoded(small)
    assert state["bn1.running_mean"].eq(0).all()
    assert torch.equal(state["bn1.running_var"] + 1e-5, torch.ones(6))
    assert_same_tensor(state["bn1.num_batches_tracked"], model.state_dict()["bn1.num_batches_tracked"])
    module = model.get_submodule("bn1")
    assert isinstance(module, nn.BatchNorm2d)
    assert module.running_var is not None
    scale = module.weight.detach().double() / (module.running_var.double() + module.eps).sqrt()
    assert_same_tensor(state["bn1.weight"], scale.float().half().float())
    for name, values in state.items():
        assert (values.dtype, values.shape) == (
            model.state_dict()[name].dtype,
            model.state_dict()[name].shape,
        )


def test_norms_can_be_left_as_they_are() -> None:
    model = with_statistics(Block()).eval()
    for small in (small_leftovers(kept(model), model, fold_norms=False), small_leftovers(kept(model), None)):
        for name, values in model.state_dict().items():
            stored = decode(small[name])
            assert_same_tensor(stored, values if values.dtype == torch.int64 else values.half().float())


def test_norms_without_parameters_or_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, track_running_stats=False))
    with_statistics(model).eval()
    state = decoded(small_leftovers(kept(model), model))
    for name, values in model.state_dict().items():
        assert_same_tensor(state[name], values if values.dtype == torch.int64 else values.half().float())


def test_what_the_caller_decided_on_is_left_alone() -> None:
    """Whatever a note says: it is for people."""
    model = with_statistics(Block()).eval()
    tensors = {
        name: replace(encoded, by_caller=name.startswith("bn1.")).noted("excluded by 'x'")
        for name, encoded in kept(model).items()
    }
    small = small_leftovers(tensors, model)
    for name in tensors:
        assert (small[name] is tensors[name]) == name.startswith("bn1.")


def test_one_excluded_statistic_keeps_the_norm_whole() -> None:
    model = with_statistics(Block()).eval()
    tensors = kept(model)
    tensors["bn1.running_var"] = replace(tensors["bn1.running_var"], by_caller=True)
    small = small_leftovers(tensors, model)
    state = decoded(small)
    assert_same_tensor(state["bn1.running_var"], model.state_dict()["bn1.running_var"])
    assert_same_tensor(state["bn1.weight"], model.state_dict()["bn1.weight"].half().float())


def test_codes_are_not_leftovers() -> None:
    model = with_statistics(Block()).eval()
    coded = fp.Scalar(4).encode(Weight(model.state_dict()["conv1.weight"]))
    assert small_leftovers(kept(model) | {"conv1.weight": coded}, model)["conv1.weight"] is coded


def test_notes_are_kept() -> None:
    tensors = {"bias": Keep().encode(Weight(seeded(4))).noted("vector")}
    assert small_leftovers(tensors, None)["bias"].note == "vector"


@pytest.mark.parametrize(
    ("value", "kind", "dtype"),
    [
        (seeded(5), "keep", torch.float16),
        (torch.ones(5), "constant", torch.float32),
        (torch.full((3,), 7), "constant", torch.int64),
        (torch.tensor(7), "keep", torch.int64),
        (torch.arange(5), "keep", torch.int64),
        (torch.tensor([1.0, 1e6]), "keep", torch.float32),
        (torch.tensor([1.0, torch.inf]), "keep", torch.float16),
        (torch.tensor([1.0, torch.nan]), "keep", torch.float16),
        (torch.full((3,), torch.nan), "keep", torch.float16),
        (1e-7 * seeded(5), "keep", torch.float32),
        (torch.tensor([1e-7, 0.5, 0.2, 1.0]), "keep", torch.float16),
        (seeded(5).double(), "keep", torch.float16),
        (seeded(5).bfloat16(), "keep", torch.bfloat16),
        (torch.ones(5, dtype=torch.bfloat16), "constant", torch.bfloat16),
        (torch.empty(0), "keep", torch.float16),
        (torch.tensor([True, False]), "keep", torch.bool),
    ],
)  # fmt: skip
def test_a_leftover_is_as_small_as_it_goes(value: Tensor, kind: str, dtype: torch.dtype) -> None:
    encoded = shrink(value)
    (part,) = encoded.parts.values()
    assert (encoded.kind, part.dtype) == (kind, dtype)
    assert (encoded.dtype, encoded.shape) == (value.dtype, tuple(value.shape))
    back = decode(encoded)
    if dtype != torch.float16:
        assert_same_tensor(back, value)
    else:
        torch.testing.assert_close(back, value, rtol=1e-3, atol=2.0**-24, equal_nan=True)


def test_a_number_fp16_cannot_hold_stays_in_its_own_type() -> None:
    value = torch.tensor([1e5, 2.0, 3.0])
    assert_same_tensor(decode(half(value)), value)


def test_a_folded_scale_that_fp16_cannot_hold_stays_in_fp32() -> None:
    model = with_statistics(nn.Sequential(nn.BatchNorm1d(4)))
    norm = model[0]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_var is not None
    norm.running_var.fill_(1e-14)
    norm.weight.data.fill_(3e3).mul_(torch.arange(1.0, 5.0))
    small = small_leftovers(kept(model), model.eval())
    assert small["0.weight"].parts["values"].dtype == torch.float32
    folded = copy.deepcopy(model)
    folded.load_state_dict(decoded(small))
    inputs = seeded(6, 4)
    with torch.no_grad():
        assert relative_error(folded(inputs), model(inputs)) < 1e-5


def test_a_constant_keeps_shape_and_type() -> None:
    encoded = constant(torch.zeros(2, 3, dtype=torch.float64), 0.1)
    assert_same_tensor(decode(encoded), torch.full((2, 3), 0.1, dtype=torch.float64))


def test_values_that_fp16_makes_zero_are_kept_where_they_matter() -> None:
    few, many, small = (
        torch.tensor(each) for each in ([0.5, 0.25, 1e-9], [0.5, 1e-9, 2e-9], [1e-3, 1e-3, 1e-8])
    )
    assert decode(half(few)).tolist() == [0.5, 0.25, 0.0]
    for values in (many, small):
        assert_same_tensor(decode(half(values)), values)
