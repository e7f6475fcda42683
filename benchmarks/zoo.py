"""ResNet18 and MobileNetV2 whose state dicts are torchvision's, name by name."""

from __future__ import annotations

from torch import Tensor, nn

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


def resnet18(num_classes: int = 1000, small_input: bool = False) -> nn.Module:
    """ResNet18; `small_input` takes 32 x 32 images: a 3 x 3 stem of stride 1 and no max-pool."""
    return _initialised(ResNet18(num_classes, small_input))


def mobilenet_v2(num_classes: int = 1000, small_input: bool = False) -> nn.Module:
    """MobileNetV2; `small_input` takes 32 x 32 images: the first two strides of 2 become 1."""
    return _initialised(MobileNetV2(num_classes, small_input))


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
