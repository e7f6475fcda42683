"""Fine-tune in the packed form down to a size. The job is killed halfway, and resumes where it was."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import factorpack as fp
from factorpack.digits import accuracy, digits

RATIO = 40


def net() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 10))


def prepare(folder: Path) -> None:
    (images, labels), _ = digits()
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(60):
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    packed = fp.compress(model, ratio=RATIO / 2, calibration=[images[:128]])  # training halves it again
    fp.save(packed, folder / "start.safetensors")


def tune(folder: Path) -> None:
    """What the job runs: the same call the first time and after it was killed."""
    (train, test), state = digits(), folder / "state"
    packed, verb = fp.load(folder / "start.safetensors"), "resumes" if state.exists() else "starts"
    print(f"{verb}: {packed.size().file_ratio:.1f} times smaller", flush=True)
    batches = DataLoader(TensorDataset(*train), batch_size=64, shuffle=True)
    schedule = fp.Schedule(epochs=3, learning_rate=3e-3, target_ratio=RATIO, shrink_by="training")
    fp.finetune(packed, net(), batches, schedule=schedule, checkpoint=state, checkpoint_every=20)
    fp.save(packed, folder / "tuned.safetensors")
    score, ratio = accuracy(packed.load_into(net()), test), packed.size().file_ratio
    print(f"trained: {ratio:.1f} times smaller, accuracy {score:.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(tune(Path(sys.argv[1])))
    with TemporaryDirectory() as name:
        prepare(Path(name))
        job = subprocess.Popen([sys.executable, __file__, name])
        while not (Path(name) / "state").exists() and job.poll() is None:
            time.sleep(0.05)
        job.kill()
        print("killed" if job.wait() == -signal.SIGKILL else "it ended before it was killed", flush=True)
        subprocess.run(job.args, check=True)
