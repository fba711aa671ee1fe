"""How sure the drafts are: the margin between a draft's two best tokens, and how much the exact pass changes it."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import fmean

import torch
from torch import Tensor

from kvkeep.engine.pace import FORGET


class Margins:
    """The margins of a run of drafts.

    The exact pass computes other scores than a draft, so it changes the margin between a draft's two best tokens.
    A draft with a smaller margin than the usual change may well be wrong, and the drafts after it would be lost.
    """

    def __init__(self, logarithmic: bool) -> None:
        """logarithmic: whether a margin is the logarithm of two scores' ratio; otherwise it is their difference."""
        self.logarithmic = logarithmic
        self.usual = 0.0
        """The mean change by the exact pass. Recent rounds weigh most; 0 before the first, when every draft is sure."""
        self._sure: Tensor | None = None  # whether all drafts of a row are sure, (rows,) bool
        self._rivals: list[Tensor] = []  # the two best tokens of each draft, (rows, 2)
        self._margins: list[Tensor] = []  # (rows,)

    def begin(self) -> None:
        """Begin a run."""
        self._sure, self._rivals, self._margins = None, [], []

    def note(self, scores: Tensor) -> None:
        """Record the ``scores`` (rows, vocabulary) of the run's next draft."""
        best = scores.topk(2, -1)  # not for the token: of equal scores it takes others than argmax
        margin = self._margin(best.values)
        sure = margin >= self.usual
        self._sure = sure if self._sure is None else self._sure & sure
        self._rivals.append(best.indices)
        self._margins.append(margin)

    def sure_in(self, rows: Sequence[bool]) -> bool:
        """Return whether there is a row, of those that are true in ``rows``, whose drafts are all sure."""
        return self._sure is None or any(one for one, live in zip(self._sure.tolist(), rows, strict=True) if live)

    def learn(self, scores: Tensor, comparable: list[int]) -> None:
        """Record the changes by the exact pass, whose ``scores`` are (rows, positions, vocabulary). comparable: the
        number of drafts of each row whose predecessors are right."""
        if not self._rivals:
            return
        count = len(self._rivals)
        exact = self._margin(scores[:, :count].gather(-1, torch.stack(self._rivals, 1)))
        compared = torch.arange(count, device=exact.device) < exact.new_tensor(comparable)[:, None]
        changes = (exact - torch.stack(self._margins, 1)).abs()[compared].tolist()
        if changes := [change for change in changes if isfinite(change)]:  # processors exclude tokens by -inf
            mean = fmean(changes)
            self.usual = FORGET * self.usual + (1 - FORGET) * mean if self.usual else mean

    def _margin(self, pair: Tensor) -> Tensor:
        pair = pair.float()
        first, second = (pair.log() if self.logarithmic else pair).unbind(-1)
        return first - second
