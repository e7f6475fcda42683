"""Compression to a number of bytes: of the file itself, whatever the model, with data and without."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import factorpack as fp
from factorpack.batches import evaluating
from factorpack.budget import tensors
from factorpack.budget.divergence import measure_divergence
from factorpack.budget.planner import Planner
from factorpack.budget.sequential import SequentialCoder, _Wait
from factorpack.calibration.calibrate import calibrate
from factorpack.decoding import decode
from factorpack.weight import Weight
from tests.helpers import assert_same_tensor, raw, relative_error, seeded


def trained(model: nn.Module) -> nn.Module:
    """Numbers such as training leaves: Gaussian weights, loud and quiet channels, norms with statistics."""
    with torch.no_grad():
        for index, (name, values) in enumerate(model.state_dict().items()):
            if values.dim() > 1:
                loud = (
                    seeded(len(values), seed=index + 100)
                    .mul(0.5)
                    .exp()
                    .reshape(-1, *[1] * (values.dim() - 1))
                )
                values.copy_(seeded(*values.shape, seed=index) * loud / values[0].numel() ** 0.5)
            elif name.endswith("running_var"):
                values.copy_(seeded(*values.shape, seed=index).square() + 0.5)
            elif values.is_floating_point():
                values.copy_(
                    0.1 * seeded(*values.shape, seed=index) + name.endswith(("1.weight", "4.weight"))
                )
    return model


def conv_net() -> nn.Module:
    """Norms with and without a bias before them, strides, groups, a depthwise layer, a head."""
    return trained(
        nn.Sequential(
            nn.Conv2d(3, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 128, 3, stride=2),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.Conv2d(128, 128, 3, padding=1, groups=128),
            nn.Conv2d(128, 128, 3, padding=1, groups=16),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 100),
        )
    )  # few columns, since rounding goes column by column


def mlp() -> nn.Module:
    return trained(
        nn.Sequential(
            nn.Linear(48, 512),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(32),
            nn.Linear(32, 768),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(32),
            nn.Linear(32, 200),
        )
    )


def small() -> nn.Module:
    """For what does not depend on the size."""
    return trained(
        nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 24))
    )


def wide() -> nn.Module:
    """One layer of few inputs, the quickest of all."""
    return trained(nn.Linear(24, 400))


IMAGES = seeded(24, 3, 10, 10)
VECTORS = seeded(200, 48)
SMALL = seeded(96, 24)


def compressed(model: Any, **settings: Any) -> fp.Packed:
    return fp.compress(model, progress=False, **settings)


def original_bytes(model: nn.Module) -> int:
    """In FP32; integers as they are."""
    return sum(values.numel() * values.dtype.itemsize for values in model.state_dict().values())


def saved_bytes(packed: fp.Packed, folder: Path) -> int:
    path = folder / "net.packed.safetensors"
    fp.save(packed, path)
    return path.stat().st_size


# -- the size ----------------------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[[], nn.Module], Tensor | None]] = {
    "convolutions": (conv_net, None),
    "matrices": (mlp, None),
    "convolutions, calibrated": (conv_net, IMAGES),
    "matrices, calibrated": (mlp, VECTORS),
}


@pytest.mark.parametrize("ratio", [4, 30])
@pytest.mark.parametrize("case", CASES)
def test_the_file_has_the_bytes_asked_for(case: str, ratio: int, tmp_path: Path) -> None:
    make, data = CASES[case]
    model = make()
    budget = int(original_bytes(model) / ratio)
    packed = compressed(model, ratio=ratio, calibration=None if data is None else [data])
    size = saved_bytes(packed, tmp_path)
    assert size <= budget
    assert size >= (0.99 if budget > 20_000 else 0.97) * budget  # a header's byte is more of a small file
    loaded = fp.load(tmp_path / "net.packed.safetensors")
    assert list(loaded) == list(model.state_dict())
    loaded.load_into(make())


@pytest.mark.parametrize("case", ["matrices", "convolutions, calibrated"])
def test_a_file_of_paths_has_the_bytes_asked_for(case: str, tmp_path: Path) -> None:
    make, data = CASES[case]
    model = make()
    budget = int(original_bytes(model) / 10)
    packed = compressed(
        model, ratio=10, calibration=None if data is None else [data], planner=Planner(trellis=8)
    )
    assert 0.99 * budget <= saved_bytes(packed, tmp_path) <= budget
    assert {encoded.trellis for encoded in packed.values()} == {0, 8}
    loaded = fp.load(tmp_path / "net.packed.safetensors")
    for name, encoded in packed.items():
        assert_same_tensor(decode(loaded[name]), decode(encoded))


def test_a_large_file_at_a_high_ratio(tmp_path: Path) -> None:
    model = trained(nn.Linear(256, 700))
    budget = original_bytes(model) // 30
    assert budget > 20_000
    assert 0.99 * budget <= saved_bytes(compressed(model, ratio=30), tmp_path) <= budget


@pytest.mark.parametrize("data", [None, SMALL], ids=["data-free", "calibrated"])
def test_more_bytes_are_closer(data: Tensor | None) -> None:
    """Without data in weights, with it in answers."""
    model = small().eval()
    errors = []
    for ratio in (16, 6):
        packed = compressed(model, ratio=ratio, calibration=data)
        other = packed.load_into(small()).eval()
        with torch.no_grad():
            errors.append(
                relative_error(other(SMALL), model(SMALL))
                if data is not None
                else relative_error(decode(packed["2.weight"]), model.state_dict()["2.weight"])
            )
    assert errors[0] > 2 * errors[1]


def test_data_make_the_answers_better() -> None:
    """On inputs that were not calibrated on, and that correlate as real ones do."""
    mix = seeded(24, 24, seed=3) * torch.logspace(0, -2, 24)[:, None]
    model, held = small().eval(), seeded(400, 24, seed=5) @ mix
    errors = []
    for data in (None, seeded(400, 24, seed=6) @ mix):
        other = compressed(model, ratio=12, calibration=data).load_into(small()).eval()
        with torch.no_grad():
            errors.append(relative_error(other(held), model(held)))
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("ratio", [1.5, 2])
def test_a_budget_for_more_bits_than_codes_have(ratio: float, tmp_path: Path) -> None:
    """16 bits are the most: such a file is smaller than allowed, and next to lossless."""
    model = small()
    packed = compressed(model, ratio=ratio)
    assert saved_bytes(packed, tmp_path) <= original_bytes(model) / ratio
    for name, values in model.state_dict().items():
        assert relative_error(decode(packed[name]), values) < 1e-3


def test_weights_spread_evenly_meet_their_budget(tmp_path: Path) -> None:
    """Bytes then fall in stairs as the step grows: a secant alone jumps over the budget for ever."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(256, 384)
    model.weight.data.uniform_(-1, 1, generator=generator)
    budget = original_bytes(model) // 18
    assert 0.99 * budget <= saved_bytes(compressed(model, ratio=18), tmp_path) <= budget


@pytest.mark.parametrize("source", ["state dict", "safetensors", "pickle"])
def test_weights_without_a_model(source: str, tmp_path: Path) -> None:
    state = wide().state_dict()
    given: Any = state
    if source == "safetensors":
        save_file(state, tmp_path / "net.safetensors")
        given = tmp_path / "net.safetensors"
    if source == "pickle":
        torch.save(state, tmp_path / "net.pt")
        given = str(tmp_path / "net.pt")
    budget = original_bytes(wide()) // 8
    packed = compressed(given, max_bytes=budget)
    assert 0.97 * budget <= saved_bytes(packed, tmp_path) <= budget
    expected = compressed(wide(), max_bytes=budget)
    assert sorted(packed) == sorted(expected)
    # A file has an order of its own, and with it a header of another length and a step to match.
    errors = [relative_error(decode(each["weight"]), state["weight"]) for each in (packed, expected)]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    fp.save(compressed(wide(), ratio=8), tmp_path / "0.safetensors")
    fp.save(compressed(wide(), ratio=8), tmp_path / "1.safetensors")
    assert (tmp_path / "0.safetensors").read_bytes() == (tmp_path / "1.safetensors").read_bytes()


def test_two_calibrated_runs_give_the_same_bytes_however_the_batches_come(tmp_path: Path) -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, 96, 32):
            yield SMALL[start : start + 32], torch.zeros(32)

    fp.save(compressed(wide(), ratio=8, calibration=batches()), tmp_path / "0.safetensors")
    fp.save(compressed(wide(), ratio=8, calibration=SMALL.split(32)), tmp_path / "1.safetensors")
    assert (tmp_path / "0.safetensors").read_bytes() == (tmp_path / "1.safetensors").read_bytes()


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(200, 48), nn.Linear(48, 48)
            self.head = nn.Linear(48, 200, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.mix(self.embed(tokens)).tanh().mean(1))  # type: ignore[no-any-return]

    model = trained(Tied())
    tokens = torch.arange(320).reshape(32, 10) % 200
    once = original_bytes(model) - 200 * 48 * 4
    for data in (None, tokens):
        packed = compressed(model, ratio=6, calibration=data)
        assert packed.aliases == {"head.weight": "embed.weight"}
        assert 0.97 * once / 6 <= saved_bytes(packed, tmp_path) <= once / 6
        assert relative_error(decode(packed["head.weight"]), model.head.weight.detach()) < 0.3


# -- budgets that cannot be met ----------------------------------------------------------------------


def smallest(model: Any, **settings: Any) -> int:
    with pytest.raises(fp.PlanError) as caught:
        compressed(model, max_bytes=100, **settings)
    (found,) = re.findall(r"still have ([\d,]+)", str(caught.value))
    return int(found.replace(",", ""))


@pytest.mark.parametrize("make", [conv_net, wide])
def test_the_smallest_size_an_error_names_can_be_met(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = make()
    least = smallest(model)
    assert saved_bytes(compressed(model, max_bytes=least + 1), tmp_path) <= least + 1
    with pytest.raises(fp.PlanError, match=f"{least - 1} bytes cannot be met"):
        compressed(model, max_bytes=least - 1)


def test_a_budget_a_tenth_above_the_smallest(tmp_path: Path) -> None:
    model = small()
    budget = int(smallest(model) * 1.1)
    assert saved_bytes(compressed(model, max_bytes=budget), tmp_path) <= budget


def test_a_calibrated_budget_a_fifth_above_the_smallest(tmp_path: Path) -> None:
    model = mlp()
    budget = int(smallest(model) * 1.2)
    assert saved_bytes(compressed(model, max_bytes=budget, calibration=[VECTORS]), tmp_path) <= budget


def test_the_smallest_file_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is work to lose; what codes may take is known from it."""
    measured = []
    inner = tensors.file_bytes
    monkeypatch.setattr(tensors, "file_bytes", lambda *of: measured.append(1) or inner(*of))
    fp.compress(conv_net(), ratio=8, calibration=IMAGES, progress=False)
    assert len(measured) == 1


@pytest.mark.parametrize("on_gpu", [False, True])
def test_where_streams_take_longer_than_codes_they_are_waited_for_once(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late, when most of what was estimated is made: what is then known to be missing, later weights get."""
    if on_gpu:
        monkeypatch.setattr("factorpack.budget.coding.ALONE", frozenset())
    settled: list[tuple[int, int]] = []
    inner = SequentialCoder._settle

    def settle(coder: SequentialCoder, estimated: dict[str, int]) -> int:
        settled.append((len(coder._done), len(estimated)))
        return inner(coder, estimated)

    monkeypatch.setattr(SequentialCoder, "_settle", settle)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))).eval()
    fp.compress(net, ratio=8, calibration=[seeded(64, 64)], planner=Planner(refine=False), progress=False)
    assert len(settled) == (1 if on_gpu else 12 - settled[0][0])
    assert settled[0][1] == settled[0][0]  # all of them are large
    assert settled[0][0] > (7 if on_gpu else 4)


def test_the_last_weight_makes_up_for_what_is_missing_however_large_it_is() -> None:
    """A head has a third of the bytes, and the table of words before it another; neither waits for itself."""
    wait = _Wait(90.0, on_gpu=True)
    assert [wait.is_due(to_come, own) for to_come, own in ((60.0, 30.0), (30.0, 30.0))] == [False, True]
    assert not wait.is_due(10.0, 10.0)
    on_cpu = _Wait(90.0, on_gpu=False)
    assert [on_cpu.is_due(to_come, 30.0) for to_come in (60.0, 45.0, 30.0)] == [False, True, True]


def test_nothing_to_compress() -> None:
    with pytest.raises(fp.PlanError, match="there is no weight to compress"):
        compressed(nn.BatchNorm2d(8), ratio=4)
    with pytest.raises(fp.PlanError, match="there is no weight to compress"):
        compressed(small(), ratio=4, exclude=["*"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": fp.Scalar(4), "ratio": 8}, "give one of a method, ratio, max_bytes and max_loss"),
        ({"max_bytes": 9000, "ratio": 8}, "give one of a method, ratio, max_bytes and max_loss"),
        ({"max_loss": 0.1, "ratio": 8}, "give one of a method, ratio, max_bytes and max_loss"),
        ({"ratio": 1}, "ratio is 1, expected a number above 1"),
        ({"ratio": 0.5}, "ratio is 0.5, expected a number above 1"),
        ({"ratio": -3}, "ratio is -3, expected a number above 1"),
        ({"ratio": float("nan")}, "ratio is nan, expected a number above 1"),
        ({"ratio": float("inf")}, "ratio is inf, expected a number above 1"),
        ({"ratio": "8"}, "ratio is '8', expected a number above 1"),
        ({"max_bytes": 0}, "max_bytes is 0, expected at least 1"),
        ({"max_bytes": -5}, "max_bytes is -5, expected at least 1"),
        ({"max_bytes": "9 kB"}, "max_bytes is '9 kB'"),
        ({"max_loss": 0.0}, "max_loss is 0.0: expected a number above 0, a model, and calibration data"),
        ({"max_loss": 0.1, "calibration": None}, "max_loss is 0.1: expected .* calibration data"),
        ({"planner": Planner()}, "a planner .*meets? a budget"),
        ({"planner": Planner(), "method": fp.Scalar(4)}, "a planner .*meets? a budget"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(fp.PlanError, match=message):
        compressed(small(), **{"calibration": SMALL, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"samples": 0},
        {"price": -1.0},
        {"damping": 0.0},
        {"ridge": 0.0},
        {"samples": 1.5},
        {"price": float("nan")},
    ],
)
def test_impossible_planners(settings: dict[str, Any]) -> None:
    with pytest.raises(fp.PlanError, match=next(iter(settings))):
        Planner(**settings)


def test_calibration_needs_a_model() -> None:
    with pytest.raises(fp.SourceError, match="calibration runs a model, and the source is a"):
        compressed(small().state_dict(), ratio=8, calibration=SMALL)


BATCHES: dict[str, tuple[Any, str]] = {
    "wrong shape": (seeded(4, 5), r"fails on a calibration batch of shape \{'inputs': \(4, 5\)\}"),
    "nothing": ([], "the calibration data has no samples"),
    "text": (["image.jpg"], "a calibration batch is a str"),
    "no numbers": (torch.full((4, 24), torch.nan), "NaN or infinity"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_data_the_model_cannot_run_on(case: str) -> None:
    data, message = BATCHES[case]
    model = small().train()
    before = snapshot(model)
    with pytest.raises(fp.SourceError, match=message):
        compressed(model, ratio=8, calibration=data)
    assert snapshot(model) == before


def test_an_error_in_a_weight_names_it() -> None:
    state = small().state_dict()
    state["2.weight"][3, 4] = torch.nan
    with pytest.raises(fp.WeightError, match="1 of 6144 weights are NaN or infinite") as caught:
        compressed(state, ratio=8)
    assert caught.value.__notes__ == ["while compressing tensor '2.weight'"]


# -- what the caller decides -------------------------------------------------------------------------


@pytest.mark.parametrize("data", [None, IMAGES], ids=["data-free", "calibrated"])
def test_exclude_and_layers_are_honoured(data: Tensor | None, tmp_path: Path) -> None:
    model = conv_net()
    packed = compressed(
        model,
        ratio=6,
        calibration=data,
        exclude=["0.weight", "1.*"],
        layers={"10.weight": fp.Scalar(4), "4.weight": fp.Keep("bfloat16"), "3.bias": fp.Keep()},
    )
    state = model.state_dict()
    for name in ("0.weight", *(name for name in state if name.startswith("1."))):
        assert_same_tensor(decode(packed[name]), state[name])
        assert packed[name].note.startswith("excluded by")
    assert packed["10.weight"].bits == {"codes": 4}
    assert_same_tensor(decode(packed["10.weight"]), decode(fp.Scalar(4).encode(Weight(state["10.weight"]))))
    assert packed["4.weight"].parts["values"].dtype == torch.bfloat16
    assert_same_tensor(decode(packed["3.bias"]), state["3.bias"])
    assert saved_bytes(packed, tmp_path) <= original_bytes(model) / 6


def test_layers_behind_a_chosen_one_see_what_it_became() -> None:
    """A layer with a method of the caller's own is part of the compressed network too."""
    model = small().eval()
    rough = {"0.weight": fp.Scalar(2)}
    other = compressed(model, ratio=6, calibration=[SMALL], layers=rough).load_into(small()).eval()
    blind = compressed(
        model, ratio=6, calibration=[SMALL], layers=rough, planner=Planner(sequential=False)
    ).load_into(small())
    with torch.no_grad():
        aware_error, blind_error = (relative_error(net(SMALL), model(SMALL)) for net in (other, blind.eval()))
    assert aware_error < 0.9 * blind_error


class Aside(nn.Module):
    """A layer that never runs, one whose inputs cannot be unfold_inputs, and one in the usual way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.idle = nn.Conv2d(3, 16, 3), nn.Linear(40, 40)
        self.up, self.head = nn.ConvTranspose2d(16, 24, 3), nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.up(self.first(images).relu()).relu().mean((2, 3)))  # type: ignore[no-any-return]


def test_layers_that_never_run_are_coded_too(tmp_path: Path) -> None:
    model = trained(Aside())
    packed = compressed(model, ratio=6, calibration=[IMAGES])
    for name in ("idle.weight", "up.weight", "first.weight"):
        assert packed[name].kind in ("scalar", "factors"), name
        assert relative_error(decode(packed[name]), model.state_dict()[name]) < 0.4
    assert packed["up.weight"].transposed_groups == 1
    assert saved_bytes(packed, tmp_path) <= original_bytes(model) / 6


def test_a_model_without_any_layer_of_known_inputs(tmp_path: Path) -> None:
    model = trained(nn.Sequential(nn.ConvTranspose2d(3, 32, 3), nn.ReLU(), nn.ConvTranspose2d(32, 32, 3)))
    packed = compressed(model, ratio=8, calibration=[IMAGES])
    assert saved_bytes(packed, tmp_path) <= original_bytes(model) / 8


def test_one_answer_instead_of_logits(tmp_path: Path) -> None:
    model = trained(
        nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    )
    other = copy.deepcopy(model)
    packed = compressed(model, ratio=6, calibration=[SMALL])
    assert saved_bytes(packed, tmp_path) <= original_bytes(model) / 6
    with torch.no_grad():
        assert relative_error(packed.load_into(other)(SMALL), model(SMALL)) < 0.3


@pytest.mark.parametrize(
    "field",
    [
        "views",
        "second_order",
        "reorder",
        "sequential",
        "basis",
        "equal_slope",
        "word_frequencies",
        "refine",
        "correct_means",
        "about_means",
        "correct_variances",
        "fold_norms",
    ],
)
def test_every_ingredient_can_be_left_out(field: str, tmp_path: Path) -> None:
    model = trained(nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64)))
    packed = compressed(model, ratio=6, calibration=[SMALL], planner=Planner(**{field: False}))
    assert saved_bytes(packed, tmp_path) <= original_bytes(model) / 6
    folded = packed["1.running_mean"].kind == "constant"
    assert folded == (field != "fold_norms")


# -- what stays as it was ----------------------------------------------------------------------------


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    state = {name: raw(values) for name, values in model.state_dict().items()}
    modes = {name: module.training for name, module in model.named_modules()}
    gradients = {name: (p.requires_grad, p.grad is None) for name, p in model.named_parameters()}
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    return state, modes, gradients, hooks


@pytest.mark.parametrize("settings", [{"ratio": 8}, {"max_loss": 0.05}], ids=str)
def test_the_model_is_left_alone(settings: dict[str, Any]) -> None:
    model = trained(
        nn.Sequential(nn.Linear(24, 48), nn.BatchNorm1d(48), nn.ReLU(inplace=True), nn.Linear(48, 100))
    ).train()
    model[1].eval()
    model[3].weight.requires_grad_(False)
    before = snapshot(model)
    compressed(model, calibration=[SMALL[:60], SMALL[60:]], **settings)
    assert snapshot(model) == before


# -- a budget of loss --------------------------------------------------------------------------------


@pytest.mark.parametrize("max_loss", [0.005, 0.1])
def test_the_loss_asked_for_is_kept_on_inputs_held_aside(max_loss: float, tmp_path: Path) -> None:
    """The file's, as loaded, on the eighth of the data that the compression did not see."""
    model = wide().eval()
    calibration = calibrate(model, [SMALL], samples=96)
    size = saved_bytes(compressed(model, max_loss=max_loss, calibration=calibration), tmp_path)
    other = fp.load(tmp_path / "net.packed.safetensors").load_into(wide()).eval()
    with torch.no_grad():
        wanted, found = (net(SMALL[84:]).double().log_softmax(1) for net in (model, other))
    assert 0.2 * max_loss < float((wanted.exp() * (wanted - found)).sum(1).mean()) <= max_loss
    assert size < original_bytes(model) / (8 if max_loss > 0.05 else 3)


def test_a_loss_so_large_that_no_file_reaches_it(tmp_path: Path) -> None:
    """Ratios beyond what headers allow are too much, not an error."""
    packed = compressed(wide(), max_loss=50.0, calibration=[SMALL])
    assert saved_bytes(packed, tmp_path) < original_bytes(wide()) / 16


def test_a_loss_too_small_for_any_file() -> None:
    with pytest.raises(fp.PlanError, match="the predictions still diverge by more than 1e-12 nats"):
        compressed(wide(), max_loss=1e-12, calibration=[SMALL])


def test_divergence_is_none_of_the_model_itself_and_that_of_another_by_hand() -> None:
    model, inputs = small().eval(), SMALL
    held = calibrate(model, [inputs[:40], inputs[40:]], samples=96)
    same = fp.compress(model, fp.Keep(), progress=False)
    assert measure_divergence(model, same, {}, held) == pytest.approx(0.0, abs=1e-12)
    rough = fp.compress(model, fp.Scalar(3), progress=False)
    other = rough.load_into(small()).eval()
    with torch.no_grad(), evaluating(model):
        wanted, found = (net(inputs).double().log_softmax(1) for net in (model, other))
    expected = float(nn.functional.kl_div(found, wanted, log_target=True, reduction="batchmean"))
    assert measure_divergence(model, rough, {}, held) == pytest.approx(expected, rel=1e-6)


def test_a_budget_beyond_what_codes_can_use() -> None:
    """A thousand times what there is: the finest codes there are, not steps that vanish."""
    state = {"a.weight": seeded(8, 27), "b.weight": seeded(10, 8, seed=1)}
    packed = fp.compress(state, max_bytes=1_000_000, progress=False)
    for name, weight in state.items():
        assert relative_error(decode(packed[name]), weight) < 1e-3
    planned = fp.plan(state, max_bytes=1_000_000)
    assert planned.budget_bytes == 1_000_000
    assert all(line.bytes <= line.source_bytes / 2 for line in planned.tensors)  # 16 bits of 32


@pytest.mark.parametrize("scale", [1e18, 1e30, 1e-25])
def test_weights_whose_squares_leave_the_range_of_fp32(scale: float, tmp_path: Path) -> None:
    weight = seeded(48, 64)
    packed = compressed({"a.weight": weight * scale, "b.weight": seeded(48, 64, seed=1)}, ratio=8.0)
    plain = compressed({"a.weight": weight, "b.weight": seeded(48, 64, seed=1)}, ratio=8.0)
    expected = relative_error(decode(plain["a.weight"]), weight)
    assert relative_error(decode(packed["a.weight"]) / scale, weight) == pytest.approx(expected, rel=0.05)
    assert saved_bytes(packed, tmp_path) <= 2 * 48 * 64 * 4 / 8


@pytest.mark.parametrize("trellis", [0, 4])
def test_rows_of_very_unlike_size_are_all_kept(trellis: int, tmp_path: Path) -> None:
    """A norm may follow, and without data nothing says that small rows do not matter."""
    weight = seeded(64, 96) * torch.logspace(0, -4, 64)[:, None]
    packed = compressed({"a.weight": weight}, ratio=8.0, planner=Planner(trellis=trellis))
    assert saved_bytes(packed, tmp_path) <= 4 * weight.numel() / 8
    lost = [relative_error(*rows) for rows in zip(decode(packed["a.weight"]), weight, strict=True)]
    assert max(lost) < 0.3
    assert packed["a.weight"].parts["scale"].shape == (64, 1)


@pytest.mark.parametrize("quiet", [0, 15, 64])
def test_rows_alike_and_dead_rows_share_one_step(quiet: int) -> None:
    """Less than a quarter of small rows, or rows that are zero in practice, cost no steps of their own."""
    size = torch.ones(64, 1)
    size[:quiet] = 1e-3 if quiet == 15 else 1.0
    size[-40:] = 1e-9 if quiet == 0 else size[-40:]
    packed = compressed({"a.weight": seeded(64, 96) * size}, ratio=8.0)
    assert packed["a.weight"].parts[
        "scale" if packed["a.weight"].kind == "scalar" else "latent_scale"
    ].shape == (1, 1)
