"""Answers to requests: from their fields to the engine, and from its events, buffered until the client reads them, to
a reply."""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from kvkeep.blocks.records import Records
from kvkeep.decode.answer_form import Answers, Calls
from kvkeep.engine.answer import Ask
from kvkeep.engine.grammar import Grammar, vocabulary
from kvkeep.engine.pieces import TextPiece, token_texts
from kvkeep.engine.sampling import default_sampling
from kvkeep.engine.token_spelling import special_ids
from kvkeep.errors import EngineStopping
from kvkeep.models.loading import Loaded
from kvkeep.policies.endless import endless_options
from kvkeep.policies.methods import Request as CacheRequest
from kvkeep.policies.methods import resolve
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.body import Hold, in_worker, json_response, unless_disconnected
from kvkeep.serve.http.errors import APIError, naming_field
from kvkeep.serve.http.kept_answers import KeptAnswer, KeptAnswers
from kvkeep.serve.http.metrics import Metrics
from kvkeep.serve.http.protocol import (
    AnswerRequest,
    Context,
    EncodedPrompt,
    FormOf,
    Progress,
    Prompt,
    Reply,
    StreamEvent,
    encoded,
)
from kvkeep.serve.http.reuse import AnswerRecords, Reuse
from kvkeep.serve.session import Event, Finished, Job, check_name

request_log = logging.getLogger("kvkeep.requests")
"""At level INFO, one line per request at its end: id (the response's ``x-request-id``), method, path, status and
seconds; and one per answer: the id, and what its prompt reused."""
DEFAULT_MAX_TOKENS = 1024
"""Maximum tokens of an answer whose request names none; fewer if the model's context has less room."""
MAX_ANSWER_TOKENS = 2**31
"""The maximum length of an answer if the context has no limit: positions are int32."""
MAX_LOGPROBS = 200_000
"""Log-probabilities of an answer that is sent at once: about 230 bytes each, until they are sent."""
FIRST_EVENT_TIMEOUT_S = 3.0
"""Seconds for the first event to decide the status of a response. After them, or once the prompt is being read for
:data:`PROGRESS_S` seconds, a stream begins without it."""
PROGRESS_S = 1.0
"""Seconds without an event until a stream gets a comment: its client sees the progress, and no proxy closes it."""
MAX_PIECE_TOKENS, MAX_PIECE_CHARACTERS = 16, 4096
"""Tokens with log-probabilities, and characters, of pieces that are joined. Writing one as JSON takes a few
milliseconds, in which the event loop does nothing else."""
MAX_BUFFERED_BYTES = 8_000_000
"""Bytes of unread events. A stream whose client falls further behind ends."""
_TOKEN_BYTES, _TOP_BYTES = 250, 150
"""Bytes of a token's log-probability, and of each of the likeliest tokens with it."""
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers of a stream: nginx forwards it without buffering."""


@dataclass
class Limits:
    """Limits of one key."""

    answers: int | None = None
    """Simultaneous requests, including waiting ones; None: no limit."""
    seconds: float | None = None
    """Seconds of one request, including waiting; None: no limit."""
    running: Counter[str] = field(default_factory=Counter)
    """Running requests by owner."""

    def check(self, owner: str) -> None:
        """Raise APIError if the key has reached its limit."""
        if self.answers is not None and self.running[owner] >= self.answers:
            sentence = f"This key already has {self.answers} requests under way; retry when one has finished."
            raise APIError(429, sentence, "too_many_answers")

    def release(self, owner: str) -> None:
        """Count one request less."""
        self.running[owner] -= 1
        if not self.running[owner]:
            del self.running[owner]


class Answering:
    """Answers requests for one model, of any protocol. Worker threads use the tokenizer at the same time, and change
    none of its settings. The event loop never uses it, because it must not block. as_sent: whether lines that change
    with each session stay where they are."""

    def __init__(self, engine: Engine, loaded: Loaded, limits: Limits, metrics: Metrics, as_sent: bool = False) -> None:
        self._as_sent = as_sent
        self.engine, self.model, self.limits, self.metrics = engine, loaded.name, limits, metrics
        self.sampling = default_sampling(loaded.model)
        """The sampling of an answer whose request gives none."""
        self.kept = KeptAnswers()
        store = engine.sessions.storage.store
        self.records = Records() if store is None else store.records
        """What was answered."""
        self._answers = AnswerRecords(loaded.tokenizer, engine.geometry.vocab_size, engine.ends)
        self._tokenizer = loaded.tokenizer
        self._tokenizer("")  # resets the truncation and padding of a file, which must not happen in a worker

    async def respond(self, request: Request, body: AnswerRequest) -> Any:
        """Return the response to a request, complete or as a stream. If the client disconnects, the answer is
        cancelled, unless the request names it: then the server completes and keeps it."""
        self.check_model(body.model)
        if body.kvkeep.answer is None:
            return await self._respond(request, body)
        key = (request.state.owner, str(body.kvkeep.session), body.kvkeep.answer)
        kept = self.kept.begin(key)
        try:
            return await self._respond(request, body, kept)
        except BaseException:
            self.kept.remove(key, kept)
            raise

    async def _respond(self, request: Request, body: AnswerRequest, kept: KeptAnswer | None = None) -> Any:
        owner, hold = request.state.owner, request.state.hold
        self.limits.check(owner)  # before anything that grows with the body
        name = None if body.kvkeep.session is None else (owner, body.kvkeep.session)
        cache = await asyncio.to_thread(self._cache, name, body)
        encoding = self.encode(body.given, hold.bytes, owner)
        encoded_prompt = await (encoding if kept else unless_disconnected(request, encoding))
        prompt = encoded_prompt.ids
        answers = await in_worker(hold.bytes, body.answers, self._tokenizer, prompt)
        form = body.form()
        grammar = None if form is None else await in_worker(hold.bytes, self._grammar, *form, answers)
        hold.tokens(len(prompt))
        limit = self._max_tokens(body.token_limit, prompt, cache)
        self._check_bias(body.bias)
        asks = body.asks(prompt, limit, self.sampling, grammar, answers)
        notes = [*encoded_prompt.notes, *_notes(answers, body.calls(), grammar)]
        reuse = Reuse(self._tokenizer, prompt, encoded_prompt.messages, notes)
        report = functools.cache(
            reuse.report
        )  # it may decode the prompt, so `remember` calls it first, in a worker thread
        context = Context(self.model, uuid.uuid4().hex, len(prompt), self.metrics.rejected, answers, report)
        contexts = [replace(context, index=number) for number in range(len(asks))]
        replies, remembered = [body.reply(one) for one in contexts], [body.answered(one) for one in contexts]
        stream, named = body.stream, bool(body.cache())
        if not stream:
            _check_logprobs(asks)
        if name is not None and len(asks) > 1:
            sentence = "'n' is above 1, but a session continues with one answer; leave out one of them."
            raise APIError(400, sentence, "invalid_value", "n")
        del body  # its texts, while the answer waits
        submit = partial(self.engine.submit, name=name, owner=owner, names_cache=named, **cache)
        running = list[AnswerEvents]()
        try:
            for ask in asks:
                one = partial(submit, ask)
                running.append(AnswerEvents(one, self.limits, owner, stream, self.metrics.finished))
        except BaseException:
            for answer in running:
                answer.disconnect()
            raise

        def remember(number: int, event: StreamEvent) -> None:
            if isinstance(event, Finished) and (reused := report(event).get("reuse")):
                request_log.info("%s %s", request.state.request_id, reused)
            if (answered := remembered[number]) is not None and isinstance(event, Finished):
                self._answers.remember(self.records.of(owner), answered(event), event, answers.format)

        if kept is not None:
            (answer,), (reply,) = running, replies
            events = _with_last(answer.events(await answer.first()), partial(remember, 0))
            kept.fill(reply.stream(events), answer.stop, partial(self._end_kept, hold.moved()))
            return StreamingResponse(kept.follow(), media_type="text/event-stream", headers=STREAM_HEADERS)
        if stream:
            first = await unless_disconnected(request, running[0].first())
            streams = [
                reply.stream(_with_last(_later(answer) if number else answer.events(first), partial(remember, number)))
                for number, (reply, answer) in enumerate(zip(replies, running, strict=True))
            ]
            text = _closing(streams, running)
            return StreamingResponse(text, media_type="text/event-stream", headers=STREAM_HEADERS)
        try:
            found = await unless_disconnected(request, _all(running))
            for number, each in enumerate(found):
                await asyncio.to_thread(remember, number, each[-1])
            return await json_response(_joined, replies, found)
        finally:
            for answer in running:
                answer.disconnect()

    def _end_kept(self, hold: Hold) -> None:
        """Release what an answer needed that is kept and has ended."""
        hold.release()
        self.kept.trim()

    def check_model(self, name: str | None) -> None:
        """Raise APIError unless a request names this model."""
        if name not in (None, self.model):
            sentence = f"The model '{name}' does not exist; this server has '{self.model}'."
            raise APIError(404, sentence, "model_not_found", "model")

    def _check_bias(self, bias: Mapping[int, float]) -> None:
        size = self.engine.geometry.vocab_size
        if any(token >= size for token in bias):
            sentence = f"'logit_bias' has an id that is not in the model's vocabulary of {size} tokens."
            raise APIError(400, sentence, "invalid_value", "logit_bias")

    def _cache(self, name: tuple[str, str] | None, body: AnswerRequest) -> dict[str, Any]:
        """Return the cache options of a request; an empty dict if it has none. Raises APIError, with the field, for a
        wrong session name, method, budget or end. A method that may name a file is wrong unless it is the server's
        method."""
        cache = body.cache()
        if name is not None:
            with naming_field("kvkeep.session"):
                check_name(name)
        if cache:
            method = cache.get("method", "full")
            with naming_field("kvkeep.method"):
                resolve(method, files=method == CacheRequest.parse(**self.engine.cache).method.name)
            with naming_field("kvkeep.budget"):
                CacheRequest.parse(**cache)
        if body.kvkeep.at_end is not None:
            with naming_field("kvkeep.at_end"):
                return endless_options(cache or self.engine.cache, self.engine.geometry)
        return cache

    def _max_tokens(self, wanted: int | None, prompt: list[int], cache: Mapping[str, Any]) -> int:
        """Return the maximum number of tokens of an answer with these cache options: the wanted one, if the model's
        context has as many after the prompt."""
        context = self.engine.positions(cache)
        if context is None:
            if wanted is not None and wanted > MAX_ANSWER_TOKENS:
                sentence = f"'max_tokens' is {wanted}; an answer has at most {MAX_ANSWER_TOKENS} tokens."
                raise APIError(400, sentence, "invalid_value", "max_tokens")
            return DEFAULT_MAX_TOKENS if wanted is None else wanted
        left = context - len(prompt)
        if wanted is None:
            return max(1, min(left, DEFAULT_MAX_TOKENS))
        return min(wanted, left) if left > 0 else wanted  # agents ask for more than small models have

    # -- tokens -------------------------------------------------------------------------------------------

    async def encode(self, given: Callable[[], Prompt], size: int, owner: str) -> EncodedPrompt:
        """Return the token ids of a prompt (:func:`~kvkeep.serve.http.protocol.encoded`). given: returns it, in a
        worker thread. size: bytes of the request. owner: whose earlier answers it may have."""
        vocabulary, generated = self.engine.geometry.vocab_size, partial(self._answers.find, self.records.of(owner))
        return await in_worker(size, lambda: encoded(given(), self._tokenizer, vocabulary, generated, self._as_sent))

    def _grammar(self, field: str, form: FormOf, answers: Answers) -> Grammar:
        """Return the compiled form of an answer. Raises APIError, with the field, for a wrong one."""
        with naming_field(field):
            known = vocabulary(self._tokenizer, self.engine.geometry.vocab_size, self.engine.ends)
            return Grammar(known, form(answers, known))

    def token_texts(self, ids: Sequence[int]) -> tuple[list[str], list[int]]:
        """Return the text of each id and the places of special tokens. The joined texts are the whole text."""
        special = special_ids(self._tokenizer).union(self._tokenizer.all_special_ids)
        return token_texts(self._tokenizer, ids), [place for place, one in enumerate(ids) if one in special]


def _check_logprobs(asks: Sequence[Ask]) -> None:
    """Raise APIError if answers that are sent at once may have too many log-probabilities."""
    ask, limit = asks[0], MAX_LOGPROBS // len(asks)
    if ask.top_logprobs is None or ask.max_tokens * (1 + ask.top_logprobs) <= limit:
        return
    sentence = (
        f"An answer that is not a stream has at most {MAX_LOGPROBS:,} log-probabilities, those of likeliest tokens "
        f"included; set 'max_tokens' to at most {limit // (1 + ask.top_logprobs)}, or send 'stream': true."
    )
    raise APIError(400, sentence, "invalid_value", "max_tokens")


def _notes(answers: Answers, calls: Calls, grammar: Grammar | None) -> Iterator[str]:
    """Yield sentences on how calls differ from what their request may expect."""
    if calls.tools and answers.format.plain:
        yield "The model's chat template supports no tools; the prompt describes them in a plain format."
    if grammar is not None and grammar.ignored:
        yield f"Calls may disobey these words of the tools' schemas: {', '.join(grammar.ignored)}."


async def _with_last(
    events: AsyncIterator[StreamEvent | Progress], work: Callable[[StreamEvent], None]
) -> AsyncIterator[StreamEvent | Progress]:
    """Yield from events; before the last one, do ``work`` with it in a thread."""
    async for event in events:
        if isinstance(event, Finished):
            await asyncio.to_thread(work, event)
        yield event


async def _later(answer: AnswerEvents) -> AsyncIterator[StreamEvent | Progress]:
    """Yield the events of an answer whose stream has begun with another answer."""
    try:
        first = await answer.first()
    except Exception as error:  # the stream says what is wrong
        yield error
        return
    async for event in answer.events(first):
        yield event


async def _all(running: Sequence[AnswerEvents]) -> list[list[StreamEvent]]:
    """Return all events of answers."""
    return [await answer.all() for answer in running]


def _joined(replies: Sequence[Reply], events: Sequence[Sequence[StreamEvent]]) -> Mapping[str, Any]:
    """Return the replies with the answers to a request as one. Raises the error that ended one of them."""
    found = [reply.complete(each) for reply, each in zip(replies, events, strict=True)]
    if len(found) == 1:
        return found[0]
    choices = [choice for one in found for choice in one["choices"]]
    return {**found[0], "choices": choices, "usage": found[-1]["usage"]}


async def _closing(streams: Sequence[AsyncIterator[str]], running: Sequence[AnswerEvents]) -> AsyncIterator[str]:
    """Yield from streams, one after the other, and cancel their answers when the stream is closed."""
    try:
        for text in streams:
            async for one in text:
                yield one
    finally:
        for answer in running:
            answer.disconnect()


# -- events -----------------------------------------------------------------------------------------------


class EventBuffer:
    """Unsent events. Small pieces are joined if they arrive faster than they are read. No text is lost, and the engine
    does not wait."""

    def __init__(self) -> None:
        self.bytes = 0
        """About the bytes of the pieces."""
        self._pieces = deque[TextPiece]()
        self._last: StreamEvent | None = None
        self._available = asyncio.Event()

    def put(self, event: StreamEvent) -> None:
        """Add an event. After the end there are no more."""
        if self._last is not None:
            return
        if not isinstance(event, TextPiece):
            self.end(event)
            return
        self.bytes += _bytes(event)
        if self._pieces and _small(self._pieces[-1], event):
            before = self._pieces.pop()
            event = TextPiece(before.text + event.text, before.logprobs + event.logprobs)
        self._pieces.append(event)
        self._available.set()

    def end(self, last: StreamEvent) -> None:
        """Add the last event."""
        self._last = last
        self._available.set()

    async def get(self, timeout: float | None = None) -> StreamEvent | None:
        """Return the next pieces joined, or the last event; None after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._available.wait()
        except TimeoutError:
            return None
        if not self._pieces:
            return self._last
        piece = self._pieces.popleft()
        self.bytes -= _bytes(piece)
        if not self._pieces and self._last is None:
            self._available.clear()
        return piece


def _small(one: TextPiece, other: TextPiece) -> bool:
    """Return whether two pieces are one of a size that is written at once."""
    tokens, characters = len(one.logprobs) + len(other.logprobs), len(one.text) + len(other.text)
    return tokens <= MAX_PIECE_TOKENS and characters <= MAX_PIECE_CHARACTERS


def _bytes(piece: TextPiece) -> int:
    return len(piece.text) + sum(_TOKEN_BYTES + _TOP_BYTES * len(one.top) for one in piece.logprobs)


class AnswerEvents:
    """The events of a request that is submitted to the engine for ``owner``.

    submit: submits it with a listener. streams: whether its client reads the answer as a stream. count: called with
    each event, in the engine's thread. Raises APIError for a key at its limit, and the errors of ``submit``.
    """

    def __init__(
        self,
        submit: Callable[[Callable[[Event], None]], Job],
        limits: Limits,
        owner: str,
        streams: bool,
        count: Callable[[StreamEvent], None],
    ) -> None:
        loop, self._events = asyncio.get_running_loop(), EventBuffer()
        self._limits, self._owner, self._streams = limits, owner, streams
        self._timed_out = self._disconnected = self._stopped = False

        def listener(event: Event) -> None:
            found = self._reported(event)
            count(found)
            loop.call_soon_threadsafe(self._put, found)

        limits.check(owner)
        limits.running[owner] += 1
        try:
            self.job = submit(listener)
        except BaseException:
            limits.release(owner)
            raise
        self._timer = None if limits.seconds is None else loop.call_later(limits.seconds, self._time_out)

    def _time_out(self) -> None:
        self._timed_out = True
        self.job.cancel()

    def stop(self) -> None:
        """End the answer, which has what is written."""
        self._stopped = True
        self.job.cancel()

    def disconnect(self) -> None:
        """Cancel the request: its client has disconnected, or has everything."""
        self._disconnected = True
        self.job.cancel()

    def _reported(self, event: Event) -> StreamEvent:
        """Return an event as the client receives it. If the client, the time limit or the server's end cut an answer
        off, it ends with "length"; without any token it is an error, unless the client stopped it."""
        if not isinstance(event, Finished) or event.reason != "cancelled" or self._disconnected:
            return event
        if event.written or self._stopped:
            return replace(event, reason="length")
        if self._timed_out:
            return APIError(503, f"No token was generated within {self._limits.seconds:g} s; retry later.", "timeout")
        return EngineStopping("The server shut down before the answer began; retry when it is back.")

    def _put(self, event: StreamEvent) -> None:
        """Buffer an event, in the event loop's thread. If the client falls too far behind, its answer ends."""
        self._events.put(event)
        if self._events.bytes > MAX_BUFFERED_BYTES and self._streams:
            sentence = (
                f"The client reads too slowly: more than {MAX_BUFFERED_BYTES // 10**6} MB of the answer wait for it; "
                "read faster, or ask for fewer top_logprobs."
            )
            self._events.end(APIError(408, sentence, "too_slow"))
            self.job.cancel()
        if isinstance(event, Finished | Exception):
            self._limits.release(self._owner)
            if self._timer is not None:
                self._timer.cancel()

    async def first(self) -> StreamEvent | Progress:
        """Wait for the first event, so that an immediate error has a suitable status; return the progress if it takes
        longer. Raises that error."""
        found, left = None, FIRST_EVENT_TIMEOUT_S
        try:
            while found is None and left > 0:
                found = await self._events.get(min(left, PROGRESS_S))
                left = 0 if self.job.answer is not None else left - PROGRESS_S
        except BaseException:
            self.disconnect()
            raise
        if isinstance(found, Exception):
            raise found
        return found or self._progress

    async def events(self, event: StreamEvent | Progress) -> AsyncIterator[StreamEvent | Progress]:
        """Yield the first event, ``event``, and all others; the progress after every :data:`PROGRESS_S` seconds without
        one."""
        while True:
            yield event
            if isinstance(event, Finished | Exception):
                return
            event = await self._events.get(PROGRESS_S) or self._progress

    @property
    def _progress(self) -> Progress:
        return Progress(self.job.read, len(self.job.ask.prompt))

    async def all(self) -> list[StreamEvent]:
        """Return all events."""
        found: list[StreamEvent] = []
        while not found or not isinstance(found[-1], Finished | Exception):
            if (event := await self._events.get()) is not None:
                found.append(event)
        return found
