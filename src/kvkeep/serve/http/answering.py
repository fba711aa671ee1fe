"""Answers to requests: from their fields to the engine, and from its events to a reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from kvkeep.decode.encoding import PromptText, begins_with
from kvkeep.decode.prompt import prompt_text
from kvkeep.engine.answer import Ask
from kvkeep.engine.pieces import token_texts
from kvkeep.engine.token_spelling import special_ids
from kvkeep.errors import PromptTooLong
from kvkeep.models.loading import Loaded
from kvkeep.policies.endless import endless_options
from kvkeep.policies.methods import Request as CacheRequest
from kvkeep.policies.methods import resolve
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.body import in_worker, unless_disconnected
from kvkeep.serve.http.errors import APIError, naming_field
from kvkeep.serve.http.events import AnswerEvents, Limits, json_response
from kvkeep.serve.http.metrics import Metrics
from kvkeep.serve.http.protocol import AnswerRequest, ChatPrompt, Prompt
from kvkeep.serve.session import check_name

DEFAULT_MAX_TOKENS = 1024
"""Maximum tokens of an answer whose request names none; fewer if the model's context has less room."""
MAX_ANSWER_TOKENS = 2**31
"""The maximum length of an answer if the context has no limit: positions are int32."""
MAX_PROMPT_CHARACTERS, MAX_PROMPT_TOKENS = 4_000_000, 1_000_000
"""Characters of a prompt, and tokens if the context has no limit. The tokenizer takes up to 600 bytes for a token."""
MAX_LOGPROBS = 200_000
"""Log-probabilities of an answer that is sent at once: about 230 bytes each, until they are sent."""
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers of a stream: nginx forwards it without buffering."""


class Answering:
    """Answers requests for one model, of any protocol. Worker threads use the tokenizer at the same time, and change
    none of its settings. The event loop never uses it, because it must not block."""

    def __init__(self, engine: Engine, loaded: Loaded, limits: Limits, metrics: Metrics) -> None:
        self.engine, self.model, self.limits, self.metrics = engine, loaded.name, limits, metrics
        self._tokenizer = loaded.tokenizer
        self._tokenizer("")  # resets the truncation and padding of a file, which must not happen in a worker

    async def respond(self, request: Request, body: AnswerRequest) -> Any:
        """Return the response to a request, complete or as a stream. If the client disconnects, the answer is
        cancelled."""
        self.check_model(body.model)
        owner, hold = request.state.owner, request.state.hold
        self.limits.check(owner)  # before anything that grows with the body
        name = None if body.kvkeep.session is None else (owner, body.kvkeep.session)
        cache = await asyncio.to_thread(self._cache, name, body)
        encoding = self.encode(body.given, hold.bytes, self.engine.positions(cache))
        prompt = await unless_disconnected(request, encoding)
        hold.tokens(len(prompt))
        ask = body.ask(prompt, self._max_tokens(body.token_limit, prompt, cache))
        reply, stream, named = body.reply(self.model, self.metrics.rejected), body.stream, bool(body.cache())
        if not stream:
            _check_logprobs(ask)
        del body  # its texts, while the answer waits
        submit = partial(self.engine.submit, ask, name=name, owner=owner, names_cache=named, **cache)
        answer = AnswerEvents(submit, self.limits, owner, stream, self.metrics.finished)
        if stream:
            first = await unless_disconnected(request, answer.first())
            text = _closing(reply.stream(answer.events(first)), answer)
            return StreamingResponse(text, media_type="text/event-stream", headers=STREAM_HEADERS)
        try:
            events = await unless_disconnected(request, answer.all())
            return await json_response(reply.complete, events)
        finally:
            answer.disconnect()

    def check_model(self, name: str | None) -> None:
        """Raise APIError unless a request names this model."""
        if name not in (None, self.model):
            sentence = f"The model '{name}' does not exist; this server has '{self.model}'."
            raise APIError(404, sentence, "model_not_found", "model")

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
        """Return the maximum number of tokens of an answer with these cache options. Raises APIError if they exceed the
        model's context."""
        context = self.engine.positions(cache)
        if context is None:
            if wanted is not None and wanted > MAX_ANSWER_TOKENS:
                sentence = f"'max_tokens' is {wanted}; an answer has at most {MAX_ANSWER_TOKENS} tokens."
                raise APIError(400, sentence, "invalid_value", "max_tokens")
            return DEFAULT_MAX_TOKENS if wanted is None else wanted
        left = context - len(prompt)
        if wanted is not None and wanted > left > 0:
            raise APIError(
                400,
                f"The prompt has {len(prompt)} tokens and 'max_tokens' is {wanted}, but the model's context has "
                f"{context}; set 'max_tokens' to at most {left}.",
                "context_length_exceeded",
                "max_tokens",
            )
        return max(1, min(left, DEFAULT_MAX_TOKENS)) if wanted is None else wanted

    # -- tokens -------------------------------------------------------------------------------------------

    async def encode(self, given: Callable[[], Prompt], size: int, positions: int | None = None) -> list[int]:
        """Return the token ids of a prompt. given: returns it, in a worker thread. size: bytes of the request.

        Raises PromptTooLong at once for a text that cannot fit into ``positions`` (None: no limit).
        """
        return await in_worker(size, lambda: self._encode(given(), positions))

    def _encode(self, prompt: Prompt, positions: int | None) -> list[int]:
        if isinstance(prompt, list):
            return self._checked(prompt, positions)
        if isinstance(prompt, ChatPrompt):
            _check_characters(sum(len(one["content"]) for one in prompt.messages) + len(prompt.answer))
            text = prompt_text(self._tokenizer, [{**one} for one in prompt.messages], answer=prompt.answer)
        else:
            _check_characters(len(prompt))
            text = PromptText(prompt)
        if begins_with(self._tokenizer, text, positions or MAX_PROMPT_TOKENS):
            raise _too_many_tokens() if positions is None else PromptTooLong.of(f"more than {positions}", positions)
        ids = text.ids(self._tokenizer)
        if positions is None and len(ids) > MAX_PROMPT_TOKENS:
            raise _too_many_tokens()
        return ids

    def _checked(self, ids: list[int], positions: int | None) -> list[int]:
        if positions is None and len(ids) > MAX_PROMPT_TOKENS:
            raise _too_many_tokens()
        if min(ids) < 0 or max(ids) >= self.engine.geometry.vocab_size:
            sentence = "'prompt' contains ids that are not in the model's vocabulary."
            raise APIError(400, sentence, "invalid_value", "prompt")
        return ids

    def token_texts(self, ids: Sequence[int]) -> tuple[list[str], list[int]]:
        """Return the text of each id and the places of special tokens. The joined texts are the whole text."""
        special = special_ids(self._tokenizer).union(self._tokenizer.all_special_ids)
        return token_texts(self._tokenizer, ids), [place for place, one in enumerate(ids) if one in special]


def _check_characters(count: int) -> None:
    if count > MAX_PROMPT_CHARACTERS:
        sentence = f"The prompt has {count} characters, and at most {MAX_PROMPT_CHARACTERS} are allowed; shorten it."
        raise APIError(400, sentence, "context_length_exceeded")


def _too_many_tokens() -> APIError:
    sentence = f"The prompt has more than {MAX_PROMPT_TOKENS:,} tokens, the most that a request may have; shorten it."
    return APIError(400, sentence, "context_length_exceeded")


def _check_logprobs(ask: Ask) -> None:
    """Raise APIError if an answer that is sent at once may have too many log-probabilities."""
    if ask.top_logprobs is None or ask.max_tokens * (1 + ask.top_logprobs) <= MAX_LOGPROBS:
        return
    sentence = (
        f"An answer that is not a stream has at most {MAX_LOGPROBS:,} log-probabilities, those of likeliest tokens "
        f"included; set 'max_tokens' to at most {MAX_LOGPROBS // (1 + ask.top_logprobs)}, or send 'stream': true."
    )
    raise APIError(400, sentence, "invalid_value", "max_tokens")


async def _closing(text: AsyncIterator[str], answer: AnswerEvents) -> AsyncIterator[str]:
    """Yield from a stream, and cancel its request when the stream is closed."""
    try:
        async for one in text:
            yield one
    finally:
        answer.disconnect()
