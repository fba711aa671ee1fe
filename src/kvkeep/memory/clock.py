"""The number of the present token as a tensor, for passes that a graph of CUDA repeats: a number of Python would be
that of the token whose pass was captured."""

from __future__ import annotations

import torch
from torch import Tensor


class Clock:
    """The slot of the token that a pass reads, on its device."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.zeros(2, dtype=torch.int64, device=device)
        self._slot = 0
        self.positions = self._numbers[:1].view(1, 1)
        """The position of the token, (1, 1) int64."""

    def set(self, slot: int) -> None:
        """Set the slot of the next token, in the same memory and without a copy from the host."""
        self._slot = slot
        torch.arange(slot, slot + 2, out=self._numbers)

    def of(self, slots: int) -> Tensor:
        """Return ``slots``, a number near the token's slot, as an int64 tensor without dimensions."""
        number = slots - self._slot
        return self._numbers[number] if number in (0, 1) else self._numbers[0] + number
