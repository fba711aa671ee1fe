"""Looking at an engine's caches between two steps, in its own thread: what they hold, and what they remember."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache import KeepCache
from kvkeep.contracts.entries import EntryState
from kvkeep.serve.arbiter import shared
from kvkeep.serve.engine import Engine
from kvkeep.serve.sessions import Name, Session

KINDS = ("resident", "compressed", "bookkeeping", "checkpoint_device", "checkpoint_host", "checkpoint_disk")
"""What bytes of a cache are for; those on disk are no memory."""


@dataclass(frozen=True)
class Held:
    """Bytes of all caches, what several hold counted once. kinds: by kind, also those on disk. granted: what running
    answers may come to hold. sessions: how many are in memory, answering or not."""

    kinds: dict[str, int]
    granted: int
    sessions: int

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        return sum(count for kind, count in self.kinds.items() if kind != "checkpoint_disk")


def memory(engine: Engine) -> Held:
    """Return what all caches of ``engine`` hold."""
    kinds, parts = dict.fromkeys(KINDS, 0), dict[int, int]()
    for session in engine.sessions.memory.values():
        for kind, count in _kinds(session.past.cache).items():
            kinds[kind] += count
        own = shared(session.past.cache)
        kinds["resident"] -= sum(own.values())
        parts |= own
    kinds["resident"] += sum(parts.values())
    return Held(kinds, sum(job.granted for job in engine.running), len(engine.sessions.memory))


def _kinds(cache: KeepCache) -> dict[str, int]:
    found = cache.memory()
    places = (found.checkpoint_bytes[place] for place in ("device", "host", "disk"))
    held = (found.resident_bytes, found.compressed_bytes, found.bookkeeping_bytes, *places)
    return dict(zip(KINDS, held, strict=True))


@dataclass(frozen=True)
class Picture:
    """What became of the entries of one session's cache. layers: of each, codes of states, (kv_heads, tokens) int8.
    ids: of the tokens. budget: entries of a layer, None if there is none. where: the place of its checkpoint. running:
    whether an answer is being written."""

    method: str
    exactness: str
    budget: int | None
    where: str | None
    running: bool
    ids: list[int]
    bytes: dict[str, int]
    layers: list[Tensor]

    def map(self, columns: int) -> Tensor:
        """Return for each layer and each of ``columns``, which share the tokens equally, the share of entries, of all
        heads, in each state: (layers, columns, states)."""
        column = torch.arange(len(self.ids)) * columns // len(self.ids)
        counts = torch.stack([_counted(layer, column, columns) for layer in self.layers])
        return counts / counts.sum(-1, keepdim=True)

    def kept(self) -> Tensor:
        """Return how many entries of each token, of all layers and heads, are in each state: (tokens, states)."""
        slots = torch.arange(len(self.ids))
        each = torch.zeros(len(self.ids), len(EntryState), dtype=torch.long)
        for layer in self.layers:
            each += _counted(layer, slots, len(self.ids))
        return each


def _counted(layer: Tensor, column: Tensor, columns: int) -> Tensor:
    """Return how many codes of ``layer`` (kv_heads, tokens) are in each column, (columns, states)."""
    found = torch.bincount((column * len(EntryState) + layer).flatten(), minlength=columns * len(EntryState))
    return found.view(columns, len(EntryState))


def picture(engine: Engine, name: Name) -> Picture | None:
    """Return what the cache of the session ``name`` remembers; None where it is not in memory."""
    session = engine.sessions.memory.get(name)
    if session is None or not session.past.cache.get_seq_length():
        return None
    cache = session.past.cache
    return Picture(
        method=cache.method.name,
        exactness=str(cache.exactness),
        budget=cache.entries,
        where=None if cache.checkpoint is None else cache.checkpoint.where,
        running=any(job.session is session for job in engine.running),
        ids=_read(engine, session),
        bytes=_kinds(cache),
        layers=[layer[0].clone() for layer in cache.entry_states() if layer.shape[1]],  # a cache may reuse its own
    )


def _read(engine: Engine, session: Session) -> list[int]:
    """Return the ids that a session's cache has read, of a running answer those of its prompt and its own."""
    return next((job.known for job in engine.running if job.session is session), [*session.past.ids])
