"""Other methods on the same model at the same size, measured on real files."""

from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

import factorpack as fp
from factorpack.digits import accuracy, digits, train_net

METHODS = ["planned", "second_order", "rdoq", "svd", "scalar"]


def main(folder: Path) -> None:
    train, test = digits()
    model = train_net(train, epochs=5)

    def evaluate(restored: nn.Module) -> dict[str, float]:
        return {"top1": accuracy(restored.eval(), test)}

    points = fp.compare(model, [16], folder, methods=METHODS, calibration=[train[0][:256]], evaluate=evaluate)
    print(f"FP32: {accuracy(model, test):.3f}")
    for point in sorted(points, key=lambda point: -point.measured.get("top1", 0.0)):
        if point.file is None:
            print(f"{point.method}: makes no file that small; {point.settings}")
        else:
            score = point.measured["top1"]
            print(f"{point.method}: {score:.3f} at {point.file_ratio:.1f} times smaller, {point.settings}")


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        main(Path(name))
