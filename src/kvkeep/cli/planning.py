"""The inputs of predictions: the shape of a model, and the rates of a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.cli.output import note
from kvkeep.cli.startup import fetch_model

if TYPE_CHECKING:
    from kvkeep.plan.machine import Machine
    from kvkeep.plan.shape import Shape


def shape_and_rates(
    model: str, machine: str | None, weights: str = "auto", device: str = "cpu"
) -> tuple[Shape, Machine]:
    """Return the shape of ``model``, without loading its weights, and the rates in the file ``machine``. Without a
    file, the rates are those of ``device`` on this machine, measured or estimated."""
    from kvkeep.models.loading import describe
    from kvkeep.plan.machine import Machine
    from kvkeep.plan.rates import machine_here
    from kvkeep.plan.shape import shape_of

    given = Machine.load(machine) if machine is not None else None
    place = device if given is None else given.device
    fetch_model(model)
    described = describe(model, weights=weights, device=place, progress=note)
    shape = shape_of(described.config, described.dtype.itemsize, described.weights.nbytes)
    return shape, given or machine_here(place, described.dtype)
