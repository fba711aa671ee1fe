"""Bounds on scores: the minimum and maximum of every key channel, for pages of slots.

For any query q and any key k of a page, q·k = sum_i q_i k_i <= sum_i max(q_i min_i, q_i max_i), and that is
q⁺·max + q⁻·min with q⁺ = max(q, 0) and q⁻ = min(q, 0): two small products bound every score of a page without its keys.
The bound holds for real numbers; in floating point it holds up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.memory.extent import Extent, ShapeError, fits
from kvkeep.memory.meter import nbytes
from kvkeep.memory.rows import Buffer, up

PAGE = 32
"""Slots of a page."""

BLOCK = 8
"""Pages by which the bounds grow."""


class Bounds:
    """The bounds of one layer. Page p has slots 32 p .. 32 p + 31; the last page may have fewer. ``low`` and ``high``
    are (lanes, pages, dim) in the dtype of the keys; padding counts like any other key."""

    def __init__(self) -> None:
        self.length = 0
        self._low, self._high = Buffer(BLOCK), Buffer(BLOCK)

    @property
    def pages(self) -> int:
        return self._low.length

    @property
    def low(self) -> Tensor:
        return self._low.view()

    @property
    def high(self) -> Tensor:
        return self._high.view()

    def extend(self, keys: Tensor) -> None:
        """Take the next keys, (lanes, n, dim)."""
        filled, count = self.length % PAGE, keys.shape[1]
        head = min(PAGE - filled, count) if filled else 0
        if head:
            first, low, high = keys[:, :head], self.low[:, -1], self.high[:, -1]
            torch.minimum(low, first.amin(1), out=low)
            torch.maximum(high, first.amax(1), out=high)
        if head < count:
            rest = keys[:, head:]
            if short := -rest.shape[1] % PAGE:
                rest = torch.cat([rest, rest[:, -1:].expand(-1, short, -1)], 1)
            by_page = rest.unflatten(1, (-1, PAGE))
            self._low.append(by_page.amin(2))
            self._high.append(by_page.amax(2))
        self.length += count

    def upper(self, query: Tensor) -> Tensor:
        """Return upper bounds of the scores (not scaled) of ``query`` (lanes, heads, queries, dim) with the keys of
        each page: (lanes, heads, queries, pages) float32."""
        low, high = (part.float().transpose(1, 2) for part in (self.low, self.high))
        rows = query.flatten(1, 2).float()
        bound = torch.baddbmm(rows.clamp(min=0) @ high, rows.clamp(max=0), low)
        return bound.unflatten(1, query.shape[1:3])

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on. The last page keeps its bounds, which then are wider than necessary."""
        self.length = min(self.length, length)
        for rows in (self._low, self._high):
            rows.truncate(-(-self.length // PAGE))

    def select(self, lanes: Tensor) -> None:
        for rows in (self._low, self._high):
            rows.select(lanes)

    def state(self) -> dict[str, Tensor]:
        return {"bounds.low": self.low, "bounds.high": self.high} if self.pages else {}

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        if "bounds.low" in state:
            self.length = length
            self._low.append(state["bounds.low"])
            self._high.append(state["bounds.high"])

    def check(self, extent: Extent) -> None:
        pages = -(-extent.slots // PAGE)
        if self.length != extent.slots or {self._low.length, self._high.length} != {pages}:
            raise ShapeError(f"bounds are not of {extent.slots} slots")
        if pages:
            form = (extent.lanes, pages, extent.key_dim)
            fits("bounds", self.high, form, fits("bounds", self.low, form).dtype)

    @property
    def nbytes(self) -> int:
        return nbytes(self._low.data, self._high.data)


def bounds_elements(width: int, tokens: int) -> int:
    """Return the elements of the bounds of ``tokens`` tokens, of keys with ``width`` elements in all heads."""
    return 2 * width * up(-(-tokens // PAGE), BLOCK) if tokens else 0
