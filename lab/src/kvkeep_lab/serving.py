"""Measures servers under load through their OpenAI interface, with several conversations at once, each with a different
prompt."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from kvkeep.budget import bytes_of
from kvkeep.cache import KeepCache
from kvkeep.errors import KvkeepError
from kvkeep.models.loading import Loaded
from kvkeep.serve.admission import Arbiter
from kvkeep_lab.partial import INTERRUPTED, Interruption, reason
from kvkeep_lab.peers.servers import Ours, Running, Server, server_of
from kvkeep_lab.tables import Table, fixed, megabytes, number, refusals

WORDS = ("river", "stone", "winter", "morning", "letter", "garden", "paper", "window", "market", "island", "summer")
"""Words of the prompts."""
METHODS = ("full", "kv-direct", "h2o")
"""Default methods of the sessions of kvkeep's server."""
SAMPLED_S = 0.25
"""Seconds between two samples of a server's memory."""


@dataclass(frozen=True)
class Served:
    """One server with a number of simultaneous sessions."""

    label: str
    context: int
    """Approximate tokens of a prompt."""
    sessions: int
    tokens_s: float | None = None
    """Tokens per second of all answers, over the time of prompts and answers."""
    writing_s: float | None = None
    """Tokens per second while all answers are being generated; None if there is no such time."""
    first_s: float | None = None
    """Median seconds from a request to its first token."""
    between_s: float | None = None
    """95th percentile of the seconds between two pieces."""
    peak_bytes: int | None = None
    """Peak bytes of its processes."""
    fit: int | None = None
    """Sessions that fit in the requested memory; None if unknown."""
    error: str = ""
    """Reason if there are no other figures."""


@dataclass(frozen=True)
class StreamedAnswer:
    """One answer."""

    requested: float
    """Time of the request."""
    times: list[float]
    """Times of the pieces."""
    tokens: int
    """Number of tokens of the answer."""


def measure_servers(
    loaded: Loaded,
    peers: Sequence[str],
    interpreters: Mapping[str, str | None],
    *,
    contexts: Sequence[int],
    sessions: Sequence[int],
    steps: int,
    methods: Sequence[str] | None,
    budget: str,
    memory: str,
    only: Sequence[str] | None,
    progress: Callable[[str, float, float], None],
) -> list[Served]:
    """Start one server after another, and request ``steps`` tokens for each number of sessions in turn. Raises
    :class:`Interruption` with the rows if interrupted after the first."""
    most_tokens, most_sessions = max(contexts) + steps + 64, max(sessions)
    servers: list[Server] = [
        Ours(loaded, most_tokens, most_sessions, method, budget, memory)
        for method in methods or METHODS
        if only is None or any(part in method for part in only)
    ]
    for name in peers:
        kind = server_of(name)
        python = None if kind.engine is None else interpreters.get(kind.engine.python)
        servers.append(kind(loaded, most_tokens, most_sessions, python))
    cases = [(context, count) for context in contexts for count in sessions]
    rows: list[Served] = []
    try:
        for place, server in enumerate(servers):
            progress(server.label, place, len(servers))
            before = len(rows)
            try:
                with server.running() as running:
                    _answers(server, running, 16, 1, 2)  # excludes the server's first-time work
                    for context, count in cases:
                        rows.append(_measured(server, running, context, count, steps, memory))
            except Exception as error:
                rows += [Served(server.label, *case, error=reason(error)) for case in cases[len(rows) - before :]]
    except KeyboardInterrupt:
        if not rows:
            raise
        every = [(server.label, *case) for server in servers for case in cases]
        rows += [Served(*case, error=INTERRUPTED) for case in every[len(rows) :]]
        raise Interruption(rows) from None
    return rows


def _measured(server: Server, running: Running, context: int, count: int, steps: int, memory: str) -> Served:
    try:
        streams, peak = _answers(server, running, context, count, steps)
    except Exception as error:
        return Served(server.label, context, count, error=reason(error))
    gaps = [after - before for one in streams for before, after in zip(one.times, one.times[1:], strict=False)]
    begin, end = min(one.requested for one in streams), max(one.times[-1] for one in streams)
    return Served(
        server.label,
        context,
        count,
        sum(one.tokens for one in streams) / (end - begin),
        writing_rate(streams),
        median(one.times[0] - one.requested for one in streams),
        quantiles(gaps, n=20)[-1] if len(gaps) > 1 else None,
        peak,
        fitting(server, context + steps, memory),
    )


def writing_rate(streams: Sequence[StreamedAnswer]) -> float | None:
    """Return the tokens per second between the last answer's first token and the first answer's last token; None if an
    answer ended before another began."""
    begin, end = max(one.times[0] for one in streams), min(one.times[-1] for one in streams)
    if end <= begin:
        return None
    pieces = sum(begin < at <= end for one in streams for at in one.times)
    of_a_piece = sum(one.tokens for one in streams) / sum(len(one.times) for one in streams)
    return pieces * of_a_piece / (end - begin)


def fitting(server: Server, tokens: int, memory: str) -> int | None:
    """Return the number of sessions of ``tokens`` tokens that fit in kvkeep's server; None for other servers, where it
    is unknown."""
    if not isinstance(server, Ours):
        return None
    cache = KeepCache(server.loaded.model, server.method, server.requested_budget)  # the server's options
    return Arbiter(bytes_of(memory)).fitting(cache, tokens)


def _answers(
    server: Server, running: Running, context: int, count: int, steps: int
) -> tuple[list[StreamedAnswer], int]:
    """Request ``count`` answers at once. Return them, and the server's peak bytes. Raises KvkeepError."""
    from openai import OpenAIError

    try:
        return asyncio.run(_burst(server, running, context, count, steps))
    except OpenAIError as error:
        raise KvkeepError(f"The server did not answer: {error}") from error


async def _burst(
    server: Server, running: Running, context: int, count: int, steps: int
) -> tuple[list[StreamedAnswer], int]:
    from openai import AsyncOpenAI

    draw = random.Random(f"{context} {count}")
    prompts = [" ".join(draw.choices(WORDS, k=context)) for _ in range(count)]
    peak, done = running.memory(), asyncio.Event()

    async def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, await asyncio.to_thread(running.memory))
            await asyncio.sleep(SAMPLED_S)

    async with AsyncOpenAI(base_url=running.url, api_key="none", timeout=900, max_retries=0) as client:
        watching = asyncio.ensure_future(watch())
        try:
            streams = await asyncio.gather(*(_stream(client, server, prompt, steps) for prompt in prompts))
        finally:
            done.set()
            await watching
    return streams, peak


async def _stream(client: Any, server: Server, prompt: str, steps: int) -> StreamedAnswer:
    usage = {"stream_options": {"include_usage": True}} if server.usage else {}
    requested, times, tokens = time.perf_counter(), [], 0
    options = {"max_tokens": steps, "temperature": 0.0, "stream": True, **usage}
    async for piece in await client.completions.create(model=server.model, prompt=prompt, **options):
        if piece.choices and piece.choices[0].text:
            times.append(time.perf_counter())
        if piece.usage is not None:
            tokens = piece.usage.completion_tokens
    if not times:
        raise KvkeepError("A server sent an answer without text.")
    return StreamedAnswer(requested, times, tokens or len(times))


def served_table(rows: Sequence[Served], memory: str, steps: int) -> Table:
    """Return a table of all servers."""
    single = {(row.label, row.context): row.tokens_s for row in rows if row.sessions == 1}
    table = Table(
        f"Servers, answers of {steps} tokens",
        [
            *("context", "server", "sessions", "tokens/s", "× one", "writing, tokens/s"),
            *("first token s", "between p95 ms", "peak", f"fit in {memory}"),
        ],
        notes=[
            "Every server runs in its own process with the same number of threads. This process sends the "
            "requests with the openai package: all sessions at once, each with its own prompt. Tokens/s: tokens "
            "of all answers, divided by the time from the first request to the last token, prompts included. × "
            "one: relative to one session. Writing: tokens/s while all sessions generate. First token: median. "
            "Peak: Pss of the server's processes. Fit: number of sessions that the memory limit admits. A budget "
            "that is a share refers to the model's positions.",
            *refusals((row.label, f"{row.sessions} of {row.context:,}", row.error) for row in rows),
        ],
        named=2,
    )
    for row in rows:
        if not row.error and row.tokens_s is not None:
            one = single.get((row.label, row.context))
            table.rows.append(
                [
                    f"{row.context:,}",
                    f"`{row.label}`",
                    f"{row.sessions}",
                    fixed(row.tokens_s, 1),
                    fixed(row.tokens_s / one if one else None),
                    fixed(row.writing_s, 1),
                    fixed(row.first_s),
                    number(None if row.between_s is None else 1e3 * row.between_s),
                    megabytes(row.peak_bytes),
                    "-" if row.fit is None else f"{row.fit}",
                ]
            )
    return table
