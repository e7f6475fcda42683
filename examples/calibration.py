"""What a few unlabelled inputs are worth: the same size planned from the weights alone, and with inputs."""

from pathlib import Path
from tempfile import TemporaryDirectory

import factorpack as fp
from factorpack.digits import accuracy, digits, net, train_net

RATIO = 70


def main(folder: Path) -> None:
    train, test = digits()
    model = train_net(train, epochs=5)
    inputs = train[0][:256].split(64)  # no labels

    print(f"FP32: {accuracy(model, test):.3f}")
    for name, batches in {"weights alone": None, "256 inputs": inputs}.items():
        packed = fp.compress(model, ratio=RATIO, calibration=batches)
        fp.save(packed, folder / "digits.packed.safetensors")
        score = accuracy(packed.load_into(net()).eval(), test)
        print(f"{name}: {packed.size().file_ratio:.1f} times smaller, accuracy {score:.3f}")

    # Planning measured what other sizes would cost each weight.
    curve = packed.curves["9.weight"]
    print("bytes of 9.weight:", ", ".join(f"{each:,.0f}" for each in curve.bytes))
    print("nats they cost:   ", ", ".join(f"{each:.4f}" for each in curve.losses))


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        main(Path(name))
