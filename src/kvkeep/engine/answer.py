"""One answer as it is written: what it wants to read, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from kvkeep.cache import KeepCache
from kvkeep.engine.batch import Read
from kvkeep.engine.pieces import Pieces, Stops
from kvkeep.engine.sampling import Sampling, draw
from kvkeep.engine.verified import Rounds

Reads = Generator[Read, Tensor, None]
"""Yields what is to be read, and is sent the logits (keep, vocabulary) of its last tokens."""


@dataclass(frozen=True)
class Ask:
    """What to generate."""

    prompt: Sequence[int]
    """All token ids before the answer."""
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stops: Sequence[str] = ()
    """Strings that end the answer and are not part of it."""
    top_logprobs: int | None = None
    """How many of the likeliest tokens are reported beside each token; None: no log-probabilities at all."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer and its log-probability."""

    token: int
    text: str
    """Its part of the answer's text: if several tokens make one character, the last of them has it; what a stop string
    cuts off belongs to none."""
    logprob: float
    top: tuple[tuple[int, str, float], ...]
    """The likeliest tokens: id, own text, log-probability."""


@dataclass(frozen=True)
class Piece:
    """Some text of an answer, and the log-probabilities of the tokens since the last piece."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class Answer:
    """The answer to ``ask``, written into ``cache``, which holds the first tokens of the prompt already.

    ends: ids that end a text. listener: is called with each piece of text. Afterwards: tokens (ids, one that ends the
    text included), text, reason ("stop" or "length"; empty while it is written).
    """

    def __init__(
        self, ask: Ask, cache: KeepCache, tokenizer: Any, ends: Sequence[int], listener: Callable[[Piece], None]
    ) -> None:
        self.ask, self.cache, self.ends, self.listener = ask, cache, frozenset(ends), listener
        self._tokenizer = tokenizer
        self.known = cache.get_seq_length()
        self.tokens: list[int] = []
        self.text, self.reason = "", ""
        self._pieces, self._stops = Pieces(tokenizer), Stops(ask.stops)
        self._pending: list[TokenLogprob] = []  # tokens whose text was not fully reported yet
        self._shown = 0  # characters of their text that were

    def reads(self) -> Reads:
        """Read what is new of the prompt, then write until an end."""
        logits = yield Read(self.cache, self.ask.prompt[self.known :])
        device = logits.device
        noise = self.ask.sampling.generator(device) if self.ask.sampling.sampled else None
        processors = self.ask.sampling.processors(len(self.ask.prompt))
        if self.cache.method.recall.drafts:
            yield from self._rounds(logits, processors, noise)
            return
        while True:
            scores = logits[-1:].float()
            if processors:
                scores = processors(torch.tensor([[*self.ask.prompt, *self.tokens]], device=device), scores.clone())
            self.take(int(scores.argmax() if noise is None else draw(scores, noise)), logits[-1])
            if self.reason:
                return
            logits = yield Read(self.cache, self.tokens[-1:])

    def _rounds(self, logits: Tensor, processors: LogitsProcessorList, noise: torch.Generator | None) -> Reads:
        prompt = torch.tensor([[*self.ask.prompt]], device=logits.device)
        logprobs = self.ask.top_logprobs is not None
        config = GenerationConfig(do_sample=noise is not None, return_dict_in_generate=logprobs, output_logits=logprobs)
        ends = StoppingCriteriaList([_Ended(self), MaxLengthCriteria(len(self.ask.prompt) + self.ask.max_tokens)])
        sink = _Sink(self)
        rounds = sink.rounds = Rounds(self.cache, prompt, processors, ends, config, sink, noise)
        rounds.start(logits[-1:], None)
        steps = rounds.rounds()
        try:
            wanted = next(steps, None)
            while wanted is not None:
                ids = wanted.input_ids[0].tolist()
                logits = yield Read(self.cache, ids, len(ids), first=int(wanted.position_ids[0, 0]))
                try:
                    wanted = steps.send(logits[None])
                except StopIteration:
                    return
        finally:
            self.cache.stream.abandon()

    def take(self, token: int, logits: Tensor | None) -> None:
        """Append a token, chosen by ``logits`` (vocabulary,), and report the text that is certain with it."""
        self.tokens.append(token)
        if token in self.ends:
            self._end("stop")
            return
        text = self._pieces.add([token])
        if self.ask.top_logprobs is not None and logits is not None:
            self._pending.append(self._logprob(token, text, logits, self.ask.top_logprobs))
        self._report(self._stops.add(text))
        if self._stops.met:
            self._end("stop")
        elif len(self.tokens) >= self.ask.max_tokens:
            self._end("length")

    def _logprob(self, token: int, text: str, logits: Tensor, top: int) -> TokenLogprob:
        """Return the log-probabilities of a token that was chosen by ``logits`` (vocabulary,)."""
        logs = logits.float().log_softmax(-1)
        best = logs.topk(top)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        likely = tuple((one, str(self._tokenizer.decode([one])), value) for one, value in pairs)
        return TokenLogprob(token, text, float(logs[token]), likely)

    def _end(self, reason: str) -> None:
        if not self._stops.met:
            rest = self._pieces.rest()
            if self._pending:
                self._pending[-1] = replace(self._pending[-1], text=self._pending[-1].text + rest)
            self._report(self._stops.add(rest))
            self._report("" if self._stops.met else self._stops.rest())
        self.reason = reason
        if self._stops.met:  # of what is left only the first token can have begun before the stop string
            self._pending = [replace(one, text=one.text[: self._shown]) for one in self._pending[:1] if self._shown]
        if self._pending:
            self.listener(Piece("", tuple(self._pending)))

    def _report(self, text: str) -> None:
        """Report some text, with the tokens whose text is complete by then."""
        if not text:
            return
        self.text += text
        self._shown += len(text)
        ends = [*accumulate(len(one.text) for one in self._pending)]
        count = sum(end <= self._shown for end in ends)
        self._shown -= ends[count - 1] if count else 0
        done, self._pending = tuple(self._pending[:count]), self._pending[count:]
        self.listener(Piece(text, done))


class _Ended(StoppingCriteria):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.tensor([bool(self._answer.reason)], device=input_ids.device)


class _Sink:
    """The streamer of rounds: hands each token to the answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.rounds: Rounds | None = None

    def put(self, value: Tensor) -> None:
        reported = [] if self.rounds is None else self.rounds.reported[0]
        self._answer.take(int(value), reported[-1][0] if reported else None)

    def end(self) -> None:
        """Nothing is buffered."""
