"""A killed budget goes on from what it has finished: the same bytes, nothing taken for what it is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.budget import journal, meet
from factorpack.budget.journal import Finished, Journal
from factorpack.errors import PlanError
from factorpack.format.encode_ahead import Streams
from factorpack.format.locks import locked
from factorpack.methods import SecondOrder
from factorpack.weight import Weight
from tests.budget.test_goals import IMAGES, SMALL, small, trained
from tests.helpers import assert_same_encoded, assert_same_tensor, seeded


def net() -> nn.Module:
    """A norm, which is corrected, and biases, which are too."""
    layers = [nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 64, 3), nn.ReLU()]
    return trained(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 40)))


def language_model() -> nn.Module:
    """Layers that share an input, biases, and a head tied to its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=1, tie_word_embeddings=True)
    return LlamaForCausalLM(config).eval()  # type: ignore[no-any-return]


def tokens() -> list[Any]:
    found = torch.randint(64, (18, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": found[:7]}, {"input_ids": found[7:]}]


class Watch:
    """What a run keeps and finds; it can end one as if it were killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: list[str] = []
        self.found: list[str] = []
        self.stop_after: int | None = None
        write, find = Journal._write, Journal.find

        def watched_write(mine: Journal, folder: Path, name: str, *more: Any) -> None:
            if len(self.kept) == self.stop_after:
                raise KeyboardInterrupt
            write(mine, folder, name, *more)
            self.kept.append(name)

        def watched_find(mine: Journal, name: str, *more: Any) -> Finished | None:
            found = find(mine, name, *more)
            self.found += [] if found is None else [name]
            return found

        monkeypatch.setattr(Journal, "_write", watched_write)
        monkeypatch.setattr(Journal, "find", watched_find)

    def kill(self, stop_after: int, run: Callable[[], object]) -> None:
        self.kept, self.found, self.stop_after = [], [], stop_after
        with pytest.raises(KeyboardInterrupt):
            run()
        self.kept, self.found, self.stop_after = [], [], None


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Watch(monkeypatch)
    torch.set_num_threads(before)


def compress(out: Path, model: nn.Module, data: list[Any] | None, **how: Any) -> bytes:
    fp.compress(model, calibration=data, to=out, progress=False, **(how or {"ratio": 10.0}))
    return out.read_bytes()


CASES: dict[str, tuple[Callable[[], nn.Module], list[Any] | None, dict[str, Any], int]] = {
    "convolutions": (net, [IMAGES], {"ratio": 10.0}, 7),
    "paths": (small, [SMALL[:40], SMALL[40:]], {"ratio": 6.0, "planner": fp.Planner(trellis=4)}, 0),
    "text": (language_model, tokens(), {"ratio": 4.0}, 37),
    "a loss": (small, [SMALL], {"max_loss": 0.05}, 0),
    "weights alone": (net, None, {"ratio": 10.0}, 7),
}


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_goes_on_to_the_same_bytes(case: str, tmp_path: Path, watch: Watch) -> None:
    make, data, how, every = CASES[case]
    expected = compress(tmp_path / "whole", make(), data, **how)
    whole = list(watch.kept)
    # Where runs are long, the plan and the last code alone: what comes before is kept alike everywhere.
    early = range(1, len(whole), every) if every else [whole.index("curves")]
    for stop in [*early, len(whole) - 1]:
        out = tmp_path / "out"
        watch.kill(stop, lambda out=out: compress(out, make(), data, **how))  # type: ignore[misc]
        assert not out.exists()
        assert len(list((tmp_path / "out.parts").iterdir())) == stop
        assert compress(out, make(), data, **how) == expected
        assert watch.kept == whole[stop:], "nothing is done twice"
        assert {path.name for path in tmp_path.iterdir()} == {"whole", "out"}
        out.unlink()


def test_a_streamed_run_goes_on(tmp_path: Path, watch: Watch) -> None:
    language_model().save_pretrained(tmp_path / "model")  # type: ignore[operator]

    def stream(out: Path) -> bytes:
        fp.compress(tmp_path / "model", calibration=tokens(), ratio=4.0, to=out, progress=False)
        return out.read_bytes()

    expected = stream(tmp_path / "whole")
    whole = list(watch.kept)
    for stop in range(1, len(whole), 11):
        watch.kill(stop, lambda: stream(tmp_path / "out"))
        assert stream(tmp_path / "out") == expected
        assert watch.kept == whole[stop:]


def test_each_pass_goes_on(tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meet, "LEAST", 0.99999)  # so that one pass does not suffice
    expected = compress(tmp_path / "whole", small(), [SMALL])
    whole = list(watch.kept)
    planned = whole.index("curves")
    assert len(whole) - planned - 1 == 3 * len(set(whole[planned + 1 :]))
    for stop in range(planned + 2, len(whole), 11):
        watch.kill(stop, lambda: compress(tmp_path / "out", small(), [SMALL]))
        assert compress(tmp_path / "out", small(), [SMALL]) == expected
        assert watch.kept == whole[stop:]


def test_a_run_that_is_killed_again_and_again(tmp_path: Path, watch: Watch) -> None:
    out = tmp_path / "out"
    expected = compress(tmp_path / "whole", net(), [IMAGES])
    for _ in range((len(watch.kept) - 1) // 3):
        watch.kill(3, lambda: compress(out, net(), [IMAGES]))
    assert compress(out, net(), [IMAGES]) == expected
    assert len(watch.kept) <= 3


def test_resuming_measures_no_sensitivity_and_plans_nothing(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = compress(tmp_path / "whole", net(), [IMAGES])
    last = len(watch.kept) - 1
    watch.kill(last, lambda: compress(tmp_path / "out", net(), [IMAGES]))
    monkeypatch.setattr("factorpack.budget.knowledge.measure_information", None)
    monkeypatch.setattr("factorpack.budget.measured_curves.measure_curves", None)
    assert compress(tmp_path / "out", net(), [IMAGES]) == expected


def with_bias(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.get_parameter("3.bias").add_(0.01)
    return model


def with_other_weight(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.get_parameter("3.weight").view(-1)[7] += 1e-3
    return model


def with_other_activation(model: nn.Module) -> nn.Module:
    model.register_module("4", nn.GELU())
    return model


CHANGES: dict[str, tuple[Callable[[nn.Module], nn.Module], Tensor, dict[str, Any]]] = {
    "calibration": (lambda model: model, IMAGES * 1.001, {}),
    "last image": (lambda model: model, torch.cat([IMAGES[:-1], IMAGES[:1]]), {}),
    "planner": (lambda model: model, IMAGES, {"planner": fp.Planner(price=0.081)}),
    "weight": (with_other_weight, IMAGES, {}),
    "bias": (with_bias, IMAGES, {}),
    "activation": (with_other_activation, IMAGES, {}),
    "excluded": (lambda model: model, IMAGES, {"exclude": ["0.weight"]}),
    "method": (lambda model: model, IMAGES, {"layers": {"0.weight": fp.Scalar(4)}}),
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of `net` leaves that was killed after 10 parts. Not to be changed."""
    out = tmp_path_factory.mktemp("killed") / "out"
    with pytest.MonkeyPatch.context() as patch:
        Watch(patch).kill(10, lambda: compress(out, net(), [IMAGES]))
    return out.with_suffix(".parts")


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_reused_of_a_run_with_another(
    change: str, tmp_path: Path, watch: Watch, killed: Path
) -> None:
    modify, data, more = CHANGES[change]
    out = tmp_path / "out"
    shutil.copytree(killed, tmp_path / "out.parts")
    found = compress(out, modify(net()), [data], ratio=10.0, **more)
    assert watch.found == []
    assert {path.name for path in tmp_path.iterdir()} == {"out"}, "what is stale goes too"
    if change in (
        "calibration",
        "weight",
        "planner",
    ):  # what was not found cannot matter in the others either
        assert found == compress(tmp_path / "whole", modify(net()), [data], ratio=10.0, **more)


def test_another_ratio_takes_only_the_sensitivities(tmp_path: Path, watch: Watch, killed: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(killed, tmp_path / "out.parts")
    compress(out, net(), [IMAGES], ratio=12.0)
    assert watch.found == ["sensitivities"]


@pytest.mark.parametrize("harm", ["cut", "flipped", "empty", "another's"])
def test_a_damaged_part_is_made_again(harm: str, tmp_path: Path, watch: Watch) -> None:
    out = tmp_path / "out"
    expected = compress(tmp_path / "whole", small(), [SMALL])
    watch.kill(len(watch.kept) - 1, lambda: compress(out, small(), [SMALL]))
    parts = sorted((tmp_path / "out.parts").iterdir())
    contents = [part.read_bytes() for part in parts]
    for part, content, other in zip(parts, contents, [*contents[1:], contents[0]], strict=True):
        middle = len(content) // 2
        flipped = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
        part.write_bytes(
            {"cut": content[:middle], "flipped": flipped, "empty": b"", "another's": other}[harm]
        )
    with pytest.warns(UserWarning, match="is damaged, so .* is made again") as caught:
        assert compress(out, small(), [SMALL]) == expected
    said = [str(warning.message) for warning in caught]
    assert "'sensitivities' is made again" in said[0]
    assert len(said) == len(parts)
    assert watch.found == []
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "out"}


def test_without_a_file_nothing_is_kept(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(journal, "hashlib", None)  # not even the weights are read for it
    fp.compress(small(), calibration=[SMALL], ratio=8.0, progress=False)
    assert watch.kept == []
    assert list(tmp_path.iterdir()) == []


def test_an_error_before_any_work_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be met"):
        compress(tmp_path / "out", small(), [SMALL], max_bytes=100)
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_one_file_are_refused(tmp_path: Path) -> None:
    with locked(tmp_path / "out"), pytest.raises(PlanError, match="is being written by another run"):
        compress(tmp_path / "out", small(), [SMALL])


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    encoded = SecondOrder(step=0.1).encode(Weight(seeded(40, 24)))
    tensors = {"bias": seeded(3, dtype=torch.bfloat16), "one": torch.tensor(2.0), "w": seeded(2, 2)}
    made, found = Streams(), Streams()
    kept = Journal(tmp_path).after("planner", 0.1)
    kept.keep("w", Finished({"step": 0.1 + 0.2, "bytes": 7}, tensors, encoded), made)
    again = Journal(tmp_path).after("planner", 0.1).find("w", found)
    assert again is not None
    assert again.document == {"step": 0.1 + 0.2, "bytes": 7}
    assert list(again.tensors) == list(tensors)
    for name, value in tensors.items():
        assert_same_tensor(again.tensors[name], value)
    assert again.encoded is not None
    assert_same_encoded(again.encoded, encoded)
    assert found.find("w", again.encoded) == made.find("w", encoded)
    assert Journal(tmp_path).after("planner", 0.2).find("w") is None
    assert kept.find("v") is None
    assert Finished({"step": 0.1 + 0.2, "bytes": 7}, tensors, encoded).checksum() == again.checksum()


def test_a_checksum_is_of_everything() -> None:
    encoded = SecondOrder(step=0.1).encode(Weight(seeded(40, 24)))
    other = SecondOrder(step=0.1).encode(Weight(seeded(40, 24, seed=1)))
    found = [
        Finished({"step": 0.1}),
        Finished({"step": 0.2}),
        Finished({"step": 0.1}, {"bias": seeded(3)}),
        Finished({"step": 0.1}, {"bias": seeded(3, seed=1)}),
        Finished({"step": 0.1}, {}, encoded),
        Finished({"step": 0.1}, {}, other),
    ]
    assert len({each.checksum() for each in found}) == len(found)


def test_what_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(journal, "write_packed", full)
    with pytest.raises(OSError, match="no space left"):
        compress(tmp_path / "out", small(), [SMALL])


def test_a_network_may_change_once_its_tensors_are_kept() -> None:
    bias = torch.zeros(3)
    kept = Finished({}, {"bias": bias}).on_cpu()
    bias.add_(1)
    assert not kept.tensors["bias"].any()
