"""``static``: memory for all entries is allocated once (kv-caching-tutorial, section 13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.memory.shared_rows import SharedRows
from kvkeep.policies.selectors.nobody import Nobody
from kvkeep.stores.dynamic import DynamicLayer


@dataclass(frozen=True)
class Preallocated(Nobody):
    """All entries stay, in memory for the entries of the budget."""

    budgeted: ClassVar[bool] = True

    def layer(self, entries: int | None, pieces: bool) -> DynamicLayer:
        assert entries is not None
        return PreallocatedLayer(entries)


class PreallocatedLayer(DynamicLayer):
    """A layer whose first entries allocate the memory for ``limit``, which never grows."""

    lends = False

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self._keys, self._values = (SharedRows(limit) for _ in range(2))

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take new entries, (batch, kv_heads, new, dim). Raises UsageError where there is no room."""
        self._check(self._keys.length + key_states.shape[-2])
        super().append(key_states, value_states)

    def adopt(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._check(sum(piece.shape[-2] for piece in keys))
        super().adopt(keys, values)

    def get_max_length(self) -> int:
        return self.limit

    def _check(self, needed: int) -> None:
        if needed > self.limit:
            raise UsageError(
                f"The static cache holds {self.limit} entries, but {needed} are needed; give it a larger budget, or "
                "use method 'full', which grows."
            )
