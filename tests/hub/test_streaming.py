"""Folders calibrated block by block: the numbers of the model in memory, with a few of its weights at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.batches import run as run_model
from factorpack.budget import goals, knowledge, sequential
from factorpack.budget.divergence import measure_divergence
from factorpack.budget.goals import compress_to_bytes
from factorpack.budget.planner import BudgetRequest
from factorpack.budget.segment_gradients import measure_information_by_segment
from factorpack.budget.sensitivity import measure_information
from factorpack.budget.stream_memory import estimate_stream_memory
from factorpack.calibration.calibrate import calibrate
from factorpack.calibration.streaming import open_streamed
from factorpack.checkpoints.entry import Entry
from factorpack.decoding import decode
from factorpack.passes.resident import LIMIT_BYTES, Resident, copy_network, replace_weight, resident_of
from factorpack.source import Source, open_source
from tests.commands.running import printed, run
from tests.hub.conftest import bert, llama, save_llama

LAYERS, SAMPLES, WIDTH, BYTES = 3, 6, 32, 34_000
PLANNER = fp.Planner(samples=SAMPLES, refine=False, trellis=0)
"""What a streamed run can do of the default. Paths in nets as small as these make much of the last bits of sums."""


def batches() -> list[dict[str, Tensor]]:
    tokens = torch.randint(96, (SAMPLES, 24), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": each} for each in tokens.split(2)]


def padded() -> list[dict[str, Tensor]]:
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1:, 17:] = 0
    return [{**batch, "attention_mask": mask} for batch in batches()]


def save(model: nn.Module, path: Path) -> Path:
    model.save_pretrained(path, max_shard_size="20kB")  # type: ignore[operator]
    return path


CASES = ["untied", "tied", "bf16", "encoder"]


@pytest.fixture(params=CASES)
def saved(request: pytest.FixtureRequest, transformers: Any, tmp_path: Path) -> Path:
    if request.param == "encoder":
        return save(bert(transformers, LAYERS, WIDTH), tmp_path / "model")
    made = llama(transformers, request.param == "tied", LAYERS, WIDTH)
    return save(made.bfloat16() if request.param == "bf16" else made, tmp_path / "model")


@pytest.fixture
def plain(transformers: Any, tmp_path: Path) -> Path:
    return save(llama(transformers, False, LAYERS, WIDTH), tmp_path / "model")


def streamed(folder: Path, limit_bytes: int = LIMIT_BYTES) -> tuple[nn.Module, Source]:
    return open_streamed(folder, open_source(folder), torch.device("cpu"), limit_bytes)


def weights_on_device(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters() if each.dim() > 1 and not each.is_meta)


def test_outputs_are_those_of_the_model_in_memory(saved: Path) -> None:
    network, _ = streamed(saved)
    original = fp.hub.from_pretrained(saved)
    assert weights_on_device(network) == 0
    for batch in padded():
        for mine, its in zip(
            run_model(network, batch).to_tuple(), run_model(original, batch).to_tuple(), strict=True
        ):
            if isinstance(mine, Tensor):
                assert torch.equal(mine, its)


def test_segments_and_sensitivities_are_those_of_the_model_in_memory(saved: Path) -> None:
    network, original = streamed(saved)[0], fp.hub.from_pretrained(saved)
    mine, its = calibrate(network, padded(), SAMPLES), calibrate(original, padded(), SAMPLES)
    assert mine.order == its.order
    assert mine.segments(network) == its.segments(original)
    assert len(mine.segments(network)) == LAYERS + 1
    found = measure_information_by_segment(network, mine, mine.order, SAMPLES)
    for name, wanted in measure_information(original, its, its.order, SAMPLES).items():
        assert found[name].level == wanted.level
        assert (found[name].metric is None) == (wanted.metric is None)
        if wanted.metric is not None:
            torch.testing.assert_close(found[name].metric, wanted.metric)


@pytest.mark.parametrize("saved", ["tied", "encoder"], indirect=True)
def test_codes_are_those_of_the_model_in_memory(saved: Path) -> None:
    network, source = streamed(saved)
    found = [
        compress_to_bytes(BudgetRequest(source, model, batches(), PLANNER, {}, (), progress=False), BYTES)
        for model in (network, fp.hub.from_pretrained(saved))
    ]
    assert found[0].curves == found[1].curves
    for name, encoded in found[1].tensors.items():
        assert torch.equal(decode(found[0].tensors[name]), decode(encoded)), name


@pytest.mark.parametrize("saved", ["tied"], indirect=True)
def test_a_folder_in_one_call(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "packed.safetensors"
    packed = fp.compress(saved, ratio=8, calibration=batches(), planner=PLANNER, to=target, progress=False)
    original = fp.hub.from_pretrained(saved)
    assert packed.path == target
    assert 8 <= packed.size().file_ratio <= 8.08
    held = fp.compress(original, ratio=8, calibration=batches(), planner=PLANNER, progress=False)
    assert set(packed) == set(held)
    assert packed.aliases == held.aliases
    given = calibrate(original, batches())
    mine, its = (measure_divergence(original, each, each.aliases, given) for each in (packed, held))
    assert mine == pytest.approx(its, rel=0.1)


def test_only_a_block_is_on_the_device(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is the least that holds a segment: at every read, in both networks, there is no more."""
    networks: list[Resident] = []
    read = Resident._read
    twin = Resident.twin

    def counted(self: Resident, name: str) -> Tensor:
        values = read(self, name)
        for each in networks:
            held = weights_on_device(each.network) + (
                values.nbytes if each is self and values.dim() > 1 else 0
            )
            assert held <= each.limit_bytes
        return values

    def noted(self: Resident) -> Resident:
        made = twin(self)
        networks.append(made)
        return made

    network, source = streamed(plain, 1)
    resident = resident_of(network)
    assert resident is not None
    calibration = calibrate(network, batches(), SAMPLES)
    segments = calibration.segments(network)
    blocks = [network.get_submodule(cut.module) for cut in segments.cuts]
    block = sum(each.nbytes for each in blocks[0].parameters() if each.dim() > 1)
    whole = sum(each.nbytes for each in network.parameters() if each.dim() > 1)
    assert resident.limit_bytes == whole - (LAYERS - 1) * block
    networks.append(resident)
    monkeypatch.setattr(Resident, "_read", counted)
    monkeypatch.setattr(Resident, "twin", noted)
    compress_to_bytes(BudgetRequest(source, network, calibration, PLANNER, {}, (), progress=False), BYTES)
    assert len(networks) >= 2
    assert all(0 < each.most_held_bytes <= each.limit_bytes for each in networks)


@pytest.mark.parametrize("saved", ["tied", "untied"], indirect=True)
def test_weights_are_read_once_per_pass_through_the_blocks(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many batches: a model of twice as many is read as often."""
    counts = []
    read = Resident._read
    for many in (2, 4):
        reads: list[str] = []
        monkeypatch.setattr(
            Resident, "_read", lambda self, name, reads=reads: (reads.append(name), read(self, name))[1]
        )
        network, source = streamed(saved, 1)
        request = BudgetRequest(source, network, batches()[:many], PLANNER, {}, (), progress=False)
        compress_to_bytes(request, BYTES)
        counts.append(sum(name.endswith("mlp.up_proj.weight") for name in reads))
    assert counts[0] == counts[1]
    assert counts[0] <= 12 * LAYERS


def test_networks_are_changed_alone(plain: Path) -> None:
    network, source = streamed(plain)
    other = copy_network(network)
    name = "model.layers.1.mlp.up_proj.weight"
    encoded = fp.Scalar(4).encode(source.weight(name))
    run_model(other, batches()[0])
    assert replace_weight(other, name, encoded, decode(encoded)).kind == "scalar"
    before = run_model(fp.hub.from_pretrained(plain), batches()[0]).logits
    assert torch.equal(run_model(network, batches()[0]).logits, before)
    assert not torch.equal(run_model(other, batches()[0]).logits, before)
    assert torch.equal(other.get_submodule("model.layers.1.mlp.up_proj").weight, decode(encoded))


def test_a_pickled_checkpoint_stays_as_it_is(transformers: Any, tmp_path: Path) -> None:
    """Its tensors are read from one mapping of the file: biases corrected in one network are not another's."""
    folder = save(bert(transformers, LAYERS, WIDTH), tmp_path / "model")
    state = {name: entry.load() for name, entry in open_source(folder).entries.items()}
    (tmp_path / "pickled").mkdir()
    torch.save(state, tmp_path / "pickled" / "pytorch_model.bin")
    (tmp_path / "pickled" / "config.json").write_bytes((folder / "config.json").read_bytes())
    network, source = streamed(tmp_path / "pickled")
    before = run_model(network, batches()[0]).last_hidden_state
    compress_to_bytes(BudgetRequest(source, network, batches(), PLANNER, {}, (), progress=False), BYTES)
    for name, wanted in state.items():
        assert torch.equal(source.entries[name].load(), wanted), name
    assert torch.equal(run_model(network, batches()[0]).last_hidden_state, before)


def test_plans_are_not_refined(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    learn = knowledge.learn

    def noted(*arguments: Any) -> Any:
        seen.append(learn(*arguments))
        return seen[-1]

    monkeypatch.setattr(goals, "learn", noted)
    fp.compress(plain, ratio=5, calibration=3 * batches(), progress=False)
    assert 3 * SAMPLES >= knowledge.FEWEST_TO_SPLIT
    assert seen[0].held_out is None
    assert len(seen[0].calibration) == 3 * SAMPLES


def test_a_shard_that_is_missing(plain: Path, tmp_path: Path) -> None:
    shard = sorted(plain.glob("*.safetensors"))[5]
    target = tmp_path / "packed.safetensors"

    def vanishing() -> Iterator[Any]:
        yield batches()[0]
        shard.unlink()

    with pytest.raises(fp.SourceError, match=f"can no longer be read from .*{shard.name}"):
        fp.compress(plain, ratio=5, calibration=vanishing(), to=target, progress=False)
    with pytest.raises(fp.SourceError, match=f"there is no file or folder .*{shard.name}"):
        fp.compress(plain, ratio=5, calibration=batches(), to=target, progress=False)
    assert list(tmp_path.iterdir()) == [plain]


def test_a_gpu_that_is_too_small(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(sequential, "meet_together", fail)
    with pytest.raises(fp.SourceError, match=r"fewer or shorter samples .*tried to allocate 2 GiB"):
        fp.compress(plain, ratio=5, calibration=batches(), to=tmp_path / "packed", progress=False)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        fp.compress(fp.hub.from_pretrained(plain), ratio=5, calibration=batches(), progress=False)


def test_nan_in_one_block_is_named(transformers: Any, tmp_path: Path) -> None:
    made = llama(transformers, False, LAYERS, WIDTH)
    with torch.no_grad():
        made.get_parameter("model.layers.2.mlp.up_proj.weight")[3, 3] = torch.inf
    folder = save(made, tmp_path / "model")
    with pytest.raises(fp.SourceError, match=r"model\.layers\.2\.mlp\.up_proj"):
        fp.compress(folder, ratio=5, calibration=batches(), progress=False)


def test_what_cannot_be_streamed(plain: Path) -> None:
    with pytest.raises(fp.PlanError, match="give a ratio or max_bytes"):
        fp.compress(plain, max_loss=0.1, calibration=batches())
    with pytest.raises(fp.SourceError, match="a budget also takes a transformers folder"):
        fp.compress(plain, fp.SecondOrder(bits=4), calibration=batches())
    with pytest.raises(fp.SourceError, match=r"which has a config\.json"):
        fp.compress(next(plain.glob("*.safetensors")), ratio=5, calibration=batches())
    config = plain / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    with pytest.raises(
        fp.SourceError, match=r"no tensor 'model\.layers\.3\..* streaming needs the model's own"
    ):
        fp.compress(plain, ratio=5, calibration=batches())
    config.write_text(config.read_text().replace('"intermediate_size": 64', '"intermediate_size": 48'))
    with pytest.raises(fp.SourceError, match=r"\(64, 32\) in .*, \(48, 32\) by its config"):
        fp.compress(plain, ratio=5, calibration=batches())


def test_a_model_without_a_chain_of_blocks(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factorpack.passes.cuts._is_last", lambda *_: False)
    with pytest.raises(fp.SourceError, match="LlamaForCausalLM cannot be cut into blocks"):
        fp.compress(plain, ratio=5, calibration=batches(), progress=False)


def test_on_the_command_line(
    transformers: Any,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = save_llama(transformers, tmp_path / "llama", tied=True, layers=2)
    options = ("--ratio", 4, "--length", 16, "--samples", 8, "--stream")
    monkeypatch.setattr("factorpack.commands.compress_request.from_pretrained", None)  # would hold the model
    assert (
        run(
            monkeypatch,
            "compress",
            folder,
            "-o",
            tmp_path / "small",
            *options,
            "--calibration",
            text,
            "--json",
        )
        == 0
    )
    assert printed(capsys)["file_ratio"] >= 4
    assert type(fp.hub.from_pretrained(tmp_path / "small")).__name__ == "LlamaForCausalLM"
    assert run(monkeypatch, "compress", folder, "-o", tmp_path / "other", *options) == 2
    assert "--stream reads the model of a Hugging Face folder" in capsys.readouterr().err


def test_memory_is_estimated_beforehand(
    plain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few, more = (fp.plan(plain, ratio=5, samples=samples, length=64).stream for samples in (8, 16))
    assert few is not None
    assert more is not None
    border = 64 * WIDTH * 4  # tokens, width, bytes
    assert more.device_bytes - few.device_bytes == 2 * 8 * border
    assert fp.plan(plain, ratio=5).stream is None
    assert run(monkeypatch, "plan", plain, "--ratio", 5, "--stream", "--samples", 8, "--length", 64) == 0
    assert "streamed, calibrated on 8 texts of 64 tokens: about" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(fp.PlanError, match="give ratio or max_bytes"):
        fp.plan(plain, samples=8)
    with pytest.raises(fp.PlanError, match="0 samples of 2048 tokens"):
        fp.plan(plain, ratio=5, samples=0)


def test_sizes_of_a_large_model_from_its_shapes(transformers: Any, tmp_path: Path) -> None:
    """Llama 3 8B, of which nothing but the config exists: within the memory that streaming promises."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
    config = transformers.LlamaConfig(
        **sizes, dtype="bfloat16", architectures=["LlamaForCausalLM"], tie_word_embeddings=False
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        shapes = transformers.LlamaForCausalLM(config).state_dict()
    source = Source({name: Entry(tuple(each.shape), torch.bfloat16, Tensor) for name, each in shapes.items()})
    found = estimate_stream_memory(tmp_path, source, 4_000_000_000, 128, 2048)
    assert 10e9 < found.device_bytes < 40e9
    assert 10e9 < found.host_bytes < 32e9
