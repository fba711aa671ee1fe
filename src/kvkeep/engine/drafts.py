"""Drafts: tokens that may come next in an answer. The pass that reads the answer's last token reads them, too.

The pass has the bits of as many steps (:attr:`~kvkeep.report.LayerReport.same_bits`), so each row's logits choose the
token that a step would have chosen. A draft that differs from it is removed with those after it. So an answer does
not depend on its drafts, greedy or sampled.

Drafts are copied from the text: what followed its longest earlier occurrence of the last tokens (prompt lookup, Saxena,
2023; SuffixDecoding, arXiv:2411.04975), or what follows in a part that the answer rewrites. How many are read at once
follows the measured price of a pass and the chance that they are right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from torch import Tensor

from kvkeep import report
from kvkeep.cache import KeepCache
from kvkeep.contracts.exactness import Exactness
from kvkeep.engine.batch import Read
from kvkeep.engine.copied_text import GRAM, LONGEST_MATCH, CopiedText, Rewriting
from kvkeep.engine.pacing import Acceptance
from kvkeep.memory.rows import BLOCK
from kvkeep.stores.recurrent import NOTES

LONGEST = 15
"""The maximum number of drafts of a pass."""
FORCED = 2 * LONGEST_MATCH
"""What stands for the match of tokens that a form wants."""
PRICE_FORGET = 0.8
"""The weight of earlier passes when the time of a new one is recorded."""
ROW_PRICE = 0.25
"""The price of another row, in passes of one row, before it was measured."""
GUESSES = 3
"""The number of drafts that the first guess of their chance counts for."""

Drafts = Generator[Read, Tensor, Sequence[int]]
"""Yields what the model reads to draft, receives its logits (keep, vocabulary), and returns the drafts."""


@dataclass
class PassPrices:
    """What passes of a model cost, by their number of rows. Recent passes weigh most."""

    by_rows: bool = True
    """Whether they depend on the rows; otherwise what a pass recalls costs most."""
    others: int = 0
    """The number of other answers in generation, with a row each."""
    seconds: dict[int, float] = field(default_factory=dict)
    """The measured seconds of a pass, by its number of rows."""

    def note(self, rows: int, seconds: float) -> None:
        """Record a pass."""
        rows = rows if self.by_rows else 1
        before = self.seconds.get(rows, seconds)
        self.seconds[rows] = PRICE_FORGET * before + (1 - PRICE_FORGET) * seconds

    def of(self, rows: int) -> float:
        """Return the price of a pass, in any unit: by the next smaller and larger ones that were measured."""
        rows = rows if self.by_rows else 1
        below = max((one for one in self.seconds if one <= rows), default=None)
        above = min((one for one in self.seconds if one >= rows), default=None)
        if below is None or above is None:
            known = below or above
            if known is None:
                return 1 + ROW_PRICE * (rows - 1)
            return self.seconds[known] * (1 + ROW_PRICE * (rows - 1)) / (1 + ROW_PRICE * (known - 1))
        if below == above:
            return self.seconds[rows]
        share = (rows - below) / (above - below)
        return (1 - share) * self.seconds[below] + share * self.seconds[above]


class Drafter(ABC):
    """The drafts of one answer. prices: those of the passes that read them."""

    def __init__(self, prices: PassPrices) -> None:
        self.prices = prices

    @abstractmethod
    def drafts(self, tokens: Sequence[int], limit: int) -> Drafts:
        """Return the drafts of the pass that reads the last of the answer's ``tokens``: at most ``limit``. The caller
        runs the passes that this takes."""

    @abstractmethod
    def learn(self, drafted: int, taken: Sequence[int], exact: Sequence[Tensor]) -> None:
        """Note the tokens that were chosen in a pass with ``drafted`` drafts: all right ones, and one more. exact: the
        scores (vocabulary,) that chose them."""


class Copies(Drafter):
    """Drafts that are copied from the text. prompt: the tokens before the answer. forced: returns the tokens that the
    answer's form wants after its tokens so far."""

    def __init__(
        self, prompt: Sequence[int], prices: PassPrices, forced: Callable[[Sequence[int]], Sequence[int]] | None = None
    ) -> None:
        super().__init__(prices)
        self._text, self._forced = CopiedText(prompt), forced
        self._rewriting = Rewriting(self._text)
        self._chances = dict[int, Acceptance]()
        self._copies: list[tuple[Sequence[int], Acceptance]] = []  # that the last pass could have read

    def drafts(self, tokens: Sequence[int], limit: int) -> Drafts:
        """Return the drafts of :meth:`copy`, without a pass."""
        yield from ()
        return self.copy(tokens, limit)[0]

    def copy(self, tokens: Sequence[int], limit: int) -> tuple[Sequence[int], float]:
        """Return the drafts, and the expected tokens per unit of price of the pass that reads them; 0 without any."""
        limit, self._copies = min(limit, LONGEST), []
        if limit < 1:
            return (), 0.0
        best: Sequence[int] = ()
        others, best_rate = self.prices.others, 0.0
        for drafts, match in self._found(tokens, limit):
            chance = self._chances.setdefault(_bucket(match), _first_guess(match))
            self._copies.append((drafts, chance))
            # The expected tokens per unit of price, all answers of the pass together.
            rates = [
                (others + chance.tokens(count)) / self.prices.of(1 + others + count) for count in range(len(drafts) + 1)
            ]
            count = rates.index(max(rates))
            if count and rates[count] > best_rate:
                best, best_rate = drafts[:count], rates[count]
        return best, best_rate

    def _found(self, tokens: Sequence[int], limit: int) -> list[tuple[Sequence[int], int]]:
        """Return what may be copied, at most ``limit`` tokens each, and the number of tokens that match before it."""
        if self._forced is not None and (forced := self._forced(tokens)[:limit]):
            return [(forced, FORCED)]
        rewritten, copied = self._rewriting.copy(limit), self._text.copy(limit)
        if rewritten[0] == copied[0]:
            return [max(rewritten, copied, key=itemgetter(1))] if copied[0] else []
        return [one for one in (rewritten, copied) if one[0]]

    def learn(self, drafted: int, taken: Sequence[int], exact: Sequence[Tensor]) -> None:
        """Judge the last copies, and add the tokens to the text."""
        for copy, chance in self._copies:  # whether or not they were read: a text may begin to copy
            judged = min(len(copy), len(taken))
            wrong = (number for number in range(judged) if copy[number] != taken[number])
            chance.note(next(wrong, judged), judged)
        self._text.add(taken)
        self._rewriting.follow(len(taken))


def _bucket(match: int) -> int:
    """Return the number of the matches that are judged together: of 3, 4, 5 to 7, 8 to 15 tokens, and so on."""
    return match if match < 5 else 2 + match.bit_length()


def _first_guess(match: int) -> Acceptance:
    """Return how drafts after a match end, before any has: longer matches are right more often."""
    return Acceptance(GUESSES * match / (match + GRAM), GUESSES * GRAM / (match + GRAM))


def max_drafts(cache: KeepCache) -> int:
    """Return the number of drafts that the next pass of a cache can take back, which :func:`can_draft`."""
    stream, steady = cache.stream, cache.geometry.steady_positions
    limit = stream.chunk - 1
    if steady is not None:  # a pass beyond it has other rotary frequencies, at all of its positions
        limit = min(limit, steady - cache.get_seq_length() - 1)
    if cache.states:
        limit = min(limit, (NOTES if cache.draft_passes is None else cache.draft_passes.tail) - 1)
    if stream.record.on_block is not None:  # what windows hold is kept at the end of a block
        limit = min(limit, BLOCK - 1 - cache.get_seq_length() % BLOCK)
    return limit


def without_drafts(model: Any) -> None:
    """Let a model's answers have no drafts."""
    model.generation_config.prompt_lookup_num_tokens = 0


def can_draft(cache: KeepCache) -> bool:
    """Return whether an answer in a cache may have drafts: a pass over several tokens has the bits of single steps, and
    can be taken back. A budget has no room for copies of recurrent states."""
    if cache.exactness is not Exactness.EXACT or not cache.crops:
        return False
    if cache.draft_passes is not None:  # its promise is the token of the exact pass
        return True
    if cache.states and cache.entries is not None:
        return False
    return report.same_bits_of_steps(cache.request, cache.geometry, cache.made, cache.model)


def expect_drafts(cache: KeepCache) -> None:
    """Let windows and recurrent states keep what taking back the drafts of the next pass needs, until
    :func:`take_back`."""
    for window in _windows(cache):
        window.record_past = True
    for state in cache.states.values():
        state.expect_drafts()


def take_back(cache: KeepCache, count: int) -> None:
    """Remove the last ``count`` tokens, which were drafts. An unfinished pass stays as it is."""
    if count and not cache.stream.open:
        cache.crop(-count)
    for window in _windows(cache):
        window.record_past = False
        if not cache.stream.open:
            window.trim()
    for state in cache.states.values():
        state.forget_drafts()


def _windows(cache: KeepCache) -> list[Any]:
    return [cache.layers[layer.index] for layer in cache.geometry.sliding_layers]
