"""One answer while it is generated: the tokens that the model reads for it, and the resulting tokens and text."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import KeepCache
from kvkeep.engine.batch import Read
from kvkeep.engine.pieces import Pieces, Stops, pieces_of
from kvkeep.engine.rounds import Rounds, next_input
from kvkeep.engine.sampling import NotNumbers, Sampler, Sampling
from kvkeep.errors import KvkeepError

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
    copies: bool = True
    """Whether drafts may be copied from the text (for methods that draft)."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer and its log-probability."""

    token: int
    text: str
    """The token's part of the answer's text. If several tokens form one character, the last token has it. Text that a
    stop string cuts off belongs to no token."""
    data: bytes
    """The token's own bytes: those of all tokens form the UTF-8 of the answer's text. A special token has none."""
    logprob: float
    top: tuple[tuple[int, bytes, float], ...]
    """The likeliest tokens: id, bytes that the token would add (a special token: its name), log-probability."""


@dataclass(frozen=True)
class TextPiece:
    """A piece of an answer's text, and the log-probabilities of the tokens since the last piece."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class _Pending:
    """A token whose bytes are not all reported."""

    logprob: TokenLogprob
    start: int
    """Characters of the answer's text before the token's part."""
    end: int
    """Characters of the answer's text that have to be reported before the token is."""
    from_earlier: int
    """Bytes of the part's first character that belong to earlier tokens."""

    def cut(self, characters: int) -> TokenLogprob:
        """Return the token without what follows the first ``characters`` of the answer's text."""
        text = self.logprob.text[: characters - self.start]
        return replace(
            self.logprob, text=text, data=self.logprob.data[: max(0, len(text.encode()) - self.from_earlier)]
        )


def end_ids(model: Any) -> list[int]:
    """Return the model's end-of-sequence ids."""
    stated = getattr(model.generation_config, "eos_token_id", None)
    return [] if stated is None else torch.as_tensor(stated).flatten().tolist()


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
        self.ask, self.cache, self.ends, self.listener, self.check = ask, cache, frozenset(ends), listener, check
        self._tokenizer = tokenizer
        self.known = cache.get_seq_length()
        """The number of prompt tokens that the cache already held."""
        self.tokens: list[int] = []
        """Ids of the answer, including an end-of-sequence token."""
        self.reason = ""
        """The reason why the answer ended: "eos", "stop", "length", or the result of ``check``; empty until then."""
        self.first_at = self.last_at = 0.0
        """The times when the first and the last token were chosen, by ``time.perf_counter()``."""
        self._pieces = None if listener is None else pieces_of(tokenizer, ask.prompt)
        self._stops = Stops(ask.stops)
        self._texts: list[str] = []  # the reported text
        self._decoded = self._shown = 0  # characters of the text that were decoded, and reported
        self._pending = deque[_Pending]()

    @property
    def text(self) -> str:
        """The reported text."""
        return "".join(self._texts)

    def reads(self) -> Reads:
        """Read the prompt tokens that the cache does not hold, then generate until the answer ends."""
        prompt, sampler = self.ask.prompt, self.ask.sampling
        logits = yield Read(self.cache, prompt[self.known :])
        if not self.ask.max_tokens:
            self._end("length")
            return
        if isinstance(sampler, Sampling):
            sampler = sampler.sampler(len(prompt), logits.device)
        ids = torch.tensor([[*prompt]], device=logits.device)
        if isinstance(self.cache, KeepCache) and self.cache.method.recall.drafts:
            yield from self._rounds(ids, logits, sampler)
            return
        while True:
            self.take(sampler.next(ids, logits[-1:]), logits[-1])
            if self.reason:
                return
            if sampler.processors:
                ids = torch.cat([ids, ids.new_tensor([self.tokens[-1:]])], 1)
            logits = yield Read(self.cache, self.tokens[-1:])

    def _rounds(self, prompt: Tensor, logits: Tensor, sampler: Sampler) -> Reads:
        """Generate in rounds of draft and verify."""
        self.cache.compress()
        limit = prompt.shape[1] + self.ask.max_tokens
        rounds = Rounds(self.cache, prompt, sampler, self._taken, limit, copies=self.ask.copies)
        rounds.start(logits[-1:], None)
        steps = rounds.rounds()
        try:
            wanted = next(steps, None)
            while wanted is not None:
                ids = wanted.input_ids[0].tolist()
                logits = yield Read(self.cache, ids, len(ids), first=int(wanted.position_ids[0, 0]))
                wanted = next_input(steps, logits[None])
        except BaseException:
            with suppress(KvkeepError):  # raised again at the next use of the cache
                self.cache.stream.abandon()
            raise
        self.cache.stream.abandon()

    def _taken(self, row: int, token: int, logits: Tensor) -> bool:
        """Add a token of a round, chosen by ``logits`` (1, vocabulary); return whether it is the last."""
        self.take(token, logits[row])
        return bool(self.reason)

    def take(self, token: int, logits: Tensor | None = None) -> None:
        """Append a token, chosen by ``logits`` (vocabulary,), and report the text that it completes. Raises NotNumbers
        if its logit is NaN, which is the likeliest token for ``argmax``."""
        if logits is not None and math.isnan(logits[token]):
            raise NotNumbers
        self.last_at = time.perf_counter()
        self.first_at = self.first_at or self.last_at
        self.tokens.append(token)
        ended = token in self.ends
        if self._pieces is not None and not ended:
            self._add_text(self._pieces, token, logits)
        reason = "" if self.check is None else self.check(self.tokens)
        if ended:
            reason = "eos"
        elif not reason and self._stops.met:
            reason = "stop"
        elif not reason and len(self.tokens) >= self.ask.max_tokens:
            reason = "length"
        if reason:
            self._end(reason)

    def _add_text(self, pieces: Pieces, token: int, logits: Tensor | None) -> None:
        wanted, from_earlier, start = self.ask.top_logprobs, pieces.withheld, self._decoded
        made = None if wanted is None or logits is None else self._logprob(pieces, token, logits, wanted)
        text = pieces.add([token])
        self._decoded += len(text)
        if made is not None:
            end = self._decoded + bool(pieces.withheld)
            self._pending.append(_Pending(replace(made, text=text), start, end, from_earlier))
        self._report(self._stops.add(text))

    def _logprob(self, pieces: Pieces, token: int, logits: Tensor, top: int) -> TokenLogprob:
        """Return the log-probability of a token chosen by ``logits`` (vocabulary,), with those of the ``top`` likeliest
        tokens. The token is not in ``pieces`` yet."""
        logs = logits.float().log_softmax(-1)
        best = logs.topk(top)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        likely = tuple((one, pieces.data(one, named=True), value) for one, value in pairs)
        return TokenLogprob(token, "", pieces.data(token), float(logs[token]), likely)

    def _end(self, reason: str) -> None:
        """End the answer. Raises EntriesLost if its entries on disk have changed since it began."""
        if isinstance(self.cache, KeepCache):  # else it is transformers' own
            self.cache.stream.check_disk()
        self.reason = reason
        if self._pieces is None or self.listener is None:
            return
        if not self._stops.met:
            rest = self._pieces.rest()
            self._decoded += len(rest)
            if rest and self._pending:
                last = self._pending.pop()
                self._pending.append(replace(last, logprob=replace(last.logprob, text=last.logprob.text + rest)))
            self._report(self._stops.add(rest))
            self._report("" if self._stops.met else self._stops.rest())
        cut = [one.cut(self._shown) for one in [*self._pending][:1]]  # only the first can begin in the reported text
        left = tuple(one for one in cut if one.data) if self._stops.met else tuple(one.logprob for one in self._pending)
        if left:
            self.listener(TextPiece("", left))

    def _report(self, text: str) -> None:
        """Report some text, and the tokens whose bytes it has."""
        if not text or self.listener is None:
            return
        self._texts.append(text)
        self._shown += len(text)
        done = list[TokenLogprob]()
        while self._pending and self._pending[0].end <= self._shown:
            done.append(self._pending.popleft().logprob)
        self.listener(TextPiece(text, tuple(done)))
