"""Which passages of the old text ``endless`` recalls: those that match the question.

The words are token ids, and pairs of consecutive ones. BM25 (Robertson and Zaragoza, "The Probabilistic Relevance
Framework", 2009) scores each passage by them: a word counts more the fewer passages have it. The ledger has the ids of
the whole text, so there is no index to keep: a choice reads the ids once. All layers and heads recall the same
passages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvkeep.memory.extent import within
from kvkeep.memory.ledger import Ledger

QUESTION = 64
"""The maximum number of a question's tokens whose words are looked for, the newest: of one pass, or of its chunks."""
WRITTEN = 32
"""Tokens written after a choice until the next one, which looks for their words, too."""
HALF = 16
"""A word counts half as much as one that is so many tokens newer."""
SHARE = 0.5
"""A passage is recalled if its score is at least this share of the best one's, or the best beside the first passages.
More passages distract the model."""
K1 = 1.2
"""BM25's saturation of repeated words. Its correction for the length of a text has no use: all passages are as long."""


class PassageChoice:
    """The passages that the layers of a cache recall: of ``size`` tokens, at most ``count`` of each row, and always the
    ``first`` ones. They follow from the ledger's ids and a few numbers (:attr:`state`), so a copy or a saved session
    chooses the same."""

    def __init__(self, ledger: Ledger, count: int, size: int, first: int = 1) -> None:
        self.ledger, self.count, self.size, self.first = ledger, count, size, first
        self.numbers: Tensor | None = None
        """(rows, n) int64, in ascending order: the chosen passages, counted from 0. A new choice is a new tensor."""
        self.passages = 0
        """The number of passages among which they were chosen: later entries are no part of a passage yet."""
        self.gone = 0, 0
        """The passages that the checkpoint had lost by then: the first of them, and the first after them."""
        self._question = 0, 0, 0  # the slots of the question, and the passages among which it chose
        self._at = 0  # the tokens when the passages were chosen
        self._cut = False  # the question goes on in the next chunk

    @property
    def holds(self) -> bool:
        """Whether a pass of one token keeps the choice."""
        return 0 < self._at <= self.ledger.length <= self._at + WRITTEN

    def choose(self, passages: int, new: int, gone: tuple[int, int]) -> None:
        """Choose among the first ``passages`` passages in a pass of ``new`` tokens, unless a single token keeps the
        choice. Several tokens are a text or a question. One is a part of an answer, in which the question still counts.
        Where passages have been lost since a choice, it is made again, by the same words. gone: as :attr:`gone`."""
        if new > 1 or not self.holds:
            self._at = self.ledger.length
            if new > 1:
                start, stop, _ = self._question
                read = self._at - start if self._cut and stop == self._at - new else new
                self._question = self._at - min(read, QUESTION), self._at, passages
                self._cut = self.ledger.continues
            elif not self._question[1]:  # it was asked while all entries were attended: the tokens until then
                self._question = max(0, self._at - 1 - QUESTION), self._at - 1, 0
            again = self._question[1] == self._at  # the question, or its last token after a crop
            self.passages = self._question[2] if again else passages
        elif self.numbers is not None and self.gone == gone:
            return
        self.gone = gone
        self.passages = max(self.passages, gone[1])  # after a crop there may be fewer than are gone
        question, written = self._question[:2], (max(self._question[1], self._at - WRITTEN), self._at)
        query = torch.cat([self._ids(*question), self._ids(*written)], 1)
        weight = torch.cat([_aged(stop - start, query.device) for start, stop in (question, written)])
        there = torch.ones(self.passages, dtype=torch.bool, device=query.device)
        there[slice(*gone)] = False
        if int(there.sum()) <= self.count:
            self.numbers = there.nonzero()[:, 0].expand(len(query), -1)
        else:
            past = self._ids(0, self.passages * self.size)
            scores = [word_scores(*row, weight, self.size) for row in zip(past, query, strict=True)]
            self.numbers = best_passages(torch.stack(scores).masked_fill(~there, -1.0), self.count, self.first)

    def truncate(self, length: int) -> None:
        """Forget what was chosen or asked after ``length`` tokens. A question stays without its last token, which is
        read again for another answer."""
        if self._at > length:
            self.numbers, self._at, self.passages = None, 0, 0
        if self._question[1] > length + 1:
            self._question = 0, 0, 0

    def select(self) -> None:
        """Choose again by the same words: the rows have changed."""
        self.numbers = None

    @property
    def state(self) -> Tensor:
        """The numbers from which a choice follows, (6,) int64."""
        return torch.tensor([*self._question, self._at, self.passages, self._cut])

    def restore(self, state: Tensor) -> None:
        """Restore :attr:`state`."""
        start, stop, among, self._at, self.passages, cut = state.tolist()
        self._question, self._cut = (start, stop, among), bool(cut)

    def check(self, tokens: int) -> None:
        """Raise ShapeError where the numbers that were restored are not of a text of ``tokens`` tokens."""
        start, stop, among = self._question
        within("choice", torch.tensor([start, max(stop - 1, 0), self._at]), 0, tokens + 1)
        within("choice", torch.tensor([among, self.passages]), 0, tokens // self.size + 1)
        within("choice", start, 0, stop + 1)

    def _ids(self, start: int, stop: int) -> Tensor:
        return self.ledger.ids.view(start, stop).squeeze(-1)


def _aged(count: int, device: torch.device) -> Tensor:
    """Return the weights of ``count`` words, the oldest first, (count,) float32."""
    return 0.5 ** (torch.arange(count - 1, -1, -1, device=device) / HALF)


def best_passages(scores: Tensor, count: int, first: int = 1) -> Tensor:
    """Return at most ``count`` passages of each row, (rows, n) in ascending order. scores: (rows, passages), at least
    0; below 0 for lost passages, which are not the first one and leave more than ``count``.

    The ``first`` passages are among them, as far as they are not lost. The others are the best one, and those with at
    least :data:`SHARE` of the best score, each with the passage after it, into which what it begins may continue. The
    best score may be that of a first passage, because it contains the words of the chat template, with which every
    question ends. Of equal ones the newest are taken. A row that needs fewer than another one has more of the next
    best."""
    last, ranked, needed = scores.shape[1] - 1, [], 1
    for row in scores:
        found = dict.fromkeys((row[:first] >= 0).nonzero()[:, 0].tolist())
        least, other = SHARE * float(row.max()), float(row[first:].max())
        least = other if 0 < other < least else least
        for place in row.flip(0).argsort(descending=True, stable=True)[:count].tolist():
            best = last - place
            for number in range(best, min(best + 1, last) + 1):
                if len(found) < count and row[number] >= 0:
                    found[number] = None
            if row[best] >= least:
                needed = max(needed, len(found))
        ranked.append([*found])
    return torch.tensor([sorted(row[:needed]) for row in ranked], device=scores.device)


def word_scores(ids: Tensor, query: Tensor, weight: Tensor, size: int) -> Tensor:
    """Return BM25 of each passage, (passages,) float32. ids: (passages * ``size``,) int32. query, weight: (n,) int32
    and float32, the words that are looked for, and how much each counts. A pair counts as much as its second word."""
    device, passages = ids.device, len(ids) // size
    words, spelled = query.unique(return_inverse=True)
    code = torch.full((int(torch.maximum(ids.max(), words[-1])) + 1,), -1, device=device)  # the word of a token, or -1
    code[words] = torch.arange(len(words), device=device)
    found = code[ids]
    places = (found >= 0).nonzero()[:, 0]
    found = found[places]
    scores = _bm25(places // size, found, spelled, weight, len(words), passages)
    follows = places[1:] == places[:-1] + 1
    pairs = (found[:-1] * len(words) + found[1:])[follows]
    wanted, spelled = (spelled[:-1] * len(words) + spelled[1:]).unique(return_inverse=True)
    code = torch.full((len(words) ** 2,), -1, device=device)
    code[wanted] = torch.arange(len(wanted), device=device)
    found, places = code[pairs], places[:-1][follows]
    known = found >= 0
    return scores + _bm25(places[known] // size, found[known], spelled, weight[1:], len(wanted), passages)


def _bm25(passage: Tensor, term: Tensor, query: Tensor, weight: Tensor, terms: int, passages: int) -> Tensor:
    """Return the scores of all passages, (passages,). passage, term: (places,), where terms of the question occur.
    query, weight: (n,), the terms of the question, and the weight of each; a term that is asked twice has the greater
    one."""
    counts = torch.bincount(passage * terms + term, minlength=passages * terms).view(passages, terms).float()
    holders = (counts > 0).sum(0)
    rarity = torch.log1p((passages - holders + 0.5) / (holders + 0.5))
    weight = weight.new_zeros(terms).scatter_reduce(0, query, weight, "amax")
    return (counts * (K1 + 1) / (counts + K1)) @ (weight * rarity)
