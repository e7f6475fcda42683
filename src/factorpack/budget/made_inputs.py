"""Synthetic inputs of a run: made once, and found again where the run was killed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from factorpack.batches import device_of
from factorpack.budget.journal import Finished, open_journal
from factorpack.budget.planner import BudgetRequest
from factorpack.budget.tensors import Tensors
from factorpack.calibration.synthetic import Synthetic, make_batches

_NAME = "synthetic"


def find_inputs(request: BudgetRequest, tensors: Tensors, settings: Synthetic) -> list[Any]:
    """Batches for a request's model. A GPU would not make the same twice, so a run keeps them in its journal."""
    assert request.model is not None
    with open_journal(request.parts, tensors, request.planner, None) as journal:
        journal = journal.after(settings)
        kept = journal.find(_NAME)
        if kept is not None:
            return _read(kept, request.model)
        batches = make_batches(request.model, settings, request.planner.samples, request.progress)
        journal.keep(_NAME, _finish(batches))
        return batches


def _finish(batches: list[Any]) -> Finished:
    """Tensors, each as its batch's number, or dictionaries, as number and name."""
    named = [batch if isinstance(batch, dict) else {"": batch} for batch in batches]
    keys = list(named[0])
    return Finished(
        {"keys": keys, "batches": len(named)},
        {f"{number} {key}": batch[key] for number, batch in enumerate(named) for key in keys},
    )


def _read(kept: Finished, model: Any) -> list[Any]:
    device = device_of(model)

    def batch(number: int) -> dict[str, Tensor]:
        return {key: kept.tensors[f"{number} {key}"].to(device) for key in kept.document["keys"]}

    found = [batch(number) for number in range(kept.document["batches"])]
    return [each.get("", each) for each in found]
