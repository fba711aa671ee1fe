"""What fates have in common that keep entries in a smaller form, within what the budget's exact entries leave over."""

from __future__ import annotations

from itertools import count

from kvkeep.contracts import Fate
from kvkeep.errors import BudgetError, UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.stores.groups import GROUP


def exact_entries(exact: float, entries: int) -> int:
    """Return how many of a budget's ``entries`` stay as they are: a share of them, or (from 1 on) a number, of which
    half the budget is allowed."""
    if exact <= 0:
        raise UsageError(f"Some entries stay exact: a share of the budget, or their number, not {exact:g}.")
    return min(int(exact), entries // 2) if exact >= 1 else int(entries * exact)


def spare(
    fate: Fate, layer: LayerGeometry, geometry: ModelGeometry, entries: int, size: int, width: int | None = None
) -> int:
    """Return the bytes of a KV head that its exact entries and the group that waits leave over, within ``entries``;
    what waits has numbers of ``width`` bytes (None: the model's own). Raises BudgetError where these are no group of
    ``size`` bytes."""
    numbers, number = layer.key_dim + layer.value_dim, geometry.dtype_bytes

    def room(entries: int) -> int:
        return numbers * ((entries - fate.resident(entries)) * number - GROUP * (width or number))

    if room(entries) < size:
        least = next(n for n in count(entries + 1) if room(n) >= size)
        raise BudgetError(
            f"A budget of {entries} entries has no room for {GROUP} that are {fate.label} beside the exact ones; "
            f"give it at least {least}."
        )
    return room(entries)
