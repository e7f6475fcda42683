"""Block-wise reconstruction: closer on inputs nobody showed it, no larger, and blocks found by themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.format.packed_file import file_bytes
from factorpack.packed import Packed
from factorpack.tune import blockwise as reconstruction
from factorpack.tune.blocks import blocks_of
from factorpack.tune.blockwise import reconstruct
from factorpack.tune.rate import fit_table
from factorpack.tune.steer import Controller
from tests.helpers import assert_same_encoded, seeded
from tests.tune.small_net import perceptron, with_weights

FACTORS = fp.QSPCA(5, 3, tile=16)
METHODS = {
    "scalar": fp.Scalar(3),
    "sparse": fp.QSPCA(6, 4, 0.2, tile=16),
    "codewords": fp.methods.VQ(32),
}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.second(self.relu(self.norm(self.first(x)))) + self.skip(x))  # type: ignore[no-any-return]


class Net(nn.Module):
    """A stem, two stages of residual blocks, written in another order than they run, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 5)
        self.stage2 = nn.Sequential(Residual(16))
        self.stage1 = nn.Sequential(Residual(16), Residual(16))
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        with_weights(self)
        for index, norm in enumerate(each for each in self.modules() if isinstance(each, nn.BatchNorm2d)):
            norm.weight.data.fill_(1.0)
            norm.weight.data[::2] -= 2.0**-23  # as long in a file as any other values
            norm.running_mean.add_(0.1 * seeded(16, seed=index))  # type: ignore[union-attr]

    def forward(self, images: Tensor) -> Tensor:
        x = self.stage2(self.stage1(self.stem(images)))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


BLOCKS = ["stem", "stage1.0", "stage1.1", "stage2.0", "head"]


def images(count: int, seed: int) -> Tensor:
    return seeded(count, 3, 8, 8, seed=seed)


def packed_net(method: Any = FACTORS, **settings: Any) -> Packed:
    return fp.compress(Net().eval(), method, progress=False, **settings)


def answer(net: nn.Module, name: str, inputs: Tensor) -> Tensor:
    found: list[Tensor] = []
    block = net.get_submodule(name)
    hook = block.register_forward_hook(lambda _module, _inputs, out: found.append(out.clone()))
    with torch.no_grad():
        net(inputs)
    hook.remove()
    return found[0]


def errors(packed: Packed, inputs: Tensor) -> list[float]:
    """The error of every block's output, with the blocks before it compressed too."""
    original, compressed = Net().eval(), packed.load_into(Net()).eval()
    pairs = [(answer(original, name, inputs), answer(compressed, name, inputs)) for name in BLOCKS]
    return [((found - right).square().sum() / right.square().sum()).item() for right, found in pairs]


@pytest.mark.parametrize("method", METHODS)
def test_blocks_come_closer_on_inputs_held_out_and_the_file_does_not_grow(method: str) -> None:
    packed = packed_net(METHODS[method])
    before, size = errors(packed, images(32, seed=2)), file_bytes(packed, packed.aliases)
    model = Net().eval()
    batches = list(images(64, seed=1).split(32))
    assert reconstruct(packed, model, batches, steps=90, learning_rate=1e-3, progress=False) is packed
    after = errors(packed, images(32, seed=2))
    assert after[0] <= before[0]  # kept raw, or so few weights that their first codes are the best
    assert all(now < then for now, then in zip(after[1:], before[1:], strict=True))
    assert after[-1] < before[-1] / 2
    assert (
        file_bytes(packed, packed.aliases) <= 1.01 * size
    )  # held to the entropy, to which a coder adds some bytes a stream


def coded_bits(packed: Packed) -> float:
    parts = [(each.parts[part], bits) for each in packed.values() for part, bits in each.bits.items()]
    return sum(fit_table(codes, bits)[1].item() for codes, bits in parts)


def test_codes_take_no_more_bits_even_where_steering_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone they take more; what a rate does not hold is taken back in the end."""
    monkeypatch.setattr(Controller, "update", lambda *_: None)
    monkeypatch.setattr(reconstruction, "FIRST_RATE", 1e-9)
    found = {}
    for rate in (0.0, "hold"):
        packed = packed_net(fp.Scalar(3))
        before = coded_bits(packed)
        settings: dict[str, Any] = {"blocks": ["stage1.0"], "steps": 100, "learning_rate": 1e-3, "rate": rate}
        reconstruct(packed, Net().eval(), images(64, seed=1).split(32), progress=False, **settings)
        found[rate] = coded_bits(packed) - before
    assert found["hold"] <= 0 < found[0.0]


def test_the_original_is_left_as_it_is() -> None:
    model = Net().train()
    before = copy.deepcopy(model.state_dict())
    reconstruct(packed_net(), model, [images(16, seed=1)], steps=3, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_labels_are_ignored_and_every_run_is_the_same() -> None:
    inputs = list(images(32, seed=1).split(8))
    plain = reconstruct(packed_net(), Net().eval(), inputs, steps=5, progress=False)
    for batches in ([(each, torch.zeros(8)) for each in inputs], iter(inputs)):
        other = reconstruct(packed_net(), Net().eval(), batches, steps=5, progress=False)
        for name in plain:
            assert_same_encoded(other[name], plain[name])


def test_a_rate_makes_it_smaller() -> None:
    sizes = []
    for rate in (0.0, 1.0):
        packed = packed_net(fp.Scalar(4))
        reconstruct(
            packed,
            Net().eval(),
            [images(32, seed=1)],
            steps=60,
            learning_rate=1e-3,
            rate=rate,
            progress=False,
        )
        sizes.append(file_bytes(packed, packed.aliases))
    assert sizes[1] < 0.95 * sizes[0]


def test_kept_tensors_of_a_block_are_trained_but_for_its_statistics() -> None:
    packed = packed_net()
    before = dict(packed)
    reconstruct(packed, Net().eval(), [images(32, seed=1)], steps=40, learning_rate=1e-3, progress=False)
    changed = {
        name
        for name in packed
        if packed[name].kind == "keep"
        and not torch.equal(packed[name].parts["values"], before[name].parts["values"])
    }
    assert {"stage1.0.norm.weight", "stage1.0.norm.bias", "stage1.0.second.bias", "head.bias"} <= changed
    assert not any("running" in name or "tracked" in name or name.startswith("stem") for name in changed)


def test_a_block_that_comes_no_closer_stays() -> None:
    packed = packed_net(fp.Scalar(8))
    before = dict(packed)
    reconstruct(packed, Net().eval(), [images(16, seed=1)], steps=3, learning_rate=10.0, progress=False)
    for name in packed:
        assert_same_encoded(packed[name], before[name])


# -- blocks ------------------------------------------------------------------------------------------


def weights_of(model: nn.Module) -> list[str]:
    return [name for name, each in model.named_parameters() if each.dim() > 1]


def test_blocks_are_units_in_the_order_they_run() -> None:
    net = Net().eval()
    assert blocks_of(net, images(2, seed=0), weights_of(net), None) == BLOCKS
    some = ["stage1.1.first.weight", "head.weight"]
    assert blocks_of(net, images(2, seed=0), some, None) == ["stage1.1", "head"]


def test_blocks_of_the_zoo() -> None:
    from benchmarks.zoo import mobilenet_v2, resnet18

    for net, some in ((resnet18(10, True), "layer2.0"), (mobilenet_v2(10, True), "features.3")):
        found = blocks_of(net.eval(), torch.zeros(1, 3, 32, 32), weights_of(net), None)
        assert some in found
        assert found[0] in ("conv1", "features.0")
        assert found[-1] in ("fc", "classifier")
        assert all(sum(name.startswith(f"{each}.") for each in found) == 1 for name in weights_of(net))


class TwoInputs(nn.Module):
    """A unit that is given two tensors is no block, its layers are."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.right(y) + self.left(x)  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.unit = self.Unit()
        self.twice = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(x, -x)  # type: ignore[no-any-return]


def test_units_of_several_inputs_fall_into_layers() -> None:
    net = TwoInputs()
    weights = ["unit.left.weight", "unit.right.weight"]
    assert blocks_of(net, torch.zeros(2, 8), weights, None) == ["unit.right", "unit.left"]


def test_blocks_that_are_named() -> None:
    net = Net().eval()
    assert blocks_of(net, images(2, seed=0), weights_of(net), ["stage2", "stage1"]) == ["stage1", "stage2"]
    with pytest.raises(fp.PlanError, match="no module 'stage9'"):
        blocks_of(net, images(2, seed=0), weights_of(net), ["stage9"])
    two = TwoInputs()
    for name in ("unit", "twice"):
        with pytest.raises(
            fp.SourceError, match=f"block '{name}' does not run exactly once with one tensor in"
        ):
            blocks_of(two, torch.zeros(2, 8), weights_of(two), [name])


def test_what_is_refused() -> None:
    def run(**settings: Any) -> None:
        reconstruct(packed_net(), Net().eval(), settings.pop("batches", [images(4, seed=1)]), **settings)

    with pytest.raises(fp.SourceError, match="no batches"):
        run(batches=[])
    with pytest.raises(fp.PlanError, match="steps 0"):
        run(steps=0)
    with pytest.raises(fp.PlanError, match="learning_rate 0"):
        run(learning_rate=0.0)
    for rate in ("held", -1.0, float("nan")):
        with pytest.raises(fp.PlanError, match="rate is"):
            run(rate=rate)
    with pytest.raises(fp.SourceError, match="the model lacks"):
        reconstruct(packed_net(), perceptron(), [images(4, seed=1)])
