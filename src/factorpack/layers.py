"""Low-rank factors as two ordinary layers, which hold and compute less than the one they stand for."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import skip_init

from factorpack.errors import PlanError
from factorpack.quantize.uniform import from_codes
from factorpack.record import Encoded

_STILL = {"kernel_size": (1, 1), "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
"""A convolution that looks at one position alone."""


def as_two_layers(module: nn.Module, encoded: Encoded) -> nn.Sequential:
    """Two layers that answer as `module`, a Linear or Conv2d, does with the weight that `encoded` decodes to.

    What `SVD` makes of a convolution becomes one of its filters with as many outputs as the rank, then one
    of 1x1 filters; what `SpatialSVD` makes becomes one of h x 1 filters, then one of 1 x w filters, which
    share stride, padding and dilation between them. The bias is the second layer's.

    >>> encoded = SVD(rank=4).encode(model.conv.weight)  # doctest: +SKIP
    >>> model.conv = as_two_layers(model.conv, encoded)  # doctest: +SKIP
    """
    if not isinstance(module, nn.Linear | nn.Conv2d):
        raise PlanError(f"a {type(module).__name__} cannot become two layers, a Linear or Conv2d can")
    if isinstance(module, nn.Conv2d) and module.groups != 1:
        raise PlanError(f"a convolution of {module.groups} groups cannot become two layers, one of 1 can")
    if tuple(module.weight.shape) != encoded.shape:
        raise PlanError(f"the layer's weight is {tuple(module.weight.shape)}, the factors' {encoded.shape}")
    codebook, latent = _factors(encoded)
    rank = len(latent)
    first, second = (
        _two_linear(module, rank)
        if isinstance(module, nn.Linear)
        else _two_convolutions(module, rank, encoded.kind == "spatial")
    )
    by_output = latent.reshape(rank, encoded.shape[0], -1).transpose(0, 1)  # (out, rank, 1 or w)
    first.weight.data.copy_(codebook.T.reshape(first.weight.shape))
    second.weight.data.copy_(by_output.reshape(second.weight.shape))
    if module.bias is not None and second.bias is not None:
        second.bias.data.copy_(module.bias.data)
    return nn.Sequential(first, second).train(module.training)


def _factors(encoded: Encoded) -> tuple[Tensor, Tensor]:
    """(in*h*w, k) and (k, out), or of a spatial SVD (in*h, k) and (k, out*w)."""
    parts = encoded.parts
    whole = encoded.kind == "factors" and len(parts["codebook"]) * encoded.shape[0] == encoded.numel
    if encoded.kind != "spatial" and (not whole or "mean" in parts):
        raise PlanError(
            f"a weight stored as {encoded.kind!r} in other pieces than whole filters cannot become two "
            "layers: expected what SVD or SpatialSVD makes"
        )
    codebook = from_codes(parts["codebook"], parts["codebook_scale"])
    return codebook, from_codes(parts["latent"], parts["latent_scale"])


def _two_linear(module: nn.Linear, rank: int) -> tuple[nn.Linear, nn.Linear]:
    place = _place(module)
    first = skip_init(nn.Linear, module.in_features, rank, bias=False, **place)
    return first, skip_init(nn.Linear, rank, module.out_features, bias=module.bias is not None, **place)


def _two_convolutions(module: nn.Conv2d, rank: int, spatial: bool) -> tuple[nn.Conv2d, nn.Conv2d]:
    """The first moves as the filter does and the second not at all, or of a spatial SVD each in its direction."""
    first: dict[str, Any] = {name: getattr(module, name) for name in _STILL}
    second: dict[str, Any] = dict(_STILL)
    if spatial:
        # "same" and "valid" mean what they say in each direction.
        pairs = {name: pair for name, pair in first.items() if not isinstance(pair, str)}
        second = first | {name: (_STILL[name][0], pair[1]) for name, pair in pairs.items()}
        first = first | {name: (pair[0], _STILL[name][1]) for name, pair in pairs.items()}
    common = {"padding_mode": module.padding_mode, **_place(module)}
    bias = module.bias is not None
    return (
        skip_init(nn.Conv2d, module.in_channels, rank, bias=False, **first, **common),
        skip_init(nn.Conv2d, rank, module.out_channels, bias=bias, **second, **common),
    )


def _place(module: nn.Linear | nn.Conv2d) -> dict[str, Any]:
    return {"device": module.weight.device, "dtype": module.weight.dtype}
