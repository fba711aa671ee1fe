"""The bytes of an engine's caches, and the state of each token's entries. The engine's thread reads them between
steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache import KeepCache
from kvkeep.contracts.entries import EntryState
from kvkeep.serve.arbiter import shared_parts
from kvkeep.serve.engine import Engine
from kvkeep.serve.session import Name

KINDS = ("resident", "compressed", "bookkeeping", "checkpoint_device", "checkpoint_host", "checkpoint_disk")
"""The kinds of bytes of a cache. Bytes on disk are not memory."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of all caches; shared parts are counted once."""

    kinds: dict[str, int]
    """Bytes by kind, including bytes on disk."""
    granted: int
    """Further bytes that are granted to running answers."""
    sessions: int
    """Sessions in memory, running or idle."""

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        return sum(count for kind, count in self.kinds.items() if kind != "checkpoint_disk")


def memory_use(engine: Engine) -> MemoryUse:
    """Return the bytes that all caches of ``engine`` use."""
    kinds, parts = dict.fromkeys(KINDS, 0), dict[int, int]()
    for session in engine.sessions.memory.values():
        for kind, count in _kinds(session.past.cache).items():
            kinds[kind] += count
        shared = shared_parts(session.past.cache)
        kinds["resident"] -= sum(shared.values())
        parts |= shared
    kinds["resident"] += sum(parts.values())
    return MemoryUse(kinds, sum(job.granted for job in engine.running), len(engine.sessions.memory))


def _kinds(cache: KeepCache) -> dict[str, int]:
    found = cache.memory()
    places = (found.checkpoint_bytes[place] for place in ("device", "host", "disk"))
    counts = (found.resident_bytes, found.compressed_bytes, found.bookkeeping_bytes, *places)
    return dict(zip(KINDS, counts, strict=True))


@dataclass(frozen=True)
class CacheView:
    """The entries of one session's cache, by token, layer and head."""

    method: str
    exactness: str
    budget: int | None
    """Entries per layer; None: no budget."""
    where: str | None
    """The place of the checkpoint."""
    running: bool
    """Whether an answer is being generated."""
    prompt: int | None
    """Tokens of the prompt that is being read; None if none is."""
    ids: list[int]
    """Ids of the tokens that the cache has read, without drafts."""
    bytes: dict[str, int]
    """Bytes by kind."""
    layers: list[Tensor]
    """Codes of :class:`EntryState` for each layer, (kv_heads, tokens) int8."""

    def map(self, columns: int) -> Tensor:
        """Return the share of entries in each state, over all heads, by layer and column: (layers, columns, states).
        The columns divide the tokens equally."""
        column = torch.arange(len(self.ids)) * columns // len(self.ids)
        counts = torch.stack([_counted(layer, column, columns) for layer in self.layers])
        return counts / counts.sum(-1, keepdim=True)

    def kept(self) -> Tensor:
        """Return the number of entries of each token in each state, over all layers and heads: (tokens, states)."""
        slots = torch.arange(len(self.ids))
        each = torch.zeros(len(self.ids), len(EntryState), dtype=torch.long)
        for layer in self.layers:
            each += _counted(layer, slots, len(self.ids))
        return each


def _counted(layer: Tensor, column: Tensor, columns: int) -> Tensor:
    """Return the number of codes of ``layer`` (kv_heads, tokens) in each column: (columns, states)."""
    found = torch.bincount((column * len(EntryState) + layer).flatten(), minlength=columns * len(EntryState))
    return found.view(columns, len(EntryState))


def cache_view(engine: Engine, name: Name) -> CacheView | None:
    """Return a view of the session ``name``; None if it is not in memory, or has read nothing."""
    session = engine.sessions.memory.get(name)
    if session is None or not session.past.cache.get_seq_length():
        return None
    cache = session.past.cache
    known = cache.get_seq_length() if cache.round is None else cache.round.kept  # drafts belong to no text yet
    job = next((job for job in engine.running if job.session is session), None)
    return CacheView(
        method=cache.method.name,
        exactness=str(cache.exactness),
        budget=cache.entries,
        where=None if cache.checkpoint is None else cache.checkpoint.home.name,
        running=job is not None,
        prompt=None if job is None or job.writes else len(job.ask.prompt),
        ids=([*session.past.ids] if job is None else job.known)[:known],
        bytes=_kinds(cache),
        layers=[layer[0, :, :known].clone() for layer in cache.entry_states() if layer.shape[1]],  # it may reuse them
    )
