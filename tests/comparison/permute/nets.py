"""Small nets of every kind of tie, and random ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.helpers import seeded


class Residual(nn.Module):
    """Convolutions with and without bias, a depthwise one, a residual, a norm, and a flattened image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(8, 12, 1, bias=False)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.outer = nn.Conv2d(12, 8, 1)
        self.hidden = nn.Linear(8 * 2 * 2, 10)
        self.head = nn.Linear(10, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(images)))
        x = x + self.outer(nn.functional.relu6(self.depthwise(self.inner(x))))
        x = nn.functional.max_pool2d(x, 2).flatten(1)
        logits: Tensor = self.head(torch.nn.functional.gelu(self.hidden(x)))
        return logits


class Block(nn.Module):
    """One step of a random net: (n, channels, 4, 4) to the same."""

    def __init__(self, body: nn.Module, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        return self.combine(x, self.body(x))


def _first(channels: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: torch.cat([x, y], 1)[:, :channels]


class Half(nn.Module):
    """The first half of the channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : x.shape[1] // 2]


class Weave(nn.Module):
    """The channels dealt into two hands, by reshapes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


class Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, 3, 1), nn.Conv2d(3, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.excite(nn.functional.silu(self.squeeze(x.mean((2, 3), keepdim=True))))
        return gate.sigmoid()


class Tokens(nn.Module):
    """A linear layer over channels that are put last and back."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.linear(self.norm(x.flatten(2).transpose(1, 2)))
        answer: Tensor = tokens.transpose(1, 2).unflatten(2, (4, 4))
        return answer


BLOCKS: dict[str, Callable[[int], nn.Module]] = {
    "plain": lambda c: Block(nn.Conv2d(c, c, 3, padding=1), lambda _, y: y),
    "residual": lambda c: Block(nn.Conv2d(c, c, 1, bias=False), torch.add),
    "norm": lambda c: nn.Sequential(nn.BatchNorm2d(c), nn.PReLU(c), nn.Hardswish(inplace=True)),
    "group norm": lambda c: nn.GroupNorm(2, c),
    "one group norm": lambda c: nn.GroupNorm(1, c),
    "depthwise": lambda c: nn.Conv2d(c, c, 3, padding=1, groups=c),
    "multiplied": lambda c: nn.Sequential(
        nn.Conv2d(c, 2 * c, 3, padding=1, groups=c), nn.Conv2d(2 * c, c, 1)
    ),
    "grouped": lambda c: nn.Conv2d(c, c, 3, padding=1, groups=2),
    "gate": lambda c: Block(Gate(c), torch.mul),
    "tokens": lambda c: Block(Tokens(c), torch.add),
    "concatenated": lambda c: Block(nn.Conv2d(c, c, 1), _first(c)),
    "shuffled": lambda _: nn.ChannelShuffle(2),
    "woven": lambda _: Weave(),
    "halved": lambda c: nn.Sequential(nn.Conv2d(c, 2 * c, 1), Half()),
    "bottleneck": lambda c: nn.Sequential(
        nn.Conv2d(c, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, c, 1)
    ),
}


def random_net(names: list[str], channels: int = 8) -> nn.Module:
    """A stem, some blocks by name, and two linear layers over the flattened image."""
    torch.manual_seed(0)
    blocks = [BLOCKS[name](channels) for name in names]
    head = (nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10), nn.Tanh(), nn.Linear(10, 3))
    return eventful(nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *blocks, *head))


def eventful(model: nn.Module) -> nn.Module:
    """In float64, and every number of the state dict one of its own: nothing is equal by chance."""
    model.double().eval()
    for number, value in enumerate(model.state_dict().values()):
        if value.is_floating_point():
            noise = seeded(*value.shape, dtype=torch.float64, seed=number)
            value.add_(0.2 * noise.abs() if value.dim() == 1 else 0.2 * noise)
    return model
