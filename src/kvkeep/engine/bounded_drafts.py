"""Drafts of a bounded cache (``SELECTOR+verified``): the model drafts tokens with the resident entries.

The next exact pass checks them, so evicted entries are recalled once for all of them.

This is speculative decoding (Leviathan et al., arXiv:2211.17192) in which a model drafts for itself, as in TriForce
(arXiv:2404.11912), MagicDec (arXiv:2408.11049) and QuantSpec (arXiv:2502.10424). Here it works with any model, any
drafting method and any checkpoint.

Sampling: a sample is argmax(p / noise) with exponential noise, as in ``torch.multinomial``. The draft and the exact
pass use the same noise for the same token. So the output is argmax(p / noise) of the exact p. Whatever the draft was,
it is a sample of exactly that distribution (Daliri et al., arXiv:2408.07978).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.cache import KeepCache
from kvkeep.engine.batch import Read
from kvkeep.engine.drafts import Copies, Drafter, Drafts, PassPrices
from kvkeep.engine.pacing import FORGET, Acceptance, Margins
from kvkeep.engine.sampling import Sampler, likeliest

FIRST = 8
"""The number of drafts before the price of one is measured."""


class BoundedDrafts(Drafter):
    """Drafts that a cache makes with its resident entries. prompt: the tokens before the answer. copies: drafts that
    are read instead where they give more tokens a second; None: there are none."""

    def __init__(self, cache: KeepCache, prompt: Tensor, sampler: Sampler, copies: Copies | None) -> None:
        assert cache.draft_passes is not None
        super().__init__(PassPrices(by_rows=False) if copies is None else copies.prices)
        self.cache, self.passes, self.sampler, self.copies = cache, cache.draft_passes, sampler, copies
        self.acceptance, self.margins = Acceptance(8, 1), Margins(sampler.sampled)
        self._prompt = prompt  # (1, tokens)
        self._seconds: float | None = None  # of a draft
        self._choose = True  # whether the resident entries are chosen again before the next draft
        self._drafted = 0  # drafts of the present run
        self._begin: float | None = None  # of the exact pass

    def drafts(self, tokens: Sequence[int], limit: int) -> Drafts:
        """Return the drafts that give the most tokens a second: copies, those of draft passes, or none."""
        copied, rate = ((), 0.0) if self.copies is None else self.copies.copy(tokens, limit)
        count = self._count(min(limit, self.passes.tail - 1))
        self._drafted = 0
        if count and (self._seconds is None or self._rate(count) >= rate):
            copied = yield from self._run(tokens, count)
        self._begin = time.perf_counter()
        return copied

    def _run(self, tokens: Sequence[int], count: int) -> Drafts:
        """Return at most ``count`` drafts after the answer's ``tokens``, until one is not sure."""
        ids = torch.cat([self._prompt, self._prompt.new_tensor([tokens])], 1)
        self.margins.begin()
        try:
            self.passes.begin(self._choose)
            self._choose = False
            begin, drafts, settled = time.perf_counter(), list[int](), True
            while len(drafts) < count and self.margins.sure:
                logits = yield Read(self.cache, [(drafts or tokens)[-1]])
                settled = settled and (self.cache.graph is None or self.cache.graph.settled)
                scores = self.sampler.draft_scores(ids, logits, len(drafts))
                self.margins.note(scores[0])
                drafts.append(likeliest(scores[0]))
                ids = torch.cat([ids, ids.new_tensor([drafts[-1:]])], 1)
        finally:
            self.cache.stream.abandon()
        self._drafted, seconds = len(drafts), (time.perf_counter() - begin) / len(drafts)
        if settled:
            self._seconds = seconds if self._seconds is None else FORGET * self._seconds + (1 - FORGET) * seconds
        return drafts

    def learn(self, drafted: int, taken: Sequence[int], exact: Sequence[Tensor]) -> None:
        """Note the time of the exact pass, and which drafts were right."""
        if self._begin is not None:  # else it was the prompt's pass
            self.prices.note(1 + drafted, time.perf_counter() - self._begin)
        accepted = len(taken) - 1
        self._choose = self._choose or accepted < drafted
        if self._drafted:
            unsure = not self.margins.sure
            self.acceptance.note(min(accepted, drafted - unsure), drafted - unsure, unsure)
            self.margins.learn(exact)
        if self.copies is not None:
            self.copies.learn(drafted, taken, exact)

    def _count(self, longest: int) -> int:
        """Return the number of drafts that gives the most tokens a second."""
        if self._seconds is None:
            return max(0, min(FIRST, longest))
        return max(range(1, longest + 1), key=self._rate, default=0)

    def _rate(self, count: int) -> float:
        """Return the tokens a second of a run of at most ``count`` drafts and its exact pass."""
        assert self._seconds is not None
        seconds = self.acceptance.drafted(count) * self._seconds + self.prices.of(1 + count)
        return self.acceptance.tokens(count) / seconds
