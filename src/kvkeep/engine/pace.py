"""Chooses the number of drafts from the measured times of rounds and the acceptance rate."""

from __future__ import annotations

FORGET = 0.9
"""The weight of earlier rounds when a new one is recorded."""


class Acceptance:
    """How runs of drafts end: by a wrong draft, or by one that is not sure. Recent rounds weigh most. ``right``,
    ``wrong``: initial counts."""

    def __init__(self, right: float, wrong: float) -> None:
        self.right, self.wrong, self.unsure = right, wrong, 0.0

    def note(self, accepted: int, drafted: int, unsure: bool = False) -> None:
        """Record that the first ``accepted`` of ``drafted`` tokens were accepted. unsure: a draft that was not sure
        ended the run; it is not among them."""
        self.right = FORGET * self.right + accepted
        self.wrong = FORGET * self.wrong + (accepted < drafted)
        self.unsure = FORGET * self.unsure + (unsure and accepted == drafted)

    def tokens(self, longest: int) -> float:
        """Return the expected number of tokens of a round of at most ``longest`` drafts: the sum of a^i for
        i = 0..``longest``, where a is the share of drafts that were sure and right."""
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
    """Chooses the number of drafts that gives the most tokens per second."""

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
