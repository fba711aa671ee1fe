"""Chat completions and completions: from a request body to the engine and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from kvkeep.decode.encoding import PromptText, begins_with, least_tokens
from kvkeep.decode.prompt import prompt_text
from kvkeep.engine.answer import Ask
from kvkeep.engine.pieces import token_texts
from kvkeep.engine.token_spelling import special_ids
from kvkeep.models.loading import Loaded
from kvkeep.policies.endless import endless_options
from kvkeep.policies.methods import resolve
from kvkeep.policies.request import Request as CacheRequest
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.disconnect import unless_disconnected
from kvkeep.serve.http.engine_request import EngineRequest, Limits
from kvkeep.serve.http.error_handlers import naming_field
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.http.json_text import json_response
from kvkeep.serve.http.metrics import Metrics
from kvkeep.serve.http.replies import Reply
from kvkeep.serve.http.schema import DEFAULT_MAX_TOKENS, ChatRequest, Message, TextRequest
from kvkeep.serve.http.workers import in_worker
from kvkeep.serve.job import PromptTooLong
from kvkeep.serve.session import check_name

Prompt = str | list[int] | list[Message]
MAX_ANSWER_TOKENS = 2**31
"""The maximum length of an answer if the context has no limit: positions are int32."""
MAX_PROMPT_CHARACTERS, MAX_PROMPT_TOKENS = 4_000_000, 1_000_000
"""Characters of a prompt, and tokens if the context has no limit. The tokenizer takes up to 600 bytes for a token."""
MAX_LOGPROBS = 200_000
"""Log-probabilities of an answer that is sent at once: about 230 bytes each, until they are sent."""
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers of a stream: nginx forwards it without buffering."""


class Completions:
    """Answers requests for one model. Worker threads use the tokenizer at the same time, and change none of its
    settings. The event loop never uses it, because it must not block."""

    def __init__(self, engine: Engine, loaded: Loaded, limits: Limits, metrics: Metrics) -> None:
        self.engine, self.model, self.limits, self.metrics = engine, loaded.name, limits, metrics
        self._tokenizer = loaded.tokenizer
        self._tokenizer("")  # resets the truncation and padding of a file, which must not happen in a worker

    def check_model(self, name: str | None) -> None:
        """Raise APIError unless a request names this model."""
        if name not in (None, self.model):
            sentence = f"The model '{name}' does not exist; this server has '{self.model}'."
            raise APIError(404, sentence, "model_not_found", "model")

    async def encode(self, given: Prompt, size: int, answer: str = "", positions: int | None = None) -> list[int]:
        """Return the token ids of a text, of ids, or of a conversation up to its answer and the beginning of that.

        size: bytes of the request. Raises PromptTooLong at once for a text that cannot fit into ``positions`` (None: no
        limit).
        """
        return await in_worker(size, self._encode, given, answer, positions)

    def _encode(self, given: Prompt, answer: str, positions: int | None) -> list[int]:
        if isinstance(given, str):
            check_characters(len(given))
            text = PromptText(given)
        elif messages := [one.plain() for one in given if isinstance(one, Message)]:
            check_characters(sum(len(one["content"]) for one in messages))
            text = prompt_text(self._tokenizer, messages, answer=answer)
        else:
            if positions is None and len(given) > MAX_PROMPT_TOKENS:
                raise _too_many_tokens(MAX_PROMPT_TOKENS)
            return self._checked([one for one in given if isinstance(one, int)])
        if positions is None:
            return self._within(text, MAX_PROMPT_TOKENS)
        if (least := least_tokens(self._tokenizer, text.text)) >= positions:
            raise PromptTooLong.of(f"at least {least}", positions)
        if begins_with(self._tokenizer, text, positions):
            raise PromptTooLong.of(f"more than {positions}", positions)
        return text.ids(self._tokenizer)

    def _within(self, text: PromptText, limit: int) -> list[int]:
        """Return the token ids of a text that no context limits. Raises APIError beyond the limit of a request."""
        if not begins_with(self._tokenizer, text, limit) and len(ids := text.ids(self._tokenizer)) <= limit:
            return ids
        raise _too_many_tokens(limit)

    def _checked(self, ids: list[int]) -> list[int]:
        if min(ids) < 0 or max(ids) >= self.engine.geometry.vocab_size:
            raise APIError(
                400, "'prompt' contains ids that are not in the model's vocabulary.", "invalid_value", "prompt"
            )
        return ids

    async def _prompt(self, body: ChatRequest | TextRequest, size: int, cache: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a request with these cache options: of a text, or of a conversation up to its answer
        or to the end of a last message to be continued."""
        positions = self.engine.positions(cache)
        if isinstance(body, TextRequest):
            return await self.encode(body.prompt, size, positions=positions)
        if not body.continue_final_message:
            return await self.encode(body.messages, size, positions=positions)
        *before, last = body.messages
        return await self.encode(before, size, last.plain()["content"], positions)

    def token_texts(self, ids: Sequence[int]) -> tuple[list[str], list[int]]:
        """Return the text of each id and the places of special tokens. The joined texts are the whole text."""
        special = special_ids(self._tokenizer).union(self._tokenizer.all_special_ids)
        return token_texts(self._tokenizer, ids), [place for place, one in enumerate(ids) if one in special]

    def max_tokens(self, wanted: int | None, prompt: list[int], cache: Mapping[str, Any]) -> int:
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

    async def respond(self, request: Request, body: ChatRequest | TextRequest) -> Any:
        """Return the response to a request, complete or as a stream. If the client disconnects, the answer is
        cancelled."""
        self.check_model(body.model)
        owner, hold = request.state.owner, request.state.hold
        self.limits.check(owner)  # before anything that grows with the body
        name = None if body.kvkeep.session is None else (owner, body.kvkeep.session)
        cache = await asyncio.to_thread(self._cache, name, body)
        prompt = await unless_disconnected(request, self._prompt(body, hold.bytes, cache))
        hold.tokens(len(prompt))
        ask = body.ask(prompt, self.max_tokens(body.token_limit, prompt, cache), body.logprob_count)
        logprobs = body.logprob_count is not None
        reply = Reply(self.model, isinstance(body, ChatRequest), logprobs, self.metrics.rejected)
        stream, with_usage, named = body.stream, body.usage_in_stream, bool(body.cache())
        if not stream:
            check_logprobs(ask)
        del body  # its texts, while the answer waits
        running = EngineRequest(self.engine, self.metrics, self.limits, owner, ask, name, cache, named, stream)
        if stream:
            first = await unless_disconnected(request, running.first())
            if isinstance(first, Exception):
                raise first
            text = _closing(reply.stream(running.events(first), with_usage), running)
            return StreamingResponse(text, media_type="text/event-stream", headers=STREAM_HEADERS)
        try:
            events = await unless_disconnected(request, running.all())
            return await json_response(reply.complete, events)
        finally:
            running.disconnect()

    def _cache(self, name: tuple[str, str] | None, body: ChatRequest | TextRequest) -> dict[str, Any]:
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


def check_characters(count: int) -> None:
    """Raise APIError if a prompt has too many characters."""
    if count > MAX_PROMPT_CHARACTERS:
        sentence = f"The prompt has {count} characters, and at most {MAX_PROMPT_CHARACTERS} are allowed; shorten it."
        raise APIError(400, sentence, "context_length_exceeded")


def _too_many_tokens(limit: int) -> APIError:
    sentence = f"The prompt has more than {limit:,} tokens, the most that a request may have; shorten it."
    return APIError(400, sentence, "context_length_exceeded")


def check_logprobs(ask: Ask) -> None:
    """Raise APIError if an answer that is sent at once may have too many log-probabilities."""
    if ask.top_logprobs is None or ask.max_tokens * (1 + ask.top_logprobs) <= MAX_LOGPROBS:
        return
    sentence = (
        f"An answer that is not a stream has at most {MAX_LOGPROBS:,} log-probabilities, those of likeliest tokens "
        f"included; set 'max_tokens' to at most {MAX_LOGPROBS // (1 + ask.top_logprobs)}, or send 'stream': true."
    )
    raise APIError(400, sentence, "invalid_value", "max_tokens")


async def _closing(text: AsyncIterator[str], running: EngineRequest) -> AsyncIterator[str]:
    """Yield from a stream, and cancel its request when the stream is closed."""
    try:
        async for one in text:
            yield one
    finally:
        running.disconnect()
