"""What a fate is: parameters, a promise, and how to set it to work in a cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.policies.request import Exactness, LiveFate, Request
from kvkeep.policies.selectors.base import Selector
from kvkeep.stores.checkpoints import Checkpoint, CheckpointSpec
from kvkeep.stores.groups import GROUP
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.meter import Meter
from kvkeep.stores.selected import SelectedLayer


@dataclass(frozen=True)
class Fate(ABC):
    """What becomes of entries that leave. One file for each: a frozen dataclass whose fields are its parameters."""

    label: ClassVar[str]
    recall: ClassVar[str]
    exactness: ClassVar[Exactness]
    options: ClassVar[tuple[str, ...]] = ()  # of the cache, that it has a use for
    records: ClassVar[bool] = False  # whether ids and positions of all tokens are needed
    layers: ClassVar[type[SelectedLayer]] = SelectedLayer  # what its entries leave from

    def check(self, name: str, selector: Selector) -> None:
        """Raise UsageError where it cannot be the fate of what ``selector`` lets go."""
        return

    def resident(self, geometry: ModelGeometry, entries: int) -> int:
        """Return how many of the budget's ``entries`` are for resident ones."""
        return entries

    @abstractmethod
    def build(self, request: Request, ledger: Ledger, meter: Meter) -> LiveFate:
        """Set it to work for one cache."""

    def checkpoint(self, live: LiveFate) -> tuple[CheckpointSpec | None, Checkpoint | None]:
        """Return the checkpoint behind it, if there is one."""
        return None, None


def exact_entries(exact: float, entries: int) -> int:
    """Return how many of a budget's ``entries`` stay as they are: a share of them, or (from 1 on) a number, of which
    half the budget is allowed."""
    if exact <= 0:
        raise UsageError(f"Some entries stay exact: a share of the budget, or their number, not {exact:g}.")
    return min(int(exact), entries // 2) if exact >= 1 else int(entries * exact)


def rooms(request: Request, fate: Fate, size: Callable[[LayerGeometry], int]) -> dict[int, int]:
    """Return how many groups of ``size`` bytes each layer has room for, beside its exact entries and the group that
    waits. Raises BudgetError where there is none."""
    return {layer.index: room // size(layer) for layer, room in spare(request, fate, size)}


def spare(
    request: Request, fate: Fate, size: Callable[[LayerGeometry], int], width: int | None = None
) -> Iterator[tuple[LayerGeometry, int]]:
    """Yield each full layer and the bytes of a KV head that its exact entries and the group that waits leave over;
    what waits has numbers of ``width`` bytes (None: the model's own). Raises BudgetError where these are no group of
    ``size`` bytes."""
    geometry = request.geometry
    entries, _ = request.bounded(fate.label)
    for layer in geometry.full_layers:
        numbers = layer.key_dim + layer.value_dim

        def room(entries: int, numbers: int = numbers) -> int:
            exact = (entries - fate.resident(geometry, entries)) * geometry.dtype_bytes
            return numbers * (exact - GROUP * (width or geometry.dtype_bytes))

        if room(entries) < size(layer):
            least = next(n for n in count(entries + 1) if room(n) >= size(layer))
            raise BudgetError(
                f"A budget of {entries} entries has no room for {GROUP} that are {fate.label} beside the exact ones; "
                f"give it at least {least}."
            )
        yield layer, room(entries)
