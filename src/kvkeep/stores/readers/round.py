"""A round of draft and verify: tokens are drafted with the resident entries, then verified by an exact pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvkeep.contracts.checkpoint import Checkpoint
from kvkeep.errors import UsageError
from kvkeep.memory.ledger import Ledger
from kvkeep.stores.dynamic import WindowState, noted


class RoundPhase(Enum):
    """The purpose of a forward pass."""

    EXACT = "exact"  # over all entries; new entries stay
    DRAFT = "draft"  # over resident entries; new entries are removed
    VERIFY = "verify"  # over all entries; new entries wait for a decision


@dataclass
class RoundStatistics:
    """Statistics of decoding in rounds."""

    rounds: int = 0
    drafted: int = 0
    """Tokens drafted by the model."""
    copied: int = 0
    """Drafts copied from the text."""
    accepted: int = 0
    """Accepted drafts of both kinds."""
    drafting_s: float = 0.0
    """Seconds of drafting."""
    verifying_s: float = 0.0
    """Seconds of exact passes."""


class Round:
    """The rounds of one cache, whose layers attend as :attr:`phase` says. tail: the maximum number of entries that wait
    for a decision."""

    def __init__(self, tail: int, ledger: Ledger, checkpoint: Checkpoint) -> None:
        self.tail, self.ledger, self.checkpoint = tail, ledger, checkpoint
        self.phase = RoundPhase.EXACT
        self.layers: list[Any] = []
        """The layers that draft."""
        self.windows: list[Any] = []
        """The layers with a sliding window."""
        self.states: dict[int, Any] = {}
        """The recurrent states, by layer."""
        self.statistics: RoundStatistics | None = None
        """Statistics of the last decoding in rounds."""
        self._begun = 0  # slots before the current round
        self.uneven = False
        """Rows kept different numbers of tokens."""
        self._agreed = False  # whether all drafts after the last choice of entries were accepted
        self._before: list[WindowState] = []

    @property
    def drafting(self) -> bool:
        """Whether this pass drafts. Its entries are removed later, so checkpoints and windows do not keep them."""
        return self.phase is RoundPhase.DRAFT

    @property
    def verifying(self) -> bool:
        """Whether this pass verifies drafts. Its entries wait for a decision."""
        return self.phase is RoundPhase.VERIFY

    @property
    def open(self) -> bool:
        return self.phase is not RoundPhase.EXACT

    @property
    def kept(self) -> int:
        """The number of slots whose tokens stay, whatever an open round decides."""
        return self._begun if self.open else self.ledger.length

    def before_forward(self) -> None:
        """Prepare for a forward pass. Raises UsageError where a further text cannot continue rows of unequal length."""
        if self.uneven and not self.open:
            raise UsageError(
                "The rows of this batch accepted different numbers of drafted tokens, so new tokens cannot be "
                "aligned with them; call reset() and read the whole text again."
            )
        if self.drafting and not self._agreed:  # first draft after an exact pass or a rejected draft
            for layer in self.layers:
                layer.reader.choose(layer)
            self._agreed = True

    def after_forward(self) -> None:
        """Note that a text was read exactly, and that its attention has not chosen the resident entries yet."""
        if not self.open:
            self._agreed = False

    def draft(self) -> None:
        """Begin a round. Until :meth:`verify`, each pass reads one token a row, which attends to the resident entries
        only."""
        self._begun = self.ledger.length
        self._before = noted(self.windows)
        self.phase = RoundPhase.DRAFT
        for state in self.states.values():
            state.note()

    def verify(self) -> None:
        """Remove the drafts. The next forward pass then reads all tokens to be verified at once, exactly."""
        self.retract()
        self.phase = RoundPhase.VERIFY
        for state in self.states.values():
            state.note()
        for window in self._before:
            window.layer.record_past = True

    def commit(self, counts: Sequence[int], agreed: bool) -> None:
        """Keep the first ``counts`` verified tokens of each row, and forget the others. Where rows keep different
        numbers, the slots between become padding. agreed: no draft was wrong. After an error the round is still open,
        so that :meth:`retract` undoes it."""
        count = max(counts)
        surplus = self.ledger.length - self._begun - count
        self.ledger.keep(self._begun, list(counts))
        for layer in self.layers:
            layer.reader.commit(layer, count, agreed)
        for window in self._before:
            window.layer.crop(-surplus)
            window.layer.record_past = window.recorded
            window.layer.trim()
        for state in self.states.values():
            state.keep(counts)
        self.checkpoint.truncate_residuals(self.ledger.length)
        self._before, self.uneven = [], self.uneven or min(counts) < count
        self.phase, self._agreed = RoundPhase.EXACT, self._agreed and agreed

    def retract(self) -> None:
        """Forget everything since :meth:`draft`, and end the round."""
        for window in self._before:
            window.restore()
        for state in self.states.values():
            state.go_back()
        for layer in self.layers:
            layer.truncate(self._begun)
        self.checkpoint.truncate_residuals(self._begun)
        self.ledger.truncate(self._begun)
        self.phase = RoundPhase.EXACT
