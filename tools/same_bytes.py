"""Does another version of factorpack still make the same files, byte for byte?

    python -m tools.same_bytes OLD/src NEW/src

Each source tree makes every file of CASES in a process of its own, on one thread, from fixed inputs. The
files are then compared. Real weights from the folder `shared` beside the checkout join where they are there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

SHARED = Path(os.environ.get("FACTORPACK_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class ConvNet(nn.Module):
    """Plain, strided, depthwise, grouped and transposed convolutions with norms, then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, groups in ((3, 24, 1), (24, 48, 1), (48, 48, 48), (48, 64, 4)):
            layers += [nn.Conv2d(before, after, 3, 1, 1, groups=groups, bias=False), nn.BatchNorm2d(after)]
            layers.append(nn.ReLU())
        layers += [
            nn.ConvTranspose2d(64, 32, 2, 2, groups=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        ]
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.fc(self.features(images))
        return found


class TokenNet(nn.Module):
    """An embedding, two blocks, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 48)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 48))
            for _ in range(2)
        )
        self.head = nn.Linear(48, 96, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        found: Tensor = self.head(hidden).mean(1)
        return found


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    net = kind().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(0.1 * torch.randn_like(module.running_mean))  # type: ignore[union-attr]
            module.running_var.copy_(0.5 + torch.rand_like(module.running_var))  # type: ignore[union-attr, arg-type]
    return net


IMAGES = [seeded(16, 3, 12, 12, seed=seed) for seed in range(3)]
TOKENS = [torch.randint(96, (12, 20), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
Case = tuple[str, Callable[[Path], object]]


def cases(folder: Path) -> Iterator[Case]:
    """What is made, each as a name and a function that writes the file it is given."""
    fp = importlib.import_module("factorpack")
    methods = importlib.import_module("factorpack.methods")
    main = _main()

    def saved(net: Any, *arguments: Any, **settings: Any) -> Callable[[Path], object]:
        return lambda path: fp.save(fp.compress(net, *arguments, progress=False, **settings), path)

    net, tokens = made(ConvNet), made(TokenNet)
    with torch.no_grad():
        checkpoint = folder / "net.safetensors"
        save_file({name: value.contiguous() for name, value in net.state_dict().items()}, checkpoint)
    for name, settings in METHODS.items():
        for index, fields in enumerate(settings):
            method = methods.from_fields(methods.METHODS, {"method": name, **fields})
            yield f"{name}{index}", saved(net, method)
    solver = {"steps": 8, "samples": 16}
    for name, fields in (
        ("qspca", {"rank": 8, "latent_bits": 4, "tile": 16, "solver": solver, "sparsity": 0.2}),
        ("second_order", {"bits": 3}),
        ("second_order", {"step": 0.05, "tile": 9, "trellis": 8}),
        ("bgd", {"codewords": 16, "iterations": 4}),
    ):
        method = methods.from_fields(methods.METHODS, {"method": name, **fields})
        patterns = {"exclude": ["features.9.weight"]}
        yield f"{name} calibrated {sorted(fields)[0]}", saved(net, method, calibration=IMAGES, **patterns)
    for ratio in (4.0, 8.0, 14.0):
        yield f"weights alone {ratio}", saved(net, ratio=ratio)
        yield f"calibrated {ratio}", saved(net, ratio=ratio, calibration=IMAGES)
    yield "tokens", saved(tokens, ratio=7.0, calibration=TOKENS)
    yield "tokens, weights alone", saved(tokens, max_bytes=9000)
    yield "loss", saved(net, max_loss=0.05, calibration=IMAGES)
    yield "trellis", saved(net, ratio=9.0, calibration=IMAGES, planner=fp.Planner(trellis=8))
    yield "trellis, weights alone", saved(net, ratio=9.0, planner=fp.Planner(trellis=4))
    for field in (
        "second_order",
        "sequential",
        "basis",
        "equal_slope",
        "refine",
        "correct_means",
        "fold_norms",
    ):
        planner = fp.Planner(**{field: False})
        yield f"no {field}", saved(net, ratio=9.0, calibration=IMAGES, planner=planner)
    chosen = {"layers": {"features.0.weight": fp.Scalar(6)}, "exclude": ["fc.*", "features.1.*"]}
    yield "chosen layers", saved(net, ratio=6.0, calibration=IMAGES, **chosen)
    yield "nearly nothing", saved(net, max_bytes=3300)
    yield "recipe", saved(net, recipe="resnet" if _fits(fp, net) else "none")
    command = ["compress", str(checkpoint), "--json", "-o"]
    has_settings = importlib.util.find_spec("factorpack.commands") is not None
    tile = ["--set", "tile=16"] if has_settings else ["--tile", "16"]  # as older trees have it
    for name, words in (
        ("command, ratio", ["--ratio", "10"]),
        ("command, method", ["--method", "scalar", "--bits", "5"]),
        ("command, engine", ["--ratio", "10", "--engine", "local", "--workers", "1"]),
        ("command, engine method", ["--rank", "8", *tile, "--engine", "local", "--workers", "1"]),
    ):
        yield name, lambda path, words=words: main([*command, str(path), *words])
    yield "trained", lambda path: _trained(fp, net, path)
    yield (
        "decoded",
        lambda path: main(["decode", str(path.with_name("command, ratio")), "-o", str(path), "--json"]),
    )
    real = SHARED / "models" / "mobilenet_v2.safetensors"
    if real.is_file():
        yield "mobilenet_v2 12x", saved(real, ratio=12.0)
        yield "mobilenet_v2 factors", saved(real, methods.QSPCA(rank=64, latent_bits=4))


METHODS: dict[str, tuple[dict[str, Any], ...]] = {
    "qspca": (
        {"rank": 8, "latent_bits": 4, "sparsity": 0.3, "tile": 16},
        {"rank": 256, "latent_bits": 5},
        {
            "rank": 8,
            "latent_bits": 6,
            "tile": 32,
            "latent_scales": "column",
            "clip": "minmax",
            "center": False,
        },
    ),
    "scalar": ({"bits": 4}, {"bits": 3, "clip": "minmax"}),
    "second_order": ({"bits": 3}, {"step": 0.02}, {"step": 0.02, "tile": 9}, {"step": 0.02, "trellis": 8}),
    "vq": ({"codewords": 16, "iterations": 3},),
    "bgd": ({"codewords": 16, "iterations": 3, "regime": "large"},),
    "pqf": ({"codewords": 9, "iterations": 3},),
    "aq": ({"codebooks": 2, "codewords": 8, "iterations": 2},),
    "keep": ({}, {"dtype": "bfloat16"}),
    "lsq": ({"bits": 1}, {"bits": 4, "channels": False}),
    "ttq": ({}, {"threshold": 0.3, "channels": True}),
    "abcnet": ({"bases": 4, "channels": True},),
    "prune": ({"sparsity": 0.6, "bits": 3},),
    "rdoq": ({"step": 0.3}, {"qp": -20}),
    "svd": ({"rank": 4}, {"share": 0.5, "bits": 16}),
    "spatial_svd": ({"rank": 4},),
}


def _main() -> Callable[[list[str]], None]:
    for home in ("factorpack.commands", "factorpack.cli"):
        try:
            program = importlib.import_module(home).main
        except ImportError:
            continue

        def run(words: list[str], program: Callable[[], None] = program) -> None:
            sys.argv = ["factorpack", *words]
            try:
                program()
            except SystemExit as ended:
                if ended.code:
                    raise RuntimeError(f"factorpack {words} ended with {ended.code}") from ended

        return run
    raise ImportError("this factorpack has no command line")


def _fits(fp: Any, net: nn.Module) -> bool:
    try:
        fp.plan(net, recipe="resnet")
    except fp.PlanError:
        return False
    return True


def _trained(fp: Any, net: nn.Module, path: Path) -> None:
    labels = [torch.randint(10, (16,), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    packed = fp.compress(net, fp.Scalar(4), progress=False)
    schedule = fp.Schedule(epochs=2, rate=0.01)
    fp.finetune(
        packed, made(ConvNet), list(zip(IMAGES, labels, strict=True)), schedule=schedule, progress=False
    )
    fp.save(packed, path)


def make(folder: Path) -> None:
    """What one source tree's process does."""
    torch.set_num_threads(1)
    out = folder / "files"
    out.mkdir()
    for name, write in cases(folder):
        path = out / name
        write(path)
        print(json.dumps([name, hashlib.sha256(path.read_bytes()).hexdigest()]), file=sys.stderr, flush=True)


def hashes(tree: Path) -> dict[str, str]:
    """Every file's hash, as made with the factorpack of a source tree."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), os.getcwd()])}
        command = [sys.executable, "-m", "tools.same_bytes", "--make", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{tree}:\n{done.stderr[-4000:]}")
        lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('["')]
        return dict(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "trees", nargs="*", type=Path, help="two source trees, each the parent of factorpack/"
    )
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make is not None:
        make(arguments.make)
        return
    old, new = (hashes(tree.resolve()) for tree in arguments.trees)
    differing = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    for name in differing:
        print(f"differs: {name}")
    print(f"{len(old)} files, {len(differing)} differ")
    raise SystemExit(bool(differing))


if __name__ == "__main__":
    main()
