"""Compress a checkpoint on disk to a number of bytes, from its weights alone."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import factorpack as fp
from factorpack.digits import accuracy, digits, net, train_net

BYTES = 100_000


def main(folder: Path) -> None:
    train, test = digits()
    model = train_net(train, epochs=5)
    torch.save(model.state_dict(), folder / "digits.pt")

    packed = fp.compress(folder / "digits.pt", max_bytes=BYTES)
    fp.save(packed, folder / "digits.packed.safetensors")

    packed = fp.load(folder / "digits.packed.safetensors")
    size = packed.size()
    print(f"{size.file_bytes:,} of {BYTES:,} bytes, {size.file_ratio:.1f} times smaller than FP32")
    print(f"accuracy {accuracy(model, test):.3f} -> {accuracy(packed.load_into(net()).eval(), test):.3f}")

    for line in sorted(size.tensors, key=lambda line: -line.bytes)[:3]:
        print(f"  {line.name} {line.shape}: {line.bytes:,} bytes, {line.words}")

    try:  # the error of an impossible budget names the smallest possible one
        fp.compress(folder / "digits.pt", max_bytes=2_000)
    except fp.PlanError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        main(Path(name))
