"""Inputs optimised from noise until each batch norm sees the mean and the variance that it has stored.

The statistics that a norm has stored are those of the training data, as every layer saw them: the variance of
channel i is w_i' S w_i, where S is the second moment of the layer's inputs. (Cai et al., ZeroQ, 2020; Yin et
al., DeepInversion, 2020.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from factorpack.batches import device_of, forward, hooked, run
from factorpack.errors import PlanError, SourceError
from factorpack.progress import Progress, Showing
from factorpack.solve.moments import CONVOLUTIONS, NORMS

MAKING_INPUTS = "making inputs"
PHOTOGRAPH, SHRINKS_PHOTOGRAPHS = 224, 16
"""Side of an image for a network that makes maps by so much smaller than images."""
PROBED_SIDE, LAST_PLACES = 64, 4
"""Side of the image that shows it, and of the last map for any other network: 32 for one that shrinks by 8."""
AT_ONCE, ON_A_CPU = 128, 64
"""Inputs whose statistics are matched together: more are better, and take as much more memory."""
RATE, LAST_SHARE = 0.1, 0.1
"""Learning rate of the first step, in standard deviations of the noise, and the last step's share of it."""
FALL = 1.2
"""Amplitudes of the noise fall with this power of the frequency, a little faster than those of photographs."""
AGREEMENT = 0.85
"""Correlation of the noise in two channels of an image."""
LARGEST_SHIFT = 1 / 8
"""Each step sees the images moved by up to this share of their side, and half of the time mirrored."""
SCALED = 8
"""Inputs that the standard deviation to start with is chosen on."""
SCALES = tuple(2.0**power for power in range(-4, 10))
"""Standard deviations that inputs may start with: some networks take values up to 255."""


def norms_of(model: nn.Module) -> dict[str, NORMS]:
    """Batch norms that have stored statistics."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, NORMS) and module.running_mean is not None and module.running_var is not None
    }


def input_shape(model: nn.Module, norms: Mapping[str, NORMS], side: int | None) -> tuple[int, ...]:
    """Shape of one input: channels and sides for a convolutional network, a vector for any other."""
    convolutions = [module for module in model.modules() if isinstance(module, CONVOLUTIONS)]
    if convolutions:
        # The one that reads images has the fewest channels: definitions need not be in the order of execution.
        first = min(convolutions, key=lambda module: module.in_channels)
        probe = (first.in_channels, *[PROBED_SIDE] * len(first.kernel_size))
        side = side or _guess_side(model, norms, probe)
        return (first.in_channels, *[side] * len(first.kernel_size))
    linear = next((module for module in model.modules() if isinstance(module, nn.Linear)), None)
    if linear is None:
        raise PlanError(
            f"a {type(model).__name__} has neither a convolution nor a linear layer, so the shape of its inputs "
            "is unknown: give calibration data"
        )
    return (linear.in_features,)


def _guess_side(model: nn.Module, norms: Mapping[str, NORMS], probe: Sequence[int]) -> int:
    """224 for a network that shrinks images as those for photographs do, and four last places for any other."""
    narrowest = PROBED_SIDE

    def measure(_norm: NORMS, arguments: Sequence[Any]) -> None:
        nonlocal narrowest
        narrowest = min(narrowest, *arguments[0].shape[2:], PROBED_SIDE)

    inputs = torch.zeros(1, *probe, device=device_of(model), dtype=next(model.parameters()).dtype)
    # A head that takes one size fails after the norms have run.
    with hooked(model, dict.fromkeys(norms, measure)), suppress(SourceError):
        run(model, inputs)
    shrinks = PROBED_SIDE // max(narrowest, 1)
    return PHOTOGRAPH if shrinks >= SHRINKS_PHOTOGRAPHS else LAST_PLACES * shrinks


def make_matched_inputs(
    model: nn.Module,
    norms: Mapping[str, NORMS],
    shape: Sequence[int],
    samples: int,
    steps: int,
    seed: int,
    progress: Showing,
) -> list[Tensor]:
    """Batches of inputs of a shape, on the model's device, each matched as a whole."""
    generator = torch.Generator().manual_seed(seed)
    device, batches = device_of(model), []
    with (
        Progress(MAKING_INPUTS, samples * steps, progress) as bar,
        torch.inference_mode(False),
        _measuring(model, norms) as mismatch,
    ):
        scale = _find_scale(mismatch, draw_noise(SCALED, shape, generator).to(device))
        at_once = ON_A_CPU if device.type == "cpu" else AT_ONCE
        for start in range(0, samples, at_once):
            noise = draw_noise(min(at_once, samples - start), shape, generator)
            inputs = (scale * noise).to(device)
            for _ in _optimise(inputs, scale * RATE, mismatch, steps, generator):
                bar.advance("", len(inputs))
            batches.append(inputs)
    return batches


def draw_noise(count: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Images (count, *shape) of standard deviation one: low frequencies are strong, and channels agree.

    Vectors are white noise.
    """
    white = torch.randn(count, *shape, generator=generator)
    if len(shape) == 1:
        return white
    dims = tuple(range(2, white.dim()))
    spectrum = torch.fft.rfftn(white, dim=dims) * _amplitudes(shape[1:])
    images: Tensor = torch.fft.irfftn(spectrum, s=tuple(shape[1:]), dim=dims)
    return (_mixing(shape[0]) @ images.flatten(2)).view_as(images)


def _amplitudes(sides: Sequence[int]) -> Tensor:
    """A gain per frequency, in the order of `rfftn`, whose mean square over all frequencies is one."""

    def gains(last: Callable[[int], Tensor]) -> Tensor:
        axes = [torch.fft.fftfreq(side) for side in sides[:-1]] + [last(sides[-1])]
        squares = sum(each.square() for each in torch.meshgrid(*axes, indexing="ij"))
        assert isinstance(squares, Tensor)
        return squares.clamp_min(1 / max(sides) ** 2).pow(-FALL / 2)

    return gains(torch.fft.rfftfreq) / gains(torch.fft.fftfreq).square().mean().sqrt()


def _mixing(channels: int) -> Tensor:
    """The symmetric matrix that gives white channels a correlation of AGREEMENT."""
    own = sqrt(1 - AGREEMENT)
    common = (sqrt(1 - AGREEMENT + channels * AGREEMENT) - own) / channels
    return own * torch.eye(channels) + common


Mismatch = Callable[[Tensor], Tensor]
"""How far the statistics of a batch of inputs are from the stored ones."""


@contextmanager
def _measuring(model: nn.Module, norms: Mapping[str, NORMS]) -> Iterator[Mismatch]:
    """Measures the mismatch of inputs inside the block, by hooks that are removed after it."""
    found: list[Tensor] = []

    def measure(norm: NORMS, arguments: Sequence[Any]) -> None:
        found.append(divergence_from_stored(norm, arguments[0]))

    dtype = next(model.parameters()).dtype

    def mismatch(inputs: Tensor) -> Tensor:
        found.clear()
        try:
            forward(model, inputs.to(dtype))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise SourceError(
                f"the model fails on synthetic inputs of shape {tuple(inputs.shape)}, made for its batch norms: "
                f"give the image size it takes, or calibration data ({error})"
            ) from error
        if not found:
            raise SourceError(
                "no batch norm of the model runs, so no inputs can be made: give calibration data"
            )
        return torch.stack(found).mean()

    with hooked(model, dict.fromkeys(norms, measure)):
        yield mismatch


def divergence_from_stored(norm: NORMS, inputs: Tensor) -> Tensor:
    """Mean over channels of KL(batch | stored), both taken as Gaussians with their mean and variance.

    (v / V + (m - M)^2 / V - 1 - ln(v / V)) / 2: no unit, so norms add up as they are.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    dims = [0, *range(2, inputs.dim())]
    variance, mean = torch.var_mean(inputs.float(), dims, correction=0)
    stored = norm.running_var.float() + norm.eps  # channels that are never on have hardly any variance
    ratio = (variance + norm.eps) / stored
    shift = (mean - norm.running_mean.float()).square() / stored
    return 0.5 * (ratio + shift - 1 - ratio.log()).mean()


def _find_scale(mismatch: Mismatch, noise: Tensor) -> float:
    """The standard deviation of noise whose statistics are closest to the stored ones."""
    with torch.no_grad():
        found = torch.stack([mismatch(scale * noise) for scale in SCALES])
    return SCALES[int(found.nan_to_num(torch.inf).argmin())]


def _optimise(
    inputs: Tensor, rate: float, mismatch: Mismatch, steps: int, generator: torch.Generator
) -> Iterator[None]:
    """Moves inputs, in place, so that their statistics match; the caller goes on after each step."""
    optimiser = torch.optim.Adam([inputs], rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1), LAST_SHARE * rate)
    for _ in range(steps):
        with torch.enable_grad():
            inputs.requires_grad_()
            loss = mismatch(_moved(inputs, generator))
            (inputs.grad,) = torch.autograd.grad(loss, inputs)
        optimiser.step()
        schedule.step()
        inputs.requires_grad_(False)
        yield


def _moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images shifted by a random number of places, around the edges, and mirrored half of the time."""
    dims = tuple(range(2, images.dim()))
    if not dims:
        return images
    reach = [int(LARGEST_SHIFT * images.shape[dim]) for dim in dims]
    shifts = [int(torch.randint(-each, each + 1, (), generator=generator)) for each in reach]
    mirrored = bool(torch.rand((), generator=generator) < 0.5)
    images = torch.roll(images, shifts, dims)
    return images.flip(-1) if mirrored else images
