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

import numpy as np
from torch import Tensor

from kvkeep import report
from kvkeep.cache import KeepCache
from kvkeep.contracts.exactness import Exactness
from kvkeep.engine.batch import Read
from kvkeep.engine.pacing import Acceptance
from kvkeep.memory.rows import BLOCK
from kvkeep.stores.recurrent import NOTES
from kvkeep.stores.sliding import sliding_layers

GRAM = 3
"""The number of last tokens that are looked for; fewer where they do not occur earlier."""
OCCURRENCES = 8
"""The number of earlier occurrences of the last tokens that are compared, the newest first."""
LONGEST_MATCH = 32
"""The number of tokens before an occurrence that are compared."""
REACH = 16
"""The number of tokens of a source behind a change among which the answer may return to it."""
LONGEST_CHANGE = 6
"""The maximum number of tokens that a change replaces, and of those in their place."""
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


class CopiedText:
    """The tokens of a text. Its memory is that of the tokens: they are searched, and not indexed."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = np.array(tokens, np.int32)  # grows; the first `length` are the text
        self.length = len(tokens)
        self._occurrence: tuple[int, int] | None = None

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        stop = self.length + len(tokens)
        if stop > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * stop)
        self._tokens[self.length : stop] = tokens
        self.length, self._occurrence = stop, None

    def between(self, start: int, stop: int) -> list[int]:
        """Return the tokens from ``start`` to ``stop``, or to the end."""
        found: list[int] = self._tokens[start : min(stop, self.length)].tolist()
        return found

    def occurrence(self) -> tuple[int, int]:
        """Return the place behind the longest earlier occurrence of the last tokens, and the number of tokens that
        match before it; 0 where there is none."""
        if self._occurrence is None:
            text, end, place, longest = self._tokens[: self.length], self.length, 0, 0
            for source in self._sources():
                limit = min(LONGEST_MATCH, source)
                same = text[source - limit : source][::-1] == text[end - limit : end][::-1]
                match = limit if same.all() else int(same.argmin())
                if match > longest:
                    place, longest = source, match
            self._occurrence = place, longest
        return self._occurrence

    def _sources(self) -> list[int]:
        """Return the places behind the newest earlier occurrences of the last :data:`GRAM` tokens, or of fewer."""
        for size in range(GRAM, 0, -1):
            starts = self._starts(0, self.length - size, size)[-OCCURRENCES:]
            if len(starts):
                found: list[int] = (starts[::-1] + size).tolist()
                return found
        return []

    def copy(self, count: int) -> tuple[Sequence[int], int]:
        """Return at most ``count`` tokens behind :meth:`occurrence`, and the number of tokens that match before them. A
        copy that reaches the end of the text repeats."""
        source, match = self.occurrence()
        if not match:
            return [], 0
        return self._tokens[source + np.arange(count) % (self.length - source)].tolist(), match

    def found(self, start: int, stop: int) -> int | None:
        """Return the first place from ``start`` to ``stop`` at which the last tokens begin, too; None: there is
        none."""
        starts = self._starts(start, min(stop, self.length - GRAM))
        return int(starts[0]) if len(starts) else None

    def _starts(self, start: int, stop: int, size: int = GRAM) -> np.ndarray:
        """Return the places from ``start`` to ``stop`` at which the last ``size`` tokens begin, too."""
        hits = np.full(max(0, stop - start), True)
        for number in range(size if len(hits) else 0):
            hits &= self._tokens[start + number : stop + number] == self._tokens[self.length - size + number]
        return start + np.flatnonzero(hits)


class Rewriting:
    """A part of the ``text`` that its end writes again, with changes: the source. A match of :data:`GRAM` tokens
    begins it, and it is followed token by token. Where the text leaves it, and returns to it soon, the change is
    learned: tokens, and what was written in their place. The next copies have the same changes."""

    def __init__(self, text: CopiedText) -> None:
        self._text, self._changes = text, dict[tuple[int, ...], list[int]]()
        self._source: int | None = None  # the place of the next token
        self._inside = 0  # of a change whose tokens begin there, how many are written
        self._match = 0  # tokens since the source was found
        self._left: int | None = None  # where the text has left the source

    def copy(self, count: int) -> tuple[Sequence[int], int]:
        """Return at most ``count`` tokens of the source, with its changes, and the number of tokens for which it was
        followed. Nothing while the text differs from it."""
        if self._source is None or self._left is not None:
            return [], 0
        return self._next(self._source, count)[0], min(self._match, LONGEST_MATCH)

    def follow(self, count: int) -> None:
        """Compare the last ``count`` tokens of the text with the source."""
        text = self._text
        while self._source is not None and self._left is None:
            written = text.between(text.length - count, text.length)
            tokens, places = self._next(self._source, count)
            pairs = enumerate(zip(written, tokens, strict=False))
            right = next((number for number, (one, other) in pairs if one != other), min(count, len(tokens)))
            self._source, self._inside = places[right]
            self._match += right
            count -= right
            if not count:
                return
            changed = self._changed(text.between(self._source, self._source + LONGEST_CHANGE))
            if changed and not self._inside and written[right] == changed[0]:  # here it is not changed
                self._source, self._inside, count = self._source + 1, 0, count - 1
                continue
            self._left, self._inside = text.length - count - self._inside, 0
        if not self._returned():
            place, match = text.occurrence()
            if match >= GRAM:
                self._source, self._inside, self._match, self._left = place, 0, match, None

    def _returned(self) -> bool:
        """Return whether the text has returned to the source; what was changed is then learned."""
        text, start = self._text, self._text.length - GRAM
        if self._source is None or self._left is None or start < self._left:
            return False
        if (place := text.found(self._source, self._source + REACH)) is None:
            return False
        old, new = text.between(self._source, place), text.between(self._left, start)
        while old and new and old[-1] == new[-1]:
            del old[-1], new[-1]
        if 0 < len(old) <= LONGEST_CHANGE >= len(new):
            self._changes[tuple(old)] = new
        self._source, self._match, self._left = place + GRAM, GRAM, None
        return True

    def _next(self, source: int, count: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the next ``count`` tokens from ``source`` on, and the place of each and of the one behind them: where
        it lies in the source, and how many tokens of a change come before it there."""
        window, done = self._text.between(source, source + count + 2 * LONGEST_CHANGE), 0
        tokens, places = list[int](), list[tuple[int, int]]()
        while len(tokens) < self._inside + count and done < min(len(window), count + LONGEST_CHANGE):
            changed = self._changed(window[done : done + LONGEST_CHANGE])
            new = self._changes[changed] if changed else window[done : done + 1]
            tokens += new
            places += [(source + done, number) for number in range(len(new))]
            done += len(changed) or 1
        places.append((source + done, 0))
        chosen = slice(self._inside, self._inside + count)
        return tokens[chosen], places[self._inside : self._inside + count + 1]

    def _changed(self, window: list[int]) -> tuple[int, ...]:
        """Return the longest beginning of ``window`` that is changed; nothing where none is."""
        if not self._changes:
            return ()
        sizes = range(len(window), 0, -1)
        return next((old for size in sizes if (old := tuple(window[:size])) in self._changes), ())


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
    """Return the number of the matches that are judged together: of 1, 2, 3, 4, 5 to 7, 8 to 15 tokens, and so on."""
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
    for part in _recording(cache):
        part.expect_drafts()


def _recording(cache: KeepCache) -> list[Any]:
    return [*sliding_layers(cache), *cache.states.values()]


def take_back(cache: KeepCache, count: int) -> None:
    """Remove the last ``count`` tokens, which were drafts. An unfinished pass stays as it is, and so does the
    recording that a caller began."""
    if count and not cache.stream.open:
        cache.crop(-count)
    for part in _recording(cache):
        part.forget_drafts()
    for window in sliding_layers(cache):
        if not cache.stream.open:
            window.trim()
