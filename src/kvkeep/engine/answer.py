"""One answer while it is generated: the tokens that the model reads for it, and the resulting tokens and text."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import KeepCache
from kvkeep.engine.batch import Read
from kvkeep.engine.pieces import Pieces, Stops
from kvkeep.engine.rounds import Rounds, next_input
from kvkeep.engine.sampling import Sampler, Sampling
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
    written: int = 0
    """The number of the prompt's last tokens that belong to the answer, which continues. Their text is not reported."""
    copies: bool = True
    """Whether drafts may be copied from the text (for methods that draft)."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer and its log-probability."""

    token: int
    text: str
    """The token's part of the answer's text. If several tokens form one character, the last token has it. Text that a
    stop string cuts off belongs to no token."""
    logprob: float
    top: tuple[tuple[int, str, float], ...]
    """The likeliest tokens: id, text, log-probability."""


@dataclass(frozen=True)
class TextPiece:
    """A piece of an answer's text, and the log-probabilities of the tokens since the last piece."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


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
        self.text = ""
        self.reason = ""
        """The reason why the answer ended: "eos", "stop", "length", or the result of ``check``; empty until then."""
        self.first_at = self.last_at = 0.0
        """The times when the first and the last token were chosen, by ``time.perf_counter()``."""
        self._pieces = Pieces(tokenizer, ask.prompt[len(ask.prompt) - ask.written :] if listener else ())
        self._stops = Stops(ask.stops)
        self._pending: list[TokenLogprob] = []  # tokens whose text is not fully reported
        self._shown = 0  # reported characters of their text

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
        if self.cache.method.recall.drafts:
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
        """Append a token, chosen by ``logits`` (vocabulary,), and report the text that it completes."""
        self.last_at = time.perf_counter()
        self.first_at = self.first_at or self.last_at
        self.tokens.append(token)
        ended = token in self.ends
        if self.listener is not None and not ended:
            self._add_text(token, logits)
        reason = "" if self.check is None else self.check(self.tokens)
        if ended:
            reason = "eos"
        elif not reason and self._stops.met:
            reason = "stop"
        elif not reason and len(self.tokens) >= self.ask.max_tokens:
            reason = "length"
        if reason:
            self._end(reason)

    def _add_text(self, token: int, logits: Tensor | None) -> None:
        text = self._pieces.add([token])
        if self.ask.top_logprobs is not None and logits is not None:
            self._pending.append(self._logprob(token, text, logits, self.ask.top_logprobs))
        self._report(self._stops.add(text))

    def _logprob(self, token: int, text: str, logits: Tensor, top: int) -> TokenLogprob:
        """Return the log-probability of a token chosen by ``logits`` (vocabulary,), with those of the ``top`` likeliest
        tokens."""
        logs = logits.float().log_softmax(-1)
        best = logs.topk(top)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        likely = tuple((one, str(self._tokenizer.decode([one])), value) for one, value in pairs)
        return TokenLogprob(token, text, float(logs[token]), likely)

    def _end(self, reason: str) -> None:
        self.reason = reason
        if self.listener is None:
            return
        if not self._stops.met:
            rest = self._pieces.rest()
            if self._pending:
                self._pending[-1] = replace(self._pending[-1], text=self._pending[-1].text + rest)
            self._report(self._stops.add(rest))
            self._report("" if self._stops.met else self._stops.rest())
        if self._stops.met:  # only the first pending token can begin before the stop string
            self._pending = [replace(one, text=one.text[: self._shown]) for one in self._pending[:1] if self._shown]
        if self._pending:
            self.listener(TextPiece("", tuple(self._pending)))

    def _report(self, text: str) -> None:
        """Report some text, and the tokens whose text is now complete."""
        if not text or self.listener is None:
            return
        self.text += text
        self._shown += len(text)
        ends = [*accumulate(len(one.text) for one in self._pending)]
        count = sum(end <= self._shown for end in ends)
        self._shown -= ends[count - 1] if count else 0
        done, self._pending = tuple(self._pending[:count]), self._pending[count:]
        self.listener(TextPiece(text, done))
