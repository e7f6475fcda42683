"""A calibrated budget over an engine: the bytes of one process, whoever dies on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import factorpack as fp
from factorpack.budget import worker_tasks, workers
from factorpack.budget.sensitivity import measure_information
from factorpack.budget.worker_tasks import _load_weights, save_weights
from factorpack.calibration.calibrate import calibrate
from factorpack.engine import Engine, Local
from factorpack.errors import EngineError, PlanError, SourceError
from factorpack.record import LayerMoments
from factorpack.weight import Weight
from tests.engine import works
from tests.helpers import assert_same_tensor, seeded
from tests.test_per_tensor import Here


class Tokens(nn.Module):
    """Two layers with one input, one that runs twice, a buffer, and a head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 24)
        self.left, self.right = nn.Linear(24, 40), nn.Linear(24, 40)
        self.back = nn.Linear(40, 24)
        self.head = nn.Linear(24, 48, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("shift", torch.full((24,), 0.25), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.table(input_ids) * attention_mask[:, :, None] + self.shift
        for _ in range(2):
            hidden = hidden + self.back(self.left(hidden) * self.right(hidden).sigmoid())
        return {"logits": self.head(hidden)}


def text() -> nn.Module:
    torch.manual_seed(0)
    return Tokens().eval()


def images() -> nn.Module:
    """A norm, which is corrected, and a transposed convolution, which has no moments."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 24, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 40)).eval()


def texts() -> list[Any]:
    """Batches of unlike sizes, with and without padding."""
    found = torch.randint(48, (20, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(20, 6)
    mask[9:, 4:] = 0
    return [{"input_ids": found[a:b], "attention_mask": mask[a:b]} for a, b in ((0, 8), (8, 12), (12, 20))]


NETS: dict[str, tuple[Callable[[], nn.Module], list[Any], dict[str, Any]]] = {
    "text": (text, texts(), {"ratio": 4.0}),
    "images": (images, list(seeded(24, 3, 8, 8).split(10)), {"ratio": 4.0, "planner": fp.Planner(trellis=4)}),
    "a loss": (images, list(seeded(24, 3, 8, 8).split(10)), {"max_loss": 9.0}),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As workers have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compress(out: Path, net: str, engine: Engine | None = None) -> tuple[bytes, list[Any]]:
    """The bytes of a file, and the curves it was planned on."""
    make, batches, how = NETS[net]
    packed = fp.compress(make(), calibration=batches, to=out, engine=engine, progress=False, **how)
    return out.read_bytes(), list(packed.curves.items())


@pytest.mark.parametrize("net", NETS)
def test_the_bytes_are_those_of_one_process(
    net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factorpack.budget.goals.LOSS_TRIES", 1)  # one file is enough, not too small
    monkeypatch.setattr("factorpack.budget.goals.FIRST_RATIO", 4.0)
    engine = Here(stop_after=999, reverse=True)
    assert compress(tmp_path / "spread", net, engine) == compress(tmp_path / "alone", net)
    assert {"batch 0", "batch 1"} < set(engine.names)
    assert {path.name for path in tmp_path.iterdir()} == {"alone", "spread"}, "no file for workers is left"


def test_gradients_are_added_in_the_order_of_batches(tmp_path: Path) -> None:
    model, layers = text(), ["table", "left", "back"]
    calibration = calibrate(model, [batch for batch in texts() for _ in range(5)], samples=999)
    spread = workers.Workers(Here(reverse=True), tmp_path, False)
    spread.know(model, calibration, None)
    found = spread.measure_information(model, calibration, layers, 80)
    for name, expected in measure_information(model, calibration, layers, 80).items():
        assert found[name].level == expected.level
        assert name != "table" or torch.equal(*(each.metric for each in (found[name], expected)))


def test_a_worker_that_dies_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setattr(workers, "show_batch", partial(works.dies_first, marks, worker_tasks.show_batch))
    spread = compress(tmp_path / "spread", "text", Local(2, start="fork"))
    assert len(list(marks.iterdir())) == 1
    assert spread == compress(tmp_path / "alone", "text")


def test_a_killed_driver_goes_on(tmp_path: Path) -> None:
    whole = Here(stop_after=999)
    expected = compress(tmp_path / "whole", "text", whole)
    for stop in range(len(texts()) + 1, len(whole.names), 4):
        with pytest.raises(KeyboardInterrupt):
            compress(tmp_path / "out", "text", Here(stop_after=stop))
        again = Here(stop_after=999)
        assert compress(tmp_path / "out", "text", again) == expected
        assert again.names == whole.names[stop:], "nothing is done twice"
        (tmp_path / "out").unlink()


def test_without_the_engine_it_goes_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compress(tmp_path / "whole", "text")
    with pytest.raises(KeyboardInterrupt):
        compress(tmp_path / "out", "text", Here(stop_after=6))
    monkeypatch.setattr("factorpack.budget.knowledge.measure_information", None)
    assert compress(tmp_path / "out", "text") == expected


def test_nan_is_named(tmp_path: Path) -> None:
    model = images()
    with torch.no_grad():
        model.get_parameter("6.bias")[0] = torch.nan
    with pytest.raises(SourceError, match=r"NaN or infinity on the calibration data; the first layer .* '6'"):
        fp.compress(
            model,
            calibration=NETS["images"][1],
            ratio=4.0,
            to=tmp_path / "out",
            engine=Here(),
            progress=False,
        )


def test_what_workers_cannot_do(tmp_path: Path) -> None:
    class Hidden(nn.Linear):
        """Cannot be imported."""

    model, batches = nn.Sequential(nn.Linear(8, 64), Hidden(64, 64)), [seeded(8, 8)]
    given: dict[str, Any] = {"calibration": batches, "engine": Here(), "progress": False}
    with pytest.raises(EngineError, match=r"a Sequential cannot be sent to workers: .* must be importable"):
        fp.compress(model, ratio=4.0, to=tmp_path / "out", **given)
    with pytest.raises(PlanError, match="an engine meets a budget and writes a file"):
        fp.compress(model, ratio=4.0, **given)
    with pytest.raises(PlanError, match="a method compresses each layer after those before it"):
        fp.compress(model, fp.SecondOrder(step=0.1), to=tmp_path / "out", **given)
    save_file(model.state_dict(), tmp_path / "net.safetensors")
    with pytest.raises(PlanError, match="calibrated block by block in one process: open it"):
        fp.compress(tmp_path / "net.safetensors", ratio=4.0, to=tmp_path / "out", **given)


def test_no_other_code_than_the_drivers_is_opened(tmp_path: Path) -> None:
    model = images()
    calibration = calibrate(model, NETS["images"][1])
    shared = worker_tasks.share_model(model, calibration, None, tmp_path, "cpu")
    found, _, _ = worker_tasks._open_once(shared)
    assert all(map(torch.equal, found.state_dict().values(), model.state_dict().values()))
    worker_tasks._open_once.cache_clear()
    shared.code.write_bytes(shared.code.read_bytes()[:-1] + b"x")
    with pytest.raises(EngineError, match="is not the file that the driver wrote"):
        worker_tasks._open_once(shared)


def test_a_worker_gets_a_weight_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    second, mean = torch.eye(3)[None], torch.ones(1, 3)
    known = Weight(seeded(9, 3), 1, LayerMoments(second, mean, None, 2 * mean), 0.5, True)
    save_weights(tmp_path / "weights", {"known": known, "unknown": Weight(seeded(2, 2))})
    found = _load_weights(tmp_path / "weights", "cpu")
    assert list(found) == ["known", "unknown"]
    assert_same_tensor(found["known"].values, known.values)
    assert found["known"].inputs is not None
    assert_same_tensor(found["known"].inputs.original_mean, 2 * mean)
    for name in ("transposed_groups", "sensitivity", "is_vocabulary"):
        assert getattr(found["known"], name) == getattr(known, name)
    assert (found["unknown"].inputs, found["unknown"].sensitivity) == (None, None)
