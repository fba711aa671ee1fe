"""The pace of rounds: how many drafts a round makes, and when a run of them ends."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import fmean

import torch
from torch import Tensor

FORGET = 0.9
"""The weight of earlier rounds when a new one is recorded."""


class Acceptance:
    """How runs of drafts end: at a wrong draft, or at one with a small margin. Recent rounds weigh most. ``right``,
    ``wrong``: initial counts."""

    def __init__(self, right: float, wrong: float) -> None:
        self.right, self.wrong, self.unsure = right, wrong, 0.0

    def note(self, accepted: int, drafted: int, unsure: bool = False) -> None:
        """Record that the first ``accepted`` of ``drafted`` tokens were accepted. unsure: a draft with a small margin
        ended the run; it is not among them."""
        self.right = FORGET * self.right + accepted
        self.wrong = FORGET * self.wrong + (accepted < drafted)
        self.unsure = FORGET * self.unsure + (unsure and accepted == drafted)

    def tokens(self, longest: int) -> float:
        """Return the expected number of tokens of a round of at most ``longest`` drafts: the sum of a^i for
        i = 0..``longest``, where a is the share of drafts that had no small margin and were accepted."""
        return _sum(self.right / self._drafts, longest + 1)

    def drafted(self, longest: int) -> float:
        """Return the expected number of drafts of a round."""
        return _sum(1 - self.unsure / self._drafts, longest)

    @property
    def _drafts(self) -> float:
        return self.right + self.wrong + self.unsure


def _sum(chance: float, terms: int) -> float:
    """Return the sum of the first ``terms`` powers of ``chance``, from 0 on."""
    chance = min(chance, 0.995)
    return (1 - chance**terms) / (1 - chance)


class Pace:
    """Chooses the number of drafts that gives the most tokens per second, by the measured times of rounds and the
    acceptance rate."""

    def __init__(self) -> None:
        self.drafts, self.copies = Acceptance(8, 1), Acceptance(4, 1)
        self._step: float | None = None
        self._pass: float | None = None

    def record(self, drafted: int, drafting_s: float, verifying_s: float) -> None:
        """Record the seconds of a round."""
        if drafted:
            step = drafting_s / drafted
            self._step = step if self._step is None else FORGET * self._step + (1 - FORGET) * step
        self._pass = verifying_s if self._pass is None else FORGET * self._pass + (1 - FORGET) * verifying_s

    def length(self, longest: int) -> int:
        """Return the maximum number of tokens to draft, at most ``longest``."""
        if self._step is None or self._pass is None:
            return min(8, longest)
        return max(range(1, longest + 1), key=self._rate, default=0)

    def prefers_copies(self, copied: int, drafted: int) -> bool:
        """Return whether verifying ``copied`` tokens from the text gives more tokens per second than drafting."""
        if self._step is None or self._pass is None:
            return False
        return self.copies.tokens(copied) / self._pass > self._rate(drafted)

    def _rate(self, drafted: int) -> float:
        assert self._step is not None and self._pass is not None
        return self.drafts.tokens(drafted) / (self.drafts.drafted(drafted) * self._step + self._pass)


class Margins:
    """How sure the drafts of a run are: the margin between a draft's two best tokens.

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
