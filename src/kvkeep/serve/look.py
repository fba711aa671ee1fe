"""Looking at an engine's caches between two steps, in its own thread: what they hold, and what they remember."""

from __future__ import annotations

from dataclasses import dataclass

from kvkeep.serve.engine import Engine, Session


@dataclass(frozen=True)
class Held:
    """Bytes of all caches. kinds: by kind, also those on disk. granted: what running answers may come to hold.
    sessions: how many go on by name."""

    kinds: dict[str, int]
    granted: int
    sessions: int


def memory(engine: Engine) -> Held:
    """Return what all caches of ``engine`` hold."""
    kinds = dict.fromkeys(KINDS, 0)
    for session in caches(engine):
        for kind, count in kinds_of(session).items():
            kinds[kind] += count
    return Held(kinds, sum(job.granted for job in engine.running), len(engine.sessions))


KINDS = ("resident", "compressed", "bookkeeping", "checkpoint_device", "checkpoint_host", "checkpoint_disk")
"""What bytes of a cache are for; those on disk are no memory."""


def kinds_of(session: Session) -> dict[str, int]:
    """Return the bytes of a session's cache by kind."""
    found = session.past.cache.memory()
    places = (found.checkpoint_bytes[place] for place in ("device", "host", "disk"))
    held = (found.resident_bytes, found.compressed_bytes, found.bookkeeping_bytes, *places)
    return dict(zip(KINDS, held, strict=True))


def caches(engine: Engine) -> list[Session]:
    """Return every session once, those without a name that run among them."""
    running = (job.session for job in engine.running if job.session is not None)
    return list({id(one): one for one in (*engine.sessions.values(), *running)}.values())
