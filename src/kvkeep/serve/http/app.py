"""The application: its routes."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.middleware.cors import CORSMiddleware

from kvkeep.decode.pieces import token_texts
from kvkeep.decode.prompt import encode, written_ids
from kvkeep.errors import UsageError
from kvkeep.models.loading import Loaded
from kvkeep.policies.methods import resolve
from kvkeep.policies.request import Request as CacheRequest
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.asked import Asked, Limits
from kvkeep.serve.http.door import Door
from kvkeep.serve.http.errors import HANDLERS, Refused, by_field
from kvkeep.serve.http.keys import Keys
from kvkeep.serve.http.looking import looking
from kvkeep.serve.http.metrics import TYPE, Metrics
from kvkeep.serve.http.openapi import Described, errors
from kvkeep.serve.http.page import page
from kvkeep.serve.http.replies import Reply
from kvkeep.serve.http.schema import DEFAULT_TOKENS, ChatRequest, Message, TextRequest, TokenizeRequest
from kvkeep.serve.http.sessions import sessions_of
from kvkeep.serve.sessions import Sessions

T = TypeVar("T")
MOST_TOKENS = 2**31
"""Tokens of an answer whose positions do not run out: slots are int32."""
LATE_S = 120.0
"""Seconds without a step, while there is work, after which the engine counts as dead."""


class Server:
    """What routes share: the engine, its model's name, and a tokenizer of their own, which one thread uses at a time:
    the loop, which may not wait, never does."""

    def __init__(self, engine: Engine, loaded: Loaded, limits: Limits) -> None:
        self.engine, self.name, self.metrics, self.limits = engine, loaded.name, Metrics(engine), limits
        self.created = int(time.time())
        self._tokenizer, self._lock = copy.deepcopy(loaded.tokenizer), threading.Lock()

    def check_model(self, name: str | None) -> None:
        """Raise Refused unless a request names this model."""
        if name not in (None, self.name):
            raise Refused(404, f"There is no model '{name}' here; there is '{self.name}'.", "model_not_found", "model")

    async def encoded(self, given: str | list[int] | list[Message]) -> list[int]:
        """Return token ids of a text, of ids, or of a conversation up to its answer."""
        return await asyncio.to_thread(self._encoded, given)

    async def conversation(self, asked: ChatRequest) -> list[int]:
        """Return token ids of a conversation up to its answer, or up to where that is to go on."""
        if not asked.continue_final_message:
            return await self.encoded(asked.messages)
        *before, own = asked.messages
        return await self.encoded(before) + await asyncio.to_thread(self._written, own.plain()["content"])

    def _written(self, text: str) -> list[int]:
        with self._lock:
            return written_ids(self._tokenizer, text)

    def _encoded(self, given: str | list[int] | list[Message]) -> list[int]:
        with self._lock:
            if isinstance(given, str):
                return list(self._tokenizer(given).input_ids)
            if messages := [one.plain() for one in given if isinstance(one, Message)]:
                return encode(self._tokenizer, messages)
        ids = [one for one in given if isinstance(one, int)]
        if any(not 0 <= one < self.engine.geometry.vocab_size for one in ids):
            raise Refused(400, "'prompt' has ids that the model has no tokens for.", "invalid_value", "prompt")
        return ids

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id, which joined are the whole."""
        with self._lock:
            return token_texts(self._tokenizer, ids)

    def most(self, wanted: int | None, prompt: list[int], cache: Mapping[str, Any]) -> int:
        """Return how many tokens an answer with a cache of these options may have. Raises Refused for more than there
        are positions, or slots."""
        positions = self.engine.positions(cache)
        if positions is None:
            if wanted is not None and wanted > MOST_TOKENS:
                reason = f"An answer has at most {MOST_TOKENS} tokens, and not {wanted}; ask for fewer."
                raise Refused(400, reason, "invalid_value", "max_tokens")
            return wanted or DEFAULT_TOKENS
        room = positions - len(prompt)
        if wanted is not None and wanted > room > 0:
            raise Refused(
                400,
                f"The prompt has {len(prompt)} tokens and the answer may have {wanted}; the model has {positions} "
                f"positions. Ask for at most {room}.",
                "context_length_exceeded",
                "max_tokens",
            )
        return wanted or max(1, min(room, DEFAULT_TOKENS))

    async def answered(self, request: Request, asked: ChatRequest | TextRequest, prompt: list[int]) -> Any:
        """Return the answer to a request, whole or as a stream. A client that leaves cancels it."""
        owner, cache = request.state.owner, asked.cache()
        name = None if asked.kvkeep.session is None else (owner, asked.kvkeep.session)
        await asyncio.to_thread(self._check, name, cache)
        ask = asked.ask(prompt, self.most(asked.most, prompt, cache), asked.likeliest)
        chat, told = isinstance(asked, ChatRequest), asked.likeliest is not None
        reply = Reply(self.name, chat, told, self.metrics.rejected)
        answer = Asked(self.engine, self.metrics, self.limits, owner, ask, name, cache)
        if asked.stream:
            first = await _unless_gone(request, answer.first())
            if isinstance(first, Exception):
                raise first
            events = answer.events(first)
            kind = "text/event-stream"
            return StreamingResponse(_closing(reply.stream(events, asked.usage_in_stream), answer), media_type=kind)
        try:
            return JSONResponse(reply.whole(await _unless_gone(request, answer.all())))
        finally:
            answer.leave()

    def _check(self, name: tuple[str, str] | None, cache: dict[str, Any]) -> None:
        """Raise Refused, by its field, for what no model could make right of a session's name, method and budget, and
        for a method that may name a file, unless it is the server's own."""
        if name is not None:
            with by_field("kvkeep.session"):
                Sessions.check_name(name)
        if cache:
            method = cache.get("method", "full")
            with by_field("kvkeep.method"):
                resolve(method, files=method == CacheRequest.parse(**self.engine.cache).method.name)
            with by_field("kvkeep.budget"):
                CacheRequest.parse(**cache)


async def _closing(text: AsyncIterator[str], answer: Asked) -> AsyncIterator[str]:
    """Pass a stream on, and cancel its job when nobody reads it any more."""
    try:
        async for one in text:
            yield one
    finally:
        answer.leave()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` gives. Raises Refused where the client leaves before, and what ``work`` raises."""
    gone, done = asyncio.ensure_future(_gone(request)), asyncio.ensure_future(work)
    try:
        await asyncio.wait({gone, done}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise Refused(499, "The client has left.")
        return done.result()
    finally:
        gone.cancel()
        done.cancel()


async def _gone(request: Request) -> None:
    """Wait until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def alive(engine: Engine) -> bool:
    """Return whether an engine's last step is not long ago, or it has nothing to do."""
    late = bool(engine.running) and time.monotonic() - engine.beat > LATE_S
    return engine.fault is None and not late


def application(
    engine: Engine,
    loaded: Loaded,
    keys: Keys,
    limits: Limits | None = None,
    origins: Sequence[str] = (),
    scrape: Callable[[], Awaitable[bytes]] | None = None,
) -> FastAPI:
    """Return the application of a running engine. origins: of pages of other hosts that may speak to it. scrape: what
    ``/metrics`` returns, where it is more than this engine's figures."""
    server = Server(engine, loaded, limits or Limits())
    # FastAPI's own pages of documentation would load scripts from another host.
    app = Described(
        title="kvkeep",
        version=version("kvkeep"),
        exception_handlers=HANDLERS,
        responses=errors(401, "default"),
        docs_url=None,
        redoc_url=None,
    )
    app.state.metrics = server.metrics
    app.add_middleware(Door, keys=keys, metrics=server.metrics)
    if origins:
        methods, headers = ["GET", "POST", "DELETE"], ["Authorization", "Content-Type"]
        app.add_middleware(CORSMiddleware, allow_origins=[*origins], allow_methods=methods, allow_headers=headers)

    app.include_router(page())
    answers = errors(400, 404, 409, 413, 429, 503) | {200: {"content": {"text/event-stream": {}}}}

    @app.post("/v1/chat/completions", responses=answers)
    async def chat(request: Request, asked: ChatRequest) -> Any:
        """Answer a conversation."""
        server.check_model(asked.model)
        return await server.answered(request, asked, await server.conversation(asked))

    @app.post("/v1/completions", responses=answers)
    async def complete(request: Request, asked: TextRequest) -> Any:
        """Go on with a text."""
        server.check_model(asked.model)
        return await server.answered(request, asked, await server.encoded(asked.prompt))

    model = {"id": server.name, "object": "model", "created": server.created, "owned_by": "kvkeep"}

    @app.get("/v1/models")
    async def models() -> Any:
        """List the one model."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", responses=errors(404))
    async def model_of(name: str) -> Any:
        """Tell of the model by its name."""
        server.check_model(name)
        return model

    app.include_router(sessions_of(engine))
    app.include_router(looking(server))

    @app.post("/tokenize", responses=errors(400, 404, 413))
    async def tokenize(asked: TokenizeRequest) -> Any:
        """Return the token ids of a text, or of a conversation up to its answer."""
        server.check_model(asked.model)
        given = asked.messages if asked.prompt is None else asked.prompt
        if not given:
            raise UsageError("There is nothing to tokenize: give 'prompt' or 'messages'.")
        ids = await server.encoded(given)
        return {"tokens": ids, "count": len(ids), "max_model_len": engine.geometry.max_positions}

    @app.get("/health", responses=errors(503))
    async def health() -> Any:
        """Tell whether the engine lives: its last step is not long ago, or it has nothing to do."""
        if not alive(engine):
            raise Refused(503, "The engine does not answer.", "dead")
        return {"status": "ok"}

    @app.get("/ready", responses=errors(503))
    async def ready() -> Any:
        """Tell whether requests are taken."""
        if engine.stopping:
            raise Refused(503, "The server is ending.", "stopping")
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Any:
        """Return figures for Prometheus."""
        return Response(await (scrape or server.metrics.scraped)(), media_type=TYPE)

    return app
