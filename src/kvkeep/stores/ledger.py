"""The ledger: which tokens came in, and at which positions. Everything else can be rebuilt from it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.errors import UnsupportedModelError
from kvkeep.stores.rows import Buffer


class Ledger:
    """Token ids and positions of every slot, 4 bytes each: (batch, slots, 1) int32."""

    def __init__(self) -> None:
        self.ids = Buffer()
        self.positions = Buffer()
        self.visible: Tensor | None = None  # (batch, slots) bool of the forward pass in progress; None: all

    @property
    def length(self) -> int:
        """Slots recorded so far."""
        return self.positions.length

    def append(
        self, ids: Tensor | None, embeddings: Tensor | None, positions: Tensor | None, mask: Tensor | None
    ) -> None:
        """Record the tokens of a forward pass. ids (batch, n) or embeddings (batch, n, hidden); positions
        (batch or 1, n), by default the next ones; mask (batch, slots so far) with 0 for padding."""
        tokens = ids if ids is not None else embeddings
        assert tokens is not None
        batch, count = tokens.shape[:2]
        if positions is None:
            positions = torch.arange(self.length, self.length + count, device=tokens.device).unsqueeze(0)
        if positions.ndim != 2:
            raise UnsupportedModelError(
                "Positions of several axes (multimodal rotary) are not supported yet; use method 'full'."
            )
        self.positions.append(positions.expand(batch, -1).unsqueeze(-1).int())
        self.ids.append((ids if ids is not None else tokens.new_zeros(batch, count)).unsqueeze(-1).int())
        # One look at the mask per forward pass, as stock mask creation takes.
        padded = mask is not None and mask.ndim == 2 and not bool(mask.all())
        self.visible = mask[:, : self.length].bool() if padded and mask is not None else None

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return ids and positions of slots ``start``..``stop``, (batch, n) each."""
        return self.ids.view(start, stop).squeeze(-1), self.positions.view(start, stop).squeeze(-1)

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on."""
        for rows in (self.ids, self.positions):
            rows.truncate(length)

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""
        for rows in (self.ids, self.positions):
            rows.select(index)
