"""``highest-attention``: the entries with the largest mean squared attention stay (arXiv:2602.16284)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvkeep.contracts.selector import ReconstructionPieces
from kvkeep.policies.papers import Paper
from kvkeep.policies.selectors.kvzip import KVzip
from kvkeep_lab.published.papers import ATTENTION_MATCHING
from kvkeep_lab.published.text_scores import RootMeanSquare


@dataclass(frozen=True)
class HighestAttention(KVzip):
    """The entries with the largest root mean square of attention stay when the text is read a second time.

    As kvzip, with another score: the mean is over all queries of the repeated text and all heads that share the entry,
    and a query's weights are normalised over the text.
    """

    leaves: ClassVar[str] = "least attended (mean square) while the text is repeated"
    source: ClassVar[str] = "arXiv:2602.16284"
    papers: ClassVar[Sequence[Paper]] = (ATTENTION_MATCHING,)

    least: float = 1.0
    """The share of the mean budget that every KV head has; with 1 all heads have the same."""

    @property
    def reconstruction(self) -> ReconstructionPieces:
        return ReconstructionPieces(self.piece, self.sinks, RootMeanSquare)
