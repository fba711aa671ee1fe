"""How many drafts are worth their price, and when a run of them ends."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import fmean

from torch import Tensor

FORGET = 0.9
"""The weight of earlier runs when a new one is recorded."""


class Acceptance:
    """How runs of drafts end: at a wrong draft, or at one with a small margin. Recent runs weigh most. ``right``,
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
        """Return the expected number of tokens of a pass with at most ``longest`` drafts: the sum of a^i for
        i = 0..``longest``, where a is the share of drafts that had no small margin and were accepted."""
        return _sum(self.right / self._drafts, longest + 1)

    def drafted(self, longest: int) -> float:
        """Return the expected number of drafts of a run of at most ``longest``."""
        return _sum(1 - self.unsure / self._drafts, longest)

    @property
    def _drafts(self) -> float:
        return self.right + self.wrong + self.unsure


def _sum(chance: float, terms: int) -> float:
    """Return the sum of the first ``terms`` powers of ``chance``, from 0 on."""
    chance = min(chance, 0.995)
    return (1 - chance**terms) / (1 - chance)


class Margins:
    """How sure the drafts of a run are: the margin between a draft's two best tokens.

    The exact pass computes other scores than a draft, so it changes the margin between a draft's two best tokens.
    A draft with a smaller margin than the usual change may well be wrong, and the drafts after it would be lost.
    """

    def __init__(self, logarithmic: bool) -> None:
        """logarithmic: whether a margin is the logarithm of two scores' ratio; otherwise it is their difference."""
        self.logarithmic = logarithmic
        self.usual = 0.0
        """The mean change by the exact pass. Recent runs weigh most; 0 before the first, when every draft is sure."""
        self.sure = True
        """Whether all drafts of the run are sure."""
        self._rivals: list[Tensor] = []  # the two best tokens of each draft, (2,)
        self._margins: list[float] = []

    def begin(self) -> None:
        """Begin a run."""
        self.sure, self._rivals, self._margins = True, [], []

    def note(self, scores: Tensor) -> None:
        """Record the ``scores`` (vocabulary,) of the run's next draft."""
        best = scores.topk(2)  # not for the token: of equal scores it takes others than argmax
        self._rivals.append(best.indices)
        self._margins.append(self._margin(best.values))
        self.sure = self.sure and self._margins[-1] >= self.usual

    def learn(self, exact: Sequence[Tensor]) -> None:
        """Record the changes by the exact pass, whose scores (vocabulary,) are those of the run's first drafts, as far
        as the drafts before them are right."""
        pairs = zip(exact, self._rivals, self._margins, strict=False)
        changes = [abs(self._margin(scores[rivals]) - margin) for scores, rivals, margin in pairs]
        if changes := [change for change in changes if isfinite(change)]:  # processors exclude tokens by -inf
            mean = fmean(changes)
            self.usual = FORGET * self.usual + (1 - FORGET) * mean if self.usual else mean

    def _margin(self, pair: Tensor) -> float:
        pair = pair.float()
        first, second = (pair.log() if self.logarithmic else pair).tolist()
        return float(first - second)
