"""A round of draft and verify: tokens are drafted from what is resident, read exactly, and kept while they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvkeep.contracts.checkpoint import Checkpoint
from kvkeep.errors import UsageError
from kvkeep.memory.ledger import Ledger
from kvkeep.stores.windows import WindowState, noted


class RoundPhase(Enum):
    """What a forward pass is for."""

    EXACT = "exact"  # over everything; what it reads stays
    DRAFT = "draft"  # over what is resident; what it reads is taken back
    VERIFY = "verify"  # over everything; what it reads waits for a decision


@dataclass
class RoundStatistics:
    """What decoding in rounds did. ``drafted``: tokens drafted by the model; ``copied``: drafts found in the text;
    ``accepted``: of both; seconds of drafting and of exact passes."""

    rounds: int = 0
    drafted: int = 0
    copied: int = 0
    accepted: int = 0
    drafting_s: float = 0.0
    verifying_s: float = 0.0


class Round:
    """The rounds of one cache, whose layers attend as :attr:`phase` says.

    tail: the most entries that may wait for a decision. layers: those that draft; windows: those with a sliding window
    of their own. statistics: what decoding in rounds last did. uneven: rows kept different numbers of tokens.
    """

    def __init__(self, tail: int, ledger: Ledger, checkpoint: Checkpoint) -> None:
        self.tail, self.ledger, self.checkpoint = tail, ledger, checkpoint
        self.phase = RoundPhase.EXACT
        self.layers: list[Any] = []
        self.windows: list[Any] = []
        self.statistics: RoundStatistics | None = None
        self._begun = 0  # slots before the round in progress
        self.uneven = False
        self._agreed = False  # whether drafts were right since the resident entries were last chosen
        self._before: list[WindowState] = []

    @property
    def drafting(self) -> bool:
        """Whether what is read now is taken back, so that neither checkpoints nor windows keep it."""
        return self.phase is RoundPhase.DRAFT

    @property
    def open(self) -> bool:
        return self.phase is not RoundPhase.EXACT

    def before_forward(self) -> None:
        """Prepare for a forward pass. Raises UsageError where a further text would not line up with the rows."""
        if self.uneven and not self.open:
            raise UsageError(
                "The rows of this batch accepted different numbers of drafted tokens, so new tokens cannot be "
                "aligned with them; call reset() and read the whole text again."
            )
        if self.drafting and not self._agreed:  # the round may do without drafts of the model's own; now it will not
            for layer in self.layers:
                layer.reader.choose(layer)
            self._agreed = True

    def after_forward(self) -> None:
        """Note that a text was read exactly: what is resident was not chosen by its attention yet."""
        if not self.open:
            self._agreed = False

    def draft(self) -> None:
        """Begin a round: from here on tokens are read with what is resident alone, one a row at a time, until
        :meth:`verify`."""
        self._begun = self.ledger.length
        self._before = noted(self.windows)
        self.phase = RoundPhase.DRAFT

    def verify(self) -> None:
        """Take the drafts back; the next forward pass reads the tokens to be verified, all at once and exactly."""
        self.retract()
        self.phase = RoundPhase.VERIFY
        for window in self._before:
            window.layer.record_past = True

    def commit(self, counts: Sequence[int], agreed: bool) -> None:
        """Keep the first ``counts`` tokens of each row that were verified, and forget the others; where rows keep
        different numbers, the slots between are padding from now on. ``agreed``: no draft was wrong."""
        self.phase, self._agreed = RoundPhase.EXACT, self._agreed and agreed
        count = max(counts)
        self.uneven = self.uneven or min(counts) < count
        surplus = self.ledger.length - self._begun - count
        self.ledger.keep(self._begun, list(counts))
        for layer in self.layers:
            layer.reader.commit(layer, count, agreed)
        for window in self._before:
            window.layer.crop(-surplus)
            window.layer.record_past = window.recorded
            window.layer.trim()
        self._before = []
        self.checkpoint.truncate_residuals(self.ledger.length)

    def retract(self) -> None:
        """Forget everything since :meth:`draft`, and end the round."""
        self.phase = RoundPhase.EXACT
        for window in self._before:
            window.restore()
        for layer in self.layers:
            layer.truncate(self._begun)
        self.checkpoint.truncate_residuals(self._begun)
        self.ledger.truncate(self._begun)
