"""Chat completions and completions: from a request body to the engine and back."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse

from kvkeep.decode.prompt import encode, written_ids
from kvkeep.engine.pieces import token_texts
from kvkeep.models.loading import Loaded
from kvkeep.policies.endless import endless_options
from kvkeep.policies.methods import resolve
from kvkeep.policies.request import Request as CacheRequest
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.engine_request import EngineRequest, Limits
from kvkeep.serve.http.error_handlers import naming_field
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.http.metrics import Metrics
from kvkeep.serve.http.replies import Reply
from kvkeep.serve.http.schema import DEFAULT_MAX_TOKENS, ChatRequest, Message, TextRequest
from kvkeep.serve.session import check_name

T = TypeVar("T")
MAX_ANSWER_TOKENS = 2**31
"""The maximum length of an answer if the context has no limit: positions are int32."""
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers of a stream: nginx forwards it without buffering."""


class Completions:
    """Answers requests for one model. It has a copy of the tokenizer, used by one worker thread at a time. The event
    loop never uses the tokenizer, because it must not block."""

    def __init__(self, engine: Engine, loaded: Loaded, limits: Limits, metrics: Metrics) -> None:
        self.engine, self.model, self.limits, self.metrics = engine, loaded.name, limits, metrics
        self._tokenizer, self._lock = copy.deepcopy(loaded.tokenizer), threading.Lock()

    def check_model(self, name: str | None) -> None:
        """Raise APIError unless a request names this model."""
        if name not in (None, self.model):
            sentence = f"The model '{name}' does not exist; this server has '{self.model}'."
            raise APIError(404, sentence, "model_not_found", "model")

    async def encode(self, given: str | list[int] | list[Message]) -> list[int]:
        """Return the token ids of a text, of ids, or of a conversation up to its answer."""
        return await asyncio.to_thread(self._encode, given)

    async def encode_chat(self, body: ChatRequest) -> list[int]:
        """Return the token ids of a conversation, up to its answer or to the end of a last message to be continued."""
        if not body.continue_final_message:
            return await self.encode(body.messages)
        *before, last = body.messages
        return await self.encode(before) + await asyncio.to_thread(self._written, last.plain()["content"])

    def _written(self, text: str) -> list[int]:
        with self._lock:
            return written_ids(self._tokenizer, text)

    def _encode(self, given: str | list[int] | list[Message]) -> list[int]:
        with self._lock:
            if isinstance(given, str):
                return list(self._tokenizer(given).input_ids)
            if messages := [one.plain() for one in given if isinstance(one, Message)]:
                return encode(self._tokenizer, messages)
        ids = [one for one in given if isinstance(one, int)]
        if any(not 0 <= one < self.engine.geometry.vocab_size for one in ids):
            raise APIError(
                400, "'prompt' contains ids that are not in the model's vocabulary.", "invalid_value", "prompt"
            )
        return ids

    def token_texts(self, ids: Sequence[int]) -> tuple[list[str], list[int]]:
        """Return the text of each id and the places of special tokens. The joined texts are the whole text."""
        with self._lock:
            texts, added = token_texts(self._tokenizer, ids), self._tokenizer.added_tokens_decoder
            special = {*self._tokenizer.all_special_ids, *(one for one, token in added.items() if token.special)}
        return texts, [place for place, one in enumerate(ids) if one in special]

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

    async def respond(self, request: Request, body: ChatRequest | TextRequest, prompt: list[int]) -> Any:
        """Return the response to a request, complete or as a stream. If the client disconnects, the answer is
        cancelled."""
        owner = request.state.owner
        name = None if body.kvkeep.session is None else (owner, body.kvkeep.session)
        cache = await asyncio.to_thread(self._cache, name, body)
        ask = body.ask(prompt, self.max_tokens(body.token_limit, prompt, cache), body.logprob_count)
        logprobs = body.logprob_count is not None
        reply = Reply(self.model, isinstance(body, ChatRequest), logprobs, self.metrics.rejected)
        named = bool(body.cache())
        running = EngineRequest(self.engine, self.metrics, self.limits, owner, ask, name, cache, named)
        if body.stream:
            first = await _unless_disconnected(request, running.first())
            if isinstance(first, Exception):
                raise first
            events = _closing(reply.stream(running.events(first), body.usage_in_stream), running)
            return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)
        try:
            return JSONResponse(reply.complete(await _unless_disconnected(request, running.all())))
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


async def _closing(text: AsyncIterator[str], running: EngineRequest) -> AsyncIterator[str]:
    """Yield from a stream, and cancel its request when the stream is closed."""
    try:
        async for one in text:
            yield one
    finally:
        running.disconnect()


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. Raises APIError if the client disconnects first, and the errors of ``work``."""
    disconnected, done = asyncio.ensure_future(_disconnect(request)), asyncio.ensure_future(work)
    try:
        await asyncio.wait({disconnected, done}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise APIError(499, "The client has disconnected.")
        return done.result()
    finally:
        disconnected.cancel()
        done.cancel()


async def _disconnect(request: Request) -> None:
    """Wait until the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
