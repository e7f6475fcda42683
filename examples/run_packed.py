"""Run a packed model without dense weights: memory against time, layer by layer."""

import time

import torch
from torch import Tensor, nn

import factorpack as fp
from factorpack.runtime.apply import resident_bytes


def net() -> nn.Sequential:
    """Layers wide enough for codes in memory to make a difference."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


def milliseconds(model: nn.Module, batch: Tensor) -> float:
    def once() -> float:
        started = time.perf_counter()
        model(batch)
        return 1e3 * (time.perf_counter() - started)

    with torch.inference_mode():
        return min(once() for _ in range(5))


def main() -> None:
    model, batch = net().eval(), torch.randn(16, 512)
    packed = fp.compress(model, fp.QSPCA(rank=32, latent_bits=4))
    print(f"FP32: {resident_bytes(model):,} bytes, {milliseconds(model, batch):.1f} ms")
    outputs = {}
    for mode in ("dense", "packed", "factored", "auto"):
        applied = packed.apply(net().eval(), mode, example=batch)
        with torch.inference_mode():
            outputs[mode] = applied.model(batch)
        print(f"{mode}: {applied.resident_bytes:,} bytes, {milliseconds(applied.model, batch):.1f} ms")
    print(applied)  # what "auto" measured and chose for each layer
    largest = max(float((outputs[mode] - outputs["dense"]).abs().max()) for mode in outputs)
    print(f"largest difference from the dense outputs: {largest:.1e}")


if __name__ == "__main__":
    main()
