"""Batches of texts joined into larger ones where a pass through fewer of them is faster."""

from __future__ import annotations

from torch import Tensor, nn

from factorpack.batches import device_of
from factorpack.calibration.calibrate import Calibration
from factorpack.passes.resident import resident_of
from factorpack.solve.moments import has_moments

PREDICTED_TOKENS = 1 << 14
"""Tokens of a batch that keep a GPU busy, and whose predictions fit into its memory."""
INSIDE_BYTES, INSIDE = 1 << 31, 8
"""Activations inside a network that a batch may have on a GPU, and how many times as large they are as the widest
input of a layer: a gated block has four of its width, the sums of moments as many."""

ACTIVATION_BYTES = 3 << 30
"""What layers get and return for a batch that is joined of several."""


def join_for_predictions(calibration: Calibration, model: nn.Module) -> Calibration:
    """For passes that may go on to the predictions, which are often larger than all activations before them."""
    return calibration.merged(PREDICTED_TOKENS) if _pays(model) else calibration


def join_inside(calibration: Calibration, model: nn.Module) -> Calibration:
    """For passes that stop before the predictions."""
    if resident_of(model) is not None:  # its memory is planned for batches of the usual size
        return join_for_predictions(calibration, model)
    return calibration.merged(_tokens_inside(calibration, model)) if _pays(model) else calibration


def tokens_kept(calibration: Calibration, model: nn.Module) -> int:
    """Tokens that batches are joined up to where what every layer gets and returns is kept, or several logits of each
    token: in a pass whose gradients are wanted, and where weights are tried. None where it does not pay."""
    if not _pays(model):
        return 0
    layers = [model.get_submodule(name) for name in calibration.order]
    values = sum(sum(_sides_of(layer)) for layer in layers if isinstance(layer, nn.Linear))
    return min(PREDICTED_TOKENS, ACTIVATION_BYTES // (4 * max(values, 1)))


def _pays(model: nn.Module) -> bool:
    """A GPU is done with a small batch before it is asked for the next; on a CPU nothing is gained."""
    return device_of(model).type != "cpu"


def _tokens_inside(calibration: Calibration, model: nn.Module) -> int:
    layers = [model.get_submodule(name) for name in calibration.order]
    widest = max((_inputs_of(layer) for layer in layers if has_moments(layer)), default=1)
    return max(PREDICTED_TOKENS, INSIDE_BYTES // (4 * INSIDE * widest))


def _inputs_of(layer: nn.Module) -> int:
    return _sides_of(layer)[1]


def _sides_of(layer: nn.Module) -> tuple[int, int]:
    """How many values a layer returns and gets, at a position."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return len(weight), weight[0].numel()
