"""Answers while they are generated, and the scheduler that reads for them.

An answer says which tokens the model reads for it, chooses a token from their logits, and decides whether it ends. The
scheduler runs answers in steps. A step reads one token, with its drafts, for every answer in generation, and one chunk
of one prompt. Prompts take turns. A prompt is cut into the same chunks as in a separate session, or into shorter
ones if the answer cannot depend on them. So an answer does not depend on other sessions.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvkeep.cache import KeepCache
from kvkeep.engine.batch import Read, can_pack, forward, without_memory
from kvkeep.engine.bounded_drafts import BoundedDrafts
from kvkeep.engine.drafts import Copies, Drafter, PassPrices, can_draft, expect_drafts, max_drafts, take_back
from kvkeep.engine.pieces import AnswerText, TextPiece
from kvkeep.engine.sampling import NotNumbers, Sampler, Sampling, likeliest
from kvkeep.models.adapter import decoder_of
from kvkeep.passes.record import TextRecord

if TYPE_CHECKING:
    from kvkeep.passes.graphs import StepGraph

CHUNK = 512
"""The number of prompt tokens that one pass reads, if the method allows any number."""
SHORT_CHUNK = 128
"""The number of prompt tokens that one pass reads while other sessions generate and wait for it. A smaller number would
make each prompt token more expensive."""

Reads = Generator[Read, Tensor, None]
"""Yields the tokens that the model reads next, and receives the logits (keep, vocabulary) of the last of them."""


@dataclass(frozen=True)
class Ask:
    """A request for one answer."""

    prompt: Sequence[int]
    """All token ids before the answer."""
    max_tokens: int
    """The maximum number of tokens of the answer; 0: the prompt is only read."""
    sampling: Sampling | Sampler = field(default_factory=Sampling)
    """Sampling settings, or the sampler made from them."""
    stops: Sequence[str] = ()
    """Strings that end the answer and are not part of it."""
    top_logprobs: int | None = None
    """The number of likeliest tokens reported with each token; None: no log-probabilities."""
    named: Collection[int] = ()
    """Special tokens whose names are parts of the answer's text."""


def end_ids(model: Any) -> list[int]:
    """Return the model's end-of-sequence ids."""
    stated = getattr(model.generation_config, "eos_token_id", None)
    return [] if stated is None else torch.as_tensor(stated).flatten().tolist()


def message_end(prompt: Sequence[int], ends: Collection[int]) -> int:
    """Return the number of tokens of a prompt up to the end of its last message: the last token that ends an answer.
    0: the prompt has none."""
    return next((number for number in range(len(prompt), 0, -1) if prompt[number - 1] in ends), 0)


def copies(model: Any) -> bool:
    """Return whether answers of a model may have drafts that are copied from the text: its generation_config has no
    ``prompt_lookup_num_tokens=0``."""
    return getattr(model.generation_config, "prompt_lookup_num_tokens", None) != 0


class Answer:
    """Generates the answer to ``ask`` in ``cache``, which already holds the first tokens of the prompt.

    ends: end-of-sequence ids. listener: called with each piece of text; None: no text is decoded. check: called with
    all tokens after each new one; returns the reason to end, or an empty string.
    """

    def __init__(
        self,
        ask: Ask,
        cache: KeepCache,
        tokenizer: Any,
        ends: Sequence[int],
        listener: Callable[[TextPiece], None] | None,
        check: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.ask, self.cache, self.ends, self.check = ask, cache, frozenset(ends), check
        self.known = cache.get_seq_length()
        """The number of prompt tokens that the cache already held."""
        self.tokens: list[int] = []
        """Ids of the answer, including an end-of-sequence token."""
        self.reason = ""
        """The reason why the answer ended: "eos", "stop", "length", or the result of ``check``; empty until then."""
        self.first_at = self.last_at = 0.0
        """The times when the first and the last token were chosen, by ``time.perf_counter()``."""
        self.drafted = self.accepted = 0
        """The numbers of drafts, and of those that were right."""
        self.drafter: Drafter | None = None
        """Drafts its next tokens; None: it has no drafts."""
        self._text: AnswerText | None = None
        if listener is not None:
            self._text = AnswerText(tokenizer, ask.prompt, ask.stops, ask.top_logprobs, listener, ask.named)

    @property
    def text(self) -> str:
        """The reported text."""
        return "" if self._text is None else str(self._text)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer; None: none has."""
        return None if self._text is None else self._text.stopped

    def reads(self, prices: PassPrices) -> Reads:
        """Read the prompt tokens that the cache does not hold, then generate until the answer ends. prices: those of
        the model's passes."""
        prompt, sampler = self.ask.prompt, self.ask.sampling
        logits = yield Read(self.cache, prompt[self.known :])
        if not self.ask.max_tokens:
            self._end("length")
            return
        if isinstance(sampler, Sampling):
            sampler = sampler.sampler(len(prompt), logits.device)
        ids = prompt_ids = torch.tensor([[*prompt]], device=logits.device)
        drafts: Sequence[int] = ()
        while True:
            before, exact = len(self.tokens), list[Tensor]()
            try:
                for row, draft in zip(logits, [*drafts, None], strict=True):
                    exact.append(sampler.scores(ids, row[None])[0])
                    self.take(likeliest(exact[-1]), row)
                    if sampler.processors:
                        ids = torch.cat([ids, ids.new_tensor([self.tokens[-1:]])], 1)
                    if self.reason or self.tokens[-1] != draft:
                        break
            finally:
                if drafts:
                    take_back(self.cache, 1 + len(drafts) - max(1, len(self.tokens) - before))
            self.drafted += len(drafts)
            self.accepted += len(exact) - 1
            if not before and not self.reason:  # a process tries first whether it can draft; the first token would wait
                self.drafter = self._drafter(sampler, prompt_ids, prices)
            if self.drafter is not None:
                self.drafter.learn(len(drafts), self.tokens[before:], exact)
            if self.reason:
                return
            if self.drafter is not None:
                limit = min(max_drafts(self.cache), self.ask.max_tokens - len(self.tokens) - 1)
                drafts = yield from self.drafter.drafts(self.tokens, limit)
            logits = yield from self._read(drafts)

    def _drafter(self, sampler: Sampler, prompt: Tensor, prices: PassPrices) -> Drafter | None:
        """Return what drafts the tokens after the prompt, (1, tokens)."""
        cache, form, copied = self.cache, sampler.grammar, None
        if not isinstance(cache, KeepCache) or not can_draft(cache):
            return None
        bounded = cache.draft_passes is not None
        if copies(cache.model):
            prices = PassPrices(by_rows=False) if bounded else prices
            copied = Copies(self.ask.prompt, prices, None if form is None else form.forced)
        return BoundedDrafts(cache, prompt, sampler, copied) if bounded else copied

    def _read(self, drafts: Sequence[int]) -> Generator[Read, Tensor, Tensor]:
        """Read the last token and its drafts; return their logits."""
        read = Read(self.cache, [self.tokens[-1], *drafts], 1 + len(drafts))
        if not drafts:
            return (yield read)
        length = self.cache.get_seq_length()
        try:
            expect_drafts(self.cache)
            return (yield read)
        except BaseException:
            take_back(self.cache, max(0, self.cache.get_seq_length() - length - 1))
            raise

    def take(self, token: int, logits: Tensor | None = None) -> None:
        """Append a token, chosen by ``logits`` (vocabulary,), and report the text that it completes. Raises NotNumbers
        if its logit is NaN, which is the likeliest token for ``argmax``."""
        if logits is not None and math.isnan(logits[token]):
            raise NotNumbers
        self.last_at = time.perf_counter()
        self.first_at = self.first_at or self.last_at
        self.tokens.append(token)
        ended = token in self.ends
        if self._text is not None and not ended:
            self._text.add(token, logits)
        reason = "" if self.check is None else self.check(self.tokens)
        if ended:
            reason = "eos"
        elif not reason and self.stopped is not None:
            reason = "stop"
        elif not reason and len(self.tokens) >= self.ask.max_tokens:
            reason = "length"
        if reason:
            self._end(reason)

    def _end(self, reason: str) -> None:
        """End the answer. Raises EntriesLost if its entries on disk have changed since it began."""
        if isinstance(self.cache, KeepCache):  # else it is transformers' own
            self.cache.stream.check_disk()
        self.reason = reason
        if self._text is not None:
            self._text.end()


class ScheduledAnswer:
    """An answer in a scheduler, and the chunks that it reads next. shared: other answers may share its passes."""

    def __init__(self, answer: Answer, shared: bool, prices: PassPrices) -> None:
        self.answer, self.shared = answer, shared
        self._reads = answer.reads(prices)
        self._want(next(self._reads))

    def _want(self, read: Read) -> None:
        """Cut the answer's next read into chunks."""
        chunks = [len(read.ids)]
        if isinstance(read.cache, KeepCache):  # transformers' own takes them at once
            chunks = read.cache.stream.chunks(len(read.ids), chunk_size(read.cache) if self.shared else None)
        self._wanted, self._chunks = read, deque(chunks)  # sizes of the unread chunks

    @property
    def writes(self) -> bool:
        """Whether the prompt has been read and the answer is in generation."""
        return bool(self.answer.tokens)

    def shorten(self) -> None:
        """Shorten the next chunk, because other answers wait for it, if the answer does not depend on chunk boundaries
        and no pass rebuilds evicted entries."""
        cache, chunks = self._wanted.cache, self._chunks
        stored = cache.checkpoint
        rebuilds = stored is not None and (stored.capacity or stored.by_token or stored.replays)
        depends = any(not state.in_order for state in cache.states.values())  # bits of the state, on the chunks
        if not cache.stream.any_chunk or rebuilds or depends:
            return
        if chunks[0] > (part := min(SHORT_CHUNK, chunk_size(cache))):
            chunks[0] -= part
            chunks.appendleft(part)

    @property
    def ends_turn(self) -> bool:
        """Whether the next chunk completes the prompt's turn: ``CHUNK`` tokens, before another prompt's turn."""
        left = sum(self._chunks)
        return -(-(left - self._chunks[0]) // CHUNK) < -(-left // CHUNK)

    def next(self) -> Read:
        """Return the next chunk."""
        read, chunks = self._wanted, self._chunks
        if len(chunks) == 1 and chunks[0] == len(read.ids):
            return read
        start, last = len(read.ids) - sum(chunks), len(chunks) == 1
        return Read(read.cache, read.ids[start : start + chunks[0]], read.keep if last else 0, not last)

    def give(self, result: Tensor | Exception) -> bool:
        """Pass on the logits of a chunk; return whether the answer is complete. Raises the exception of a failed
        pass."""
        if isinstance(result, Exception):
            raise result
        self._chunks.popleft()
        if self._chunks:
            return False
        try:
            self._want(self._reads.send(result))
        except StopIteration:
            return True
        return False

    def close(self) -> None:
        """End the answer at its current token, and forget its drafts."""
        self._reads.close()


@dataclass(frozen=True)
class Result:
    """The result of reading one chunk."""

    scheduled: ScheduledAnswer
    read: Read
    logits: Tensor | Exception
    """Logits of the chunk's last tokens, (keep, vocabulary), or the exception of its pass."""


class Scheduler:
    """Runs the ``answers`` of one model, in steps.

    packed: answers share a pass where they can; otherwise each has a separate pass, with chunks of its cache's size.
    """

    def __init__(self, model: Any, *, packed: bool = True) -> None:
        self.model, self.packed, self.prices = model, packed, PassPrices()
        self.answers: list[ScheduledAnswer] = []

    def add(self, answer: Answer) -> ScheduledAnswer:
        """Schedule an answer."""
        scheduled = ScheduledAnswer(answer, self.packed, self.prices)
        self.answers.append(scheduled)
        return scheduled

    def remove(self, scheduled: ScheduledAnswer) -> None:
        """Remove an answer, and end it at its current token."""
        self.answers.remove(scheduled)
        scheduled.close()

    def step(self) -> list[Result]:
        """Run one read of every answer whose turn it is. The caller passes each result to :meth:`ScheduledAnswer.give`.
        Raises as :func:`~kvkeep.engine.batch.forward` does."""
        turn = self._turn()
        reads = [scheduled.next() for scheduled in turn]
        results: dict[int, Tensor | Exception] = {}
        shared = [
            number
            for number, read in enumerate(reads)
            if self.packed and can_pack(read.cache) and read.cache.geometry.steady(None)
        ]
        single = reads[shared[0]] if len(shared) == 1 else None
        if single is not None and graph_for(single.cache, len(single.ids), single.keep) is not None:
            shared = []
        if shared:
            with self._priced([turn[number] for number in shared], [reads[number] for number in shared]):
                results |= zip(shared, forward(self.model, [reads[number] for number in shared]), strict=True)
        for number, read in enumerate(reads):
            if number not in results:
                with self._priced([turn[number]], [read]):
                    results[number] = forward_one(self.model, read)
        return [Result(scheduled, reads[number], results[number]) for number, scheduled in enumerate(turn)]

    @contextmanager
    def _priced(self, answers: Sequence[ScheduledAnswer], reads: Sequence[Read]) -> Iterator[None]:
        """Measure the pass within the block, if all of its answers are in generation and draft by their prices."""
        begin = time.perf_counter()
        yield
        drafters = [one.answer.drafter if one.writes else None for one in answers]
        if all(one is not None and one.prices is self.prices for one in drafters):
            self.prices.note(sum(len(read.ids) for read in reads), time.perf_counter() - begin)
            self.prices.others = len(answers) - 1

    def _turn(self) -> list[ScheduledAnswer]:
        """Return the answers of the next step: all in generation, and one that reads its prompt."""
        writing = [one for one in self.answers if one.writes]
        reading = [one for one in self.answers if not one.writes]
        if reading and writing:
            reading[0].shorten()
        if reading and reading[0].ends_turn:
            self.answers.remove(reading[0])
            self.answers.append(reading[0])
        return writing + reading[:1]


@torch.no_grad()
def forward_one(model: Any, read: Read) -> Tensor | Exception:
    """Run the model over a single read. Return its logits as :func:`~kvkeep.engine.batch.forward` does, or the
    exception of the failed pass. Raises only torch.AcceleratorError."""
    cache = read.cache
    record = cache.stream.record if isinstance(cache, KeepCache) else TextRecord()
    record.expect_more(read.cut)
    try:
        graph = graph_for(cache, len(read.ids), read.keep)
        if graph is not None and (found := graph.read(model, cache, read.ids[0])) is not None:
            return found
        ids = torch.tensor([[*read.ids]], device=next(model.parameters()).device)
        first = cache.get_seq_length()
        positions = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
        given = {"input_ids": ids, "position_ids": positions, "cache": cache, "use_cache": True}
        if not read.keep and (decoder := decoder_of(model)) is model.base_model:
            decoder(**given)
            return positions.new_empty(0)
        logits: Tensor = model(**given, logits_to_keep=max(1, read.keep)).logits[0]
        return logits
    except torch.AcceleratorError:
        raise
    except Exception as error:
        return without_memory(read, error)
    finally:
        record.expect_more(False)


def graph_for(cache: Any, count: int, keep: int = 1) -> StepGraph | None:
    """Return what may run the next pass of ``cache``, over ``count`` tokens, as a graph of CUDA; None: nothing. keep:
    the number of logits that the pass returns."""
    graph = cache.graph if isinstance(cache, KeepCache) and count == keep == 1 else None
    return graph if graph is not None and graph.possible else None


def chunk_size(cache: KeepCache) -> int:
    """Return the number of prompt tokens that one pass reads into a cache."""
    chunk: int = cache.stream.chunk
    return CHUNK if chunk > CHUNK and cache.stream.any_chunk else chunk
