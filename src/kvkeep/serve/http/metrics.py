"""``/metrics`` for Prometheus: the figures of one server, without any text of its clients."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest

from kvkeep.blocks import beginnings
from kvkeep.errors import KvkeepError
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.body import RequestMemory
from kvkeep.serve.http.errors import FAILED, APIError, api_error
from kvkeep.serve.http.protocol import StreamEvent
from kvkeep.serve.session import Finished

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE_TIMEOUT_S = 2.0
"""Seconds that a scrape waits for the engine. After them it reports the previous bytes."""
COUNT_INTERVAL_S = 60.0
"""Seconds between two counts of the store, which read the head of each of its blocks."""


class Metrics:
    """The figures of one engine, in a separate registry."""

    def __init__(self, engine: Engine, memory: RequestMemory) -> None:
        self.engine, self.registry = engine, CollectorRegistry()
        base: dict[str, Any] = {"namespace": "kvkeep", "registry": self.registry}
        for name, what, value in (
            ("requests_running", "Requests that are being answered.", lambda: len(engine.running)),
            ("requests_waiting", "Requests in the queue.", lambda: engine.waiting),
            ("request_bytes", "Bytes of bodies and prompts of all requests.", lambda: memory.bytes),
            ("sessions", "Sessions in memory.", lambda: len(engine.sessions.memory)),
            ("cache_limit_bytes", "Limit of the bytes of all caches.", lambda: engine.arbiter.total),
        ):
            Gauge(name, what, **base).set_function(value)
        self._ended = Counter("requests_ended", "Answers that ended, by reason.", ["reason"], **base)
        self._rejected = Counter("requests_rejected", "Requests answered with an error, by code.", ["reason"], **base)
        self._files = Counter("session_files", "Sessions parked in, restored from and saved to files.", ["how"], **base)
        self._seen = dict.fromkeys(engine.sessions.storage.counts, 0)
        self._bytes = Gauge("cache_bytes", "Bytes of all caches, by kind.", ["kind"], **base)
        self._granted = Gauge("cache_granted_bytes", "Bytes reserved for running answers.", **base)
        self._prompt = Counter(
            "prompt_tokens", "Prompt tokens, by whether they were read or found in a cache.", ["source"], **base
        )
        self._generated = Counter("generated_tokens", "Generated tokens.", **base)
        self._stored_tokens = Gauge(
            "beginnings_tokens", "Stored tokens that prompts can begin with, as of the last minute.", **base
        )
        self._stored_bytes = Gauge("beginnings_bytes", "Bytes of their blocks.", **base)
        self._count_next = 0.0  # when the store is counted again
        ProcessCollector(registry=self.registry)

    def finished(self, event: StreamEvent) -> None:
        """Count an answer that finished or failed without its client's fault, and its tokens."""
        if isinstance(event, Finished):
            self._ended.labels(event.reason).inc()
            self._prompt.labels("cached").inc(event.cached)
            self._prompt.labels("read").inc(event.read)
            self._generated.inc(event.written)
        elif isinstance(event, Exception) and api_error(event).code == FAILED:
            self._ended.labels("failed").inc()

    def rejected(self, error: Exception) -> APIError:
        """Count a request that gets an error; return the error."""
        found = api_error(error)
        self._rejected.labels(found.code or found.kind).inc()
        return found

    async def scraped(self) -> bytes:
        """Return all figures; those of memory are as of the last step."""
        with suppress(KvkeepError, TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(self.engine.call(self._read_memory)), ENGINE_TIMEOUT_S)
        for how, now in self.engine.sessions.storage.counts.items():
            self._files.labels(how).inc(now - self._seen[how])
            self._seen[how] = now
        await asyncio.to_thread(self._count_stored)
        return await asyncio.to_thread(generate_latest, self.registry)

    def _count_stored(self) -> None:
        """Count what the store has, once in :data:`COUNT_INTERVAL_S`."""
        store = self.engine.sessions.storage.store
        if store is None or time.monotonic() < self._count_next:
            return
        self._count_next = time.monotonic() + COUNT_INTERVAL_S
        found = beginnings.stored(store.blocks)
        self._stored_tokens.set(found.tokens)
        self._stored_bytes.set(found.bytes)

    def _read_memory(self) -> None:
        for kind, count in self.engine.sessions.bytes_by_kind().items():
            self._bytes.labels(kind).set(count)
        self._granted.set(self.engine.granted)
