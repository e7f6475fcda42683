"""A budget met in parts: kept, the same for any number of workers, and resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import factorpack as fp
from factorpack.decoding import decode
from factorpack.engine import Engine, Local, Outcome, Task
from factorpack.errors import PlanError
from tests.helpers import assert_same_encoded, compress_to, relative_error, seeded
from tests.test_per_tensor import Here


def state() -> dict[str, torch.Tensor]:
    """Weights of unlike spread, vectors, and a tensor that is no weight."""
    weights = {f"layer{n}.weight": seeded(96, 160, seed=n) * 2.0**n for n in range(4)}
    weights["conv.weight"] = seeded(32, 16, 3, 3, dtype=torch.bfloat16, seed=7)
    return weights | {"norm.weight": torch.ones(96), "bias": seeded(96, seed=9), "steps": torch.tensor(3)}


def original_bytes() -> int:
    return sum(value.numel() * (4 if value.is_floating_point() else 8) for value in state().values())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file(state(), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def compress(out: Path, checkpoint: Path, engine: Engine | None, **how: object) -> fp.Packed:
    return compress_to(out, checkpoint, engine=engine, progress=False, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("ratio", [5.0, 12.0, 40.0])
def test_the_budget_is_kept_and_met(ratio: float, checkpoint: Path, tmp_path: Path) -> None:
    packed = compress(tmp_path / "out", checkpoint, Here(), ratio=ratio)
    budget = original_bytes() / ratio
    assert 0.99 * budget <= (tmp_path / "out").stat().st_size <= budget
    assert list(packed) == list(fp.compress(checkpoint, fp.Keep(), progress=False))
    assert {path.name for path in tmp_path.iterdir()} == {"net.safetensors", "out"}


def test_it_is_as_close_as_one_process_comes(checkpoint: Path, tmp_path: Path) -> None:
    """Steps are of equal slope in both; what differs is where the last per cent went."""
    errors = []
    for name, engine in (("alone", None), ("spread", Here())):
        packed = compress(tmp_path / name, checkpoint, engine, ratio=12.0)
        errors.append(
            {
                key: relative_error(decode(packed[key]), value)
                for key, value in state().items()
                if value.dim() > 1
            }
        )
    alone, spread = errors
    assert spread == pytest.approx(alone, rel=0.05)


@pytest.mark.parametrize("planner", [None, fp.Planner(norm_bits=4)])
def test_biases_are_rounded_as_by_one_process(
    planner: fp.Planner | None, checkpoint: Path, tmp_path: Path
) -> None:
    settings = {"max_bytes": 20_000, "planner": planner}
    packed = [compress(tmp_path / f"{each}", checkpoint, each, **settings) for each in (None, Here())]
    assert_same_encoded(packed[0]["bias"], packed[1]["bias"])
    assert not torch.equal(packed[0]["bias"].parts["values"], state()["bias"].half())


def test_the_bytes_are_the_same_for_any_number_of_workers(checkpoint: Path, tmp_path: Path) -> None:
    engines = [Here(), Here(reverse=True), Local(2, start="fork")]
    found = []
    for number, engine in enumerate(engines):
        compress(tmp_path / str(number), checkpoint, engine, max_bytes=90_000, exclude=["layer0.*"])
        found.append((tmp_path / str(number)).read_bytes())
    assert found[0] == found[1] == found[2]
    kept = fp.load(tmp_path / "0")["layer0.weight"]
    assert torch.equal(decode(kept), state()["layer0.weight"])


class Counting(Here):
    """Also which function each task called."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        self.calls = [*getattr(self, "calls", []), *((task.function.__name__, task.name) for task in tasks)]
        return super().run(tasks)


def test_a_killed_run_goes_on_from_curves_and_codes(checkpoint: Path, tmp_path: Path) -> None:
    whole = Counting()
    compress(tmp_path / "whole", checkpoint, whole, ratio=12.0)
    coded = [name for name, value in state().items() if value.dim() > 1]
    assert [call for call in whole.calls if call[0] == "measure_curve"] == [
        ("measure_curve", name) for name in fp.load(tmp_path / "whole") if name in coded
    ]
    for stop in range(2, len(whole.names), 5):
        out = tmp_path / f"out{stop}"
        with pytest.raises(KeyboardInterrupt):
            compress(out, checkpoint, Here(stop_after=stop), ratio=12.0)
        assert not out.exists()
        again = Here()
        compress(out, checkpoint, again, ratio=12.0)
        assert len(again.names) == len(whole.names) - stop, "nothing is done twice"
        assert out.read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_harmed_curve_is_measured_again(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        compress(out, checkpoint, Here(stop_after=6), ratio=12.0)
    for part in (tmp_path / "out.parts").iterdir():
        part.write_bytes(part.read_bytes()[:-20])
    again = Here()
    with pytest.warns(UserWarning, match=r"is damaged, so (the curve of )?'[\w.]+' is made again") as caught:
        compress(out, checkpoint, again, ratio=12.0)
    assert len(caught) == 6
    compress(tmp_path / "whole", checkpoint, Here(), ratio=12.0)
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()


def test_barely_above_headers_weights_become_zero(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be met: with every weight zero") as caught:
        compress(tmp_path / "out", checkpoint, Here(), max_bytes=100)
    least = int(str(caught.value).split("still have ")[1].split(",")[0])
    packed = compress(tmp_path / "out", checkpoint, Here(), max_bytes=least + 60)
    assert (tmp_path / "out").stat().st_size <= least + 60
    assert any("the budget leaves no room" in packed[name].note for name in packed)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"ratio": 9.0, "max_bytes": 9}, "give one of a method, ratio, max_bytes and max_loss"),
        ({"ratio": 9.0, "method": fp.Scalar(4)}, "give one of a method, ratio, max_bytes and max_loss"),
        ({"ratio": 0.5}, "ratio is 0.5"),
        ({"max_bytes": "many"}, "max_bytes is 'many'"),
        ({"ratio": 9.0, "exclude": ["*"]}, "there is no weight to compress"),
    ],
)
def test_what_does_not_go_together(
    how: dict[str, object], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=message):
        compress(tmp_path / "out", checkpoint, Here(), **how)
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]
