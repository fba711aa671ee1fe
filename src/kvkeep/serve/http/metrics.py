"""``/metrics``: what an operator watches, as Prometheus reads it. No text of anybody, and nothing beyond one server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from kvkeep.errors import KvkeepError
from kvkeep.serve.answer import Piece
from kvkeep.serve.engine import Engine, Watch
from kvkeep.serve.http.errors import FAILED, Refused, refused
from kvkeep.serve.job import Ended
from kvkeep.serve.look import memory

TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATIENCE_S = 2.0
"""Seconds that a scrape waits for the engine to say what it holds; then it gets what was held before."""
_FIRST_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
_BETWEEN_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5)
_SESSIONS = (1, 2, 4, 8, 16, 32, 64, 128)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics(Watch):
    """The figures of one engine, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.registry = engine, CollectorRegistry()
        own: dict[str, Any] = {"namespace": "kvkeep", "registry": self.registry}
        self._running = Gauge("requests_running", "Answers that are written, or whose prompt is read.", **own)
        self._waiting = Gauge("requests_waiting", "Answers that have not begun.", **own)
        self._ended = Counter("requests_ended", "Answers that ended, by how.", ["reason"], **own)
        self._rejected = Counter("requests_rejected", "Requests that were refused or failed.", ["reason"], **own)
        self._sessions = Gauge("sessions", "Sessions in memory.", **own)
        self._files = Counter("session_files", "Sessions parked in, restored from, saved to files.", ["how"], **own)
        self._seen = dict.fromkeys(("parked", "restored", "saved"), 0)
        self._bytes = Gauge("cache_bytes", "Bytes that all caches hold, by kind.", ["kind"], **own)
        self._limit = Gauge("cache_limit_bytes", "Bytes of memory that all caches may hold together.", **own)
        self._granted = Gauge("cache_granted_bytes", "Bytes that running answers may come to hold.", **own)
        self._prompt = Counter("prompt_tokens", "Tokens of prompts: read, or cached and not read.", ["source"], **own)
        self._generated = Counter("generated_tokens", "Tokens of answers.", **own)
        self._first = Histogram("time_to_first_token_seconds", "From request to first token.", buckets=_FIRST_S, **own)
        self._between = Histogram(
            "time_between_tokens_seconds", "Between tokens of an answer.", buckets=_BETWEEN_S, **own
        )
        self._rows = Histogram("step_sessions", "Sessions that a step reads for.", buckets=_SESSIONS, **own)
        self._tokens = Histogram("step_tokens", "Tokens that a step reads.", buckets=_TOKENS, **own)
        ProcessCollector(registry=self.registry)
        self._limit.set(engine.arbiter.total)
        engine.watch = self

    def stepped(self, sessions: int, tokens: int) -> None:
        """Count a step."""
        self._rows.observe(sessions)
        self._tokens.observe(tokens)

    def wrote(self, tokens: int, seconds: float, first: bool) -> None:
        """Count tokens of an answer; those that come at once share the time."""
        self._generated.inc(tokens)
        if first:
            self._first.observe(seconds)
            return
        for _ in range(tokens):
            self._between.observe(seconds / tokens)

    def told(self, event: Piece | Ended | Exception) -> None:
        """Count an answer that ended, or failed by no mistake of its client's."""
        if isinstance(event, Ended):
            self._ended.labels(event.reason).inc()
        elif isinstance(event, Exception) and refused(event).code == FAILED:
            self._ended.labels("failed").inc()

    def asked(self, cached: int, read: int) -> None:
        """Count tokens of a prompt."""
        self._prompt.labels("cached").inc(cached)
        self._prompt.labels("read").inc(read)

    def rejected(self, error: Exception) -> Refused:
        """Count a request that got an error, and return how it is told."""
        found = refused(error)
        self._rejected.labels(found.code or found.kind).inc()
        return found

    async def scraped(self) -> bytes:
        """Return all figures, those of memory as of the last step."""
        with suppress(KvkeepError, TimeoutError):
            held = await asyncio.wait_for(
                asyncio.wrap_future(self.engine.call(lambda: memory(self.engine))), PATIENCE_S
            )
            for kind, count in held.kinds.items():
                self._bytes.labels(kind).set(count)
            self._granted.set(held.granted)
            self._sessions.set(held.sessions)
        for how, before in self._seen.items():
            self._seen[how] = now = getattr(self.engine.sessions, how)
            self._files.labels(how).inc(now - before)
        self._running.set(len(self.engine.running))
        self._waiting.set(self.engine.waiting)
        return generate_latest(self.registry)
