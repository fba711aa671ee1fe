"""Draft and verify: the exact output of the unbounded cache, mostly at the speed of a bounded one.

In a round, the bounded cache drafts a run of tokens. One exact pass then reads the last token and the whole run, so
evicted entries are recalled once for all of them. A draft is accepted if it equals the choice of the exact pass. That
choice replaces the first draft that differs. This is speculative decoding (Leviathan et al., arXiv:2211.17192) in which
a model drafts for itself, as in TriForce (arXiv:2404.11912), MagicDec (arXiv:2408.11049) and QuantSpec
(arXiv:2502.10424). Here it works with any model, any drafting method and any checkpoint.

Sampling: a sample is argmax(p / noise) with exponential noise, as in ``torch.multinomial``. The draft and the exact
pass use the same noise at the same position. So the output is argmax(p / noise) of the exact p. Whatever the draft was,
it is a sample of exactly that distribution (Daliri et al., arXiv:2408.07978). With the same seed it is the token of
transformers' sampling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.cache import KeepCache
from kvkeep.engine.drafts import CopiedText
from kvkeep.engine.pacing import Margins, Pace
from kvkeep.engine.sampling import Sampler
from kvkeep.stores.readers.round import RoundStatistics


class RoundInput(NamedTuple):
    """The model's next input in a round. The fields are arguments of the model."""

    input_ids: Tensor
    """(rows, n)"""
    attention_mask: Tensor | None
    """Mask of past and new tokens, (rows, slots); None without padding."""
    position_ids: Tensor
    """(rows, n)"""


RoundInputs = Generator[RoundInput, Tensor, None]
"""Yields the model's next input, and receives its logits (rows, n, vocabulary)."""


def next_input(rounds: RoundInputs, logits: Tensor) -> RoundInput | None:
    """Send ``logits`` to ``rounds``; return the next input, or None after the last round."""
    try:
        return rounds.send(logits)
    except StopIteration:
        return None


class Rounds:
    """The rounds of one answer. ``cache`` has read the prompt; the caller runs the model.

    prompts: (rows, tokens). add: called for each new token with its row, the token and the logits (rows, vocabulary)
    that chose it; returns whether it is the row's last. limit: the maximum number of tokens of a row; None: no limit.
    copies: drafts may be copied from the text.
    """

    def __init__(
        self,
        cache: KeepCache,
        prompts: Tensor,
        sampler: Sampler,
        add: Callable[[int, int, Tensor], bool],
        limit: int | None,
        *,
        copies: bool = True,
    ) -> None:
        assert cache.round is not None
        self.stream = cache.stream
        self.cache, self.sampler, self.add, self.limit = cache, sampler, add, limit
        self.rows, self.prompt = prompts.shape
        self.longest = min(cache.round.tail, self.stream.chunk) - 1
        spare = 2 * self.longest + 2
        self.tokens = torch.cat([prompts, prompts.new_zeros(self.rows, spare)], 1)  # grows; drafts follow the tokens
        self.lengths = [self.prompt] * self.rows
        self.finished = [False] * self.rows
        self.texts = [CopiedText(row) for row in prompts.tolist()] if copies else []
        self.pace, self.done, self.margins = Pace(), RoundStatistics(), Margins(sampler.sampled)
        self.cache_round, cache.round.statistics = cache.round, self.done
        self.noise: dict[int, Tensor] = {}  # (rows, vocabulary) by index of the new token
        self.mask: Tensor | None = None  # (rows, slots); None without padding
        self.positions = torch.zeros(self.rows, dtype=torch.long)

    def start(self, logits: Tensor, mask: Tensor | None) -> None:
        """Choose the first token of each row after the prompt."""
        device = self.tokens.device
        padded = mask is not None and not bool(mask.all())
        self.mask = mask if padded else None
        counts = mask.sum(1) if padded and mask is not None else torch.full((self.rows,), self.cache.get_seq_length())
        self.positions = counts.to(device)
        self._take(self._scores(logits[:, None], 0).argmax(-1), [1] * self.rows, logits[:, None])

    # -- a round ------------------------------------------------------------------------------------

    def rounds(self) -> RoundInputs:
        """Decode until all rows are finished."""
        while not all(self.finished):
            yield from self._round()

    def _round(self) -> RoundInputs:
        """Draft a run, verify it, and keep the accepted tokens."""
        begin = time.perf_counter()
        self.cache_round.draft()
        self.margins.begin()
        copied = self._copied_drafts()
        longest = self._max_drafts()
        wanted = self.pace.length(longest) if longest else 0
        copies = copied is not None and longest > 0 and self.pace.prefers_copies(longest, wanted)
        if copies and copied is not None:
            drafts = copied[:, :longest]
            self._note_drafts(drafts)
        else:
            drafts = yield from self._draft(wanted)
        drafted = time.perf_counter()
        self.cache_round.verify()
        last = self.tokens[torch.arange(self.rows), [length - 1 for length in self.lengths]][:, None]
        logits = yield self._input(torch.cat([last, drafts], 1), 0)
        scores = self._scores(logits, drafts.shape[1])
        chosen = scores.argmax(-1)
        right = (drafts == chosen[:, : drafts.shape[1]]).long().cumprod(1).sum(1).tolist()  # leading drafts that agree
        counts = [0 if done else count + 1 for count, done in zip(right, self.finished, strict=True)]
        self.margins.learn(scores, counts)
        if any(self.cache.is_sliding):  # sliding windows count slots, so rows advance together
            counts = [min(count for count in counts if count)] * self.rows
        active = [not done for done in self.finished]
        kept = self._take(chosen, counts, logits)
        if any(self.cache.is_sliding):
            kept = [max(kept)] * self.rows
        agreed = all(count == drafts.shape[1] + 1 for count, live in zip(counts, active, strict=True) if live)
        self._commit(kept, agreed)
        end = time.perf_counter()
        self._learn(drafts, copied, copies, right, kept, active, drafted - begin, end - drafted)

    def _max_drafts(self) -> int:
        """Return the maximum number of drafts; each row needs space for one more token."""
        shortest = min(length for length, done in zip(self.lengths, self.finished, strict=True) if not done)
        longest = self.longest
        if self.limit is not None:
            longest = min(longest, self.limit - shortest - 1)
        if (positions := self.cache.geometry.max_positions) is not None:
            longest = min(longest, positions - int(self.positions.max()) - 1)
        return max(0, longest)

    def _draft(self, count: int) -> Generator[RoundInput, Tensor, Tensor]:
        """Draft at most ``count`` tokens for each row from the resident entries, until every row has one that is not
        sure."""
        rows = torch.arange(self.rows)
        last = self.tokens[rows, [length - 1 for length in self.lengths]][:, None]
        drafts = last[:, :0]
        for number in range(count):
            logits = yield self._input(last, number)
            scores = self._scores(logits, 0, ahead=number)
            last = scores.argmax(-1)
            drafts = torch.cat([drafts, last], 1)
            self._note_drafts(drafts)
            self.margins.note(scores[:, 0])
            if not self.margins.sure_in([not done for done in self.finished]):
                break
        return drafts

    def _copied_drafts(self) -> Tensor | None:
        """Return drafts copied from the text, (rows, longest); None unless every unfinished row has some."""
        if not self.texts or not self.longest:
            return None
        runs = [
            [0] * self.longest if done else [*text.copy(self.longest).tokens]
            for text, done in zip(self.texts, self.finished, strict=True)
        ]
        return torch.tensor(runs, device=self.tokens.device) if all(runs) else None

    def _note_drafts(self, drafts: Tensor) -> None:
        """Write drafts after each row's tokens, for the logits processors."""
        for row, length in enumerate(self.lengths):
            self.tokens[row, length : length + drafts.shape[1]] = drafts[row]

    def _input(self, ids: Tensor, before: int) -> RoundInput:
        """Return the input for ``ids`` (rows, n), which follow the tokens and ``before`` drafts."""
        positions = self.positions[:, None] + torch.arange(before, before + ids.shape[1], device=ids.device)
        mask = self.mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(self.rows, before + ids.shape[1])], 1)
        return RoundInput(ids, mask, positions)

    def _take(self, chosen: Tensor, counts: Sequence[int], logits: Tensor) -> list[int]:
        """Append the first ``counts`` chosen tokens to each row until it is finished; return the numbers appended."""
        taken = []
        longest = max(self.lengths) + chosen.shape[1] + self.longest + 2
        if longest > self.tokens.shape[1]:
            self.tokens = torch.cat([self.tokens, self.tokens.new_zeros(self.rows, longest)], 1)
        for row, tokens in enumerate(chosen.tolist()):
            count = 0
            while not self.finished[row] and count < counts[row]:
                self.tokens[row, self.lengths[row]] = tokens[count]
                self.lengths[row] += 1
                if self.texts:
                    self.texts[row].add(tokens[count])
                self.finished[row] = self.add(row, tokens[count], logits[:, count])
                count += 1
            taken.append(count)
        return taken

    def _commit(self, counts: list[int], agreed: bool) -> None:
        self.cache_round.commit(counts, agreed)
        real = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        real = real.to(self.tokens.device)
        self.positions = self.positions + real.sum(1)
        if self.mask is not None or min(counts) < max(counts):
            before = self.mask
            if before is None:
                before = torch.ones(self.rows, self.cache.get_seq_length() - max(counts), dtype=torch.long)
                before = before.to(real.device)
            self.mask = torch.cat([before, real.to(before.dtype)], 1)

    def _learn(
        self,
        drafts: Tensor,
        copied: Tensor | None,
        copies: bool,
        right: list[int],
        kept: list[int],
        active: list[bool],
        drafting_s: float,
        verifying_s: float,
    ) -> None:
        """Record the round's times and acceptance. Copies are also judged in rounds that did not use them."""
        count, done = drafts.shape[1], self.done
        mean = sum(n for n, live in zip(right, active, strict=True) if live) // sum(active)
        self.pace.record(0 if copies else count, drafting_s, verifying_s)
        if not copies:
            ended = bool(count) and not self.margins.sure_in(active)
            self.pace.drafts.note(min(mean, count - ended), count - ended, ended)
        if copied is not None:
            hits = [
                _agreeing(copied[row].tolist(), self.tokens[row, length - kept[row] : length].tolist())
                for row, length in enumerate(self.lengths)
                if active[row]
            ]
            judged = max(kept)
            self.pace.copies.note(sum(hits) // len(hits), judged)
        done.rounds += 1
        done.drafted += 0 if copies else count * sum(active)
        done.copied += count * sum(active) if copies else 0
        done.accepted += sum(n for n, live in zip(right, active, strict=True) if live)
        done.drafting_s += drafting_s
        done.verifying_s += verifying_s

    # -- choosing tokens ----------------------------------------------------------------------------

    def _scores(self, logits: Tensor, drafts: int, ahead: int = 0) -> Tensor:
        """Return the scores (rows, positions, vocabulary) whose largest is the next token, at each of the last
        ``drafts`` + 1 positions.

        logits: (rows, positions, vocabulary). ahead: the number of drafts before the first position.
        """
        if not self.sampler.processors and not self.sampler.sampled:
            return logits
        columns = []
        for number in range(drafts + 1):
            scores = self._processed(logits[:, number], ahead + number)
            if self.sampler.sampled:
                probabilities = scores.softmax(-1)
                scores = probabilities / self._noise(probabilities, ahead + number)
            columns.append(scores)
        return torch.stack(columns, 1)

    def _processed(self, logits: Tensor, ahead: int) -> Tensor:
        """Return the processed logits, (rows, vocabulary)."""
        scores = logits.new_empty(logits.shape, dtype=torch.float32)
        for length in set(self.lengths):  # processors may depend on the whole batch
            rows = [row for row in range(self.rows) if self.lengths[row] == length]
            fresh = logits.to(copy=True, dtype=torch.float32)
            scores[rows] = self.sampler.processors(self.tokens[:, : length + ahead], fresh)[rows]
        return scores

    def _noise(self, like: Tensor, ahead: int) -> Tensor:
        """Return the noise of each row's token that comes ``ahead`` tokens after the next. Noise is drawn once per
        token, in order."""
        numbers = [length - self.prompt + ahead for length in self.lengths]
        oldest = min(number for number, done in zip(numbers, self.finished, strict=True) if not done) - ahead
        for number in [number for number in self.noise if number < oldest]:
            del self.noise[number]
        for number in range(max(self.noise, default=oldest - 1) + 1, max(numbers) + 1):
            self.noise[number] = self.sampler.noise(like)
        rows = [self.noise.get(number, like)[row] for row, number in enumerate(numbers)]  # finished rows: any value
        return torch.stack(rows)


def _agreeing(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
