"""Answers to requests: from their fields to the engine, and from its events to a reply."""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from kvkeep.blocks.records import Records
from kvkeep.decode.answer_form import Answers, Calls
from kvkeep.engine.answer import Ask
from kvkeep.engine.grammar import Grammar, vocabulary
from kvkeep.engine.pieces import token_texts
from kvkeep.engine.sampling import default_sampling
from kvkeep.engine.token_spelling import special_ids
from kvkeep.models.loading import Loaded
from kvkeep.policies.endless import endless_options
from kvkeep.policies.methods import Request as CacheRequest
from kvkeep.policies.methods import resolve
from kvkeep.policies.names import SYSTEM, Pin
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.answer_events import AnswerEvents, Limits
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
from kvkeep.serve.http.reuse import AnswerRecords, reused
from kvkeep.serve.session import Finished, check_name

request_log = logging.getLogger("kvkeep.requests")
"""At level INFO, one line per request at its end: id (the response's ``x-request-id``), method, path, status and
seconds; and one per answer: the id, and what its prompt reused."""
DEFAULT_MAX_TOKENS = 4096
"""Maximum tokens of an answer whose request names none; fewer if the model's context has less room."""
MAX_ANSWER_TOKENS = 2**31
"""The maximum length of an answer if the context has no limit: positions are int32."""
MAX_LOGPROBS = 200_000
"""Log-probabilities of an answer that is sent at once: about 230 bytes each, until they are sent."""
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers of a stream: nginx forwards it without buffering."""


class Answering:
    """Answers requests for one model, of any protocol. Worker threads use the tokenizer at the same time, and change
    none of its settings. The event loop never uses it, because it must not block. as_sent: whether lines that change
    with each session stay where they are. pin: the first tokens of each prompt that are pinned; None: none."""

    def __init__(
        self,
        engine: Engine,
        loaded: Loaded,
        limits: Limits,
        metrics: Metrics,
        as_sent: bool = False,
        pin: Pin | None = None,
    ) -> None:
        self._as_sent, self._pin = as_sent, pin
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
        self._check(body)
        cache = await asyncio.to_thread(self._cache, name, body)
        encoding = self.encode(body.given, hold.bytes, owner)
        encoded_prompt = await (encoding if kept else unless_disconnected(request, encoding))
        prompt, messages = encoded_prompt.ids, encoded_prompt.messages
        cache = self._pinned(cache, encoded_prompt)
        answers = await in_worker(hold.bytes, body.answers, self._tokenizer, prompt)
        form = body.form()
        grammar = None if form is None else await in_worker(hold.bytes, self._grammar, *form, answers)
        hold.tokens(len(prompt))
        limit = self._max_tokens(body.token_limit, prompt, cache)
        asks = body.asks(prompt, limit, self.sampling, grammar, answers)
        notes = [*encoded_prompt.notes, *_notes(answers, body.calls(), grammar)]

        @functools.cache  # it may decode the prompt, so `remember` calls it first, in a worker thread
        def report(answer: Finished) -> dict[str, Any]:
            reuse = {} if messages is None else {"reuse": reused(self._tokenizer, prompt, messages, answer)}
            return reuse | ({"notes": notes} if notes else {})

        context = Context(self.model, uuid.uuid4().hex, len(prompt), self.metrics.rejected, answers, report)
        contexts = [replace(context, index=number) for number in range(len(asks))]
        replies, remembered = [body.reply(one) for one in contexts], [body.answered(one) for one in contexts]
        stream, named = body.stream, bool(body.cache())
        if not stream:
            _check_logprobs(asks)
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

        def remember(number: int, event: StreamEvent) -> StreamEvent:
            if (answered := remembered[number]) is not None and isinstance(event, Finished):
                event = self._answers.remember(self.records.of(owner), answered(event), event, answers.format)
            if isinstance(event, Finished) and (reuse := report(event).get("reuse")):
                request_log.info("%s %s", request.state.request_id, reuse)
            return event

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
                each[-1] = await asyncio.to_thread(remember, number, each[-1])
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

    def _check(self, body: AnswerRequest) -> None:
        """Raise APIError for fields that this model does not have, or that do not go together."""
        if body.kvkeep.session is not None and body.count > 1:
            sentence = "'n' is above 1, but a session continues with one answer; leave out one of them."
            raise APIError(400, sentence, "invalid_value", "n")
        size = self.engine.geometry.vocab_size
        if any(token >= size for token in body.bias):
            sentence = f"'logit_bias' has an id that is not in the model's vocabulary of {size} tokens."
            raise APIError(400, sentence, "invalid_value", "logit_bias")

    def _cache(self, name: tuple[str, str] | None, body: AnswerRequest) -> dict[str, Any]:
        """Return the cache options of a request, perhaps none. Raises APIError, with the field, for a wrong session
        name, method, budget or end. A method that may name a file is wrong unless it is the server's method."""
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

    def _pinned(self, cache: dict[str, Any], prompt: EncodedPrompt) -> dict[str, Any]:
        """Return the cache options of a request with the tokens of its prompt that are pinned. Raises UsageError for a
        method that cannot pin them."""
        pin = prompt.instructions if self._pin == SYSTEM else self._pin
        if pin:
            CacheRequest.parse(**(cache := {**(cache or self.engine.cache), "pin": pin}))
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
        pins = self._pin == SYSTEM
        return await in_worker(
            size, lambda: encoded(given(), self._tokenizer, vocabulary, generated, self._as_sent, pins)
        )

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
    events: AsyncIterator[StreamEvent | Progress], work: Callable[[StreamEvent], StreamEvent]
) -> AsyncIterator[StreamEvent | Progress]:
    """Yield from events; in place of the last one, what ``work`` makes of it in a thread."""
    async for event in events:
        yield await asyncio.to_thread(work, event) if isinstance(event, Finished) else event


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
    """Yield from streams, from each as soon as it has something, and cancel their answers when the stream is closed."""
    waiting = {asyncio.ensure_future(anext(one)): one for one in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                one = waiting.pop(task)
                with suppress(StopAsyncIteration):
                    yield task.result()
                    waiting[asyncio.ensure_future(anext(one))] = one
    finally:
        for task in waiting:
            task.cancel()
        for answer in running:
            answer.disconnect()
