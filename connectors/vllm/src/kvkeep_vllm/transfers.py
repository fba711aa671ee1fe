"""Which blocks of a request are loaded and which are saved; decided on the scheduler's side of the connector.

A request is any object with these attributes of vLLM's: ``request_id``, ``block_hashes`` (a key for each block whose
tokens are known, of all tokens before it as well), ``num_tokens``, ``num_computed_tokens``, ``num_preemptions``,
``cache_salt``, ``lora_request``, ``mm_features``, ``prompt_embeds`` and ``resumable``.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvkeep.blocks.folder import BlockName

LOOKUP_S = 0.25
"""Seconds for which the blocks found for a waiting request are remembered."""
_NO_LOOKUP = (0.0, -1, 0)
SHARED = "shared"
"""The part of a namespace for requests without a salt."""


@dataclass(frozen=True)
class Load:
    """Blocks of one request to read from the folder."""

    request: str
    """The request's id."""
    names: list[BlockName]
    """The blocks' names."""
    blocks: list[int]
    """Numbers of the target blocks in vLLM's cache."""


@dataclass(frozen=True)
class Use:
    """Blocks of one text that were used. A block is recorded as used later than the blocks after it."""

    names: list[BlockName]
    """The blocks' names, in the order of the text."""
    when: int
    """Nanoseconds since 1970."""


@dataclass(frozen=True)
class Save(Use):
    """Used blocks to save unless the folder has them."""

    blocks: list[int]
    """Numbers of the blocks in vLLM's cache."""


@dataclass
class Transfers:
    """What one step loads and saves."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    """Blocks of requests that ended."""


@dataclass
class _Tracked:
    """A request and the state of its transfers."""

    request: Any
    space: str
    """The namespace of its blocks."""
    when: int = 0
    """Time of admission (ns since 1970)."""
    saved: int = 0
    """Number of blocks passed on for saving."""
    loaded_at: int = -1
    """Number of preemptions of the request at its last load."""
    lookup: tuple[float, int, int] = _NO_LOOKUP
    """The last lookup: time, first token, and number of blocks found."""
    computed: int = 0
    """Tokens that the engine had at the last lookup."""

    def names(self, first: int, last: int) -> list[BlockName]:
        """Return the names of the blocks from ``first`` up to ``last``, excluded."""
        return [name_of(self.space, key) for key in self.request.block_hashes[first:last]]


class TransferPlanner:
    """Plans the transfers of one engine.

    space: the namespace of its model, layout and codec; size: tokens of a block; has: returns whether the folder has a
    block; loads, saves: whether the engine does either.
    """

    def __init__(
        self, space: str, size: int, has: Callable[[BlockName], bool], *, loads: bool = True, saves: bool = True
    ) -> None:
        self.space, self.size, self.has, self.loads, self.saves = space, size, has, loads, saves
        self._requests: dict[str, _Tracked] = {}
        self._next = Transfers()

    def begin(self, request: Any) -> None:
        """Track a new request."""
        if keepable(request):
            self._requests[request.request_id] = _Tracked(request, space_of(self.space, request.cache_salt))

    def end(self, request_id: str) -> None:
        """Forget a request, and record the use of its blocks."""
        tracked = self._requests.pop(request_id, None)
        if tracked is not None and (full := tracked.request.num_computed_tokens // self.size):
            self._next.uses.append(Use(tracked.names(0, full), time.time_ns()))

    def found(self, request: Any, computed: int) -> int:
        """Return the number of tokens that can be loaded after the first ``computed``, which the engine has. The last
        token is always computed, because its output is needed."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not self.loads or tracked.loaded_at == request.num_preemptions:
            return 0  # blocks that could not be loaded once are computed
        when, before, number = tracked.lookup
        if before != computed or time.monotonic() - when > LOOKUP_S:
            first, last = computed // self.size, (request.num_tokens - 1) // self.size
            number = 0
            for name in tracked.names(first, last):
                if not self.has(name):
                    break
                number += 1
            tracked.lookup = time.monotonic(), computed, number
        tracked.computed = computed
        return number * self.size

    def admit(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        """Plan the load of a request that the engine admitted. blocks: numbers of its blocks in vLLM's cache; tokens:
        number of tokens to load."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        tracked.saved, tracked.lookup, tracked.when = 0, _NO_LOOKUP, time.time_ns()
        if tokens:
            tracked.loaded_at = request.num_preemptions
            first = tracked.computed // self.size
            last = first + tokens // self.size
            self._next.loads.append(Load(request.request_id, tracked.names(first, last), [*blocks[first:last]]))

    def step(self, scheduled: Iterable[tuple[str, int]], blocks_of: Callable[[str], Sequence[int] | None]) -> Transfers:
        """Return the loads and saves of this step. scheduled: ids of requests, and the number of tokens that the step
        computes for each; blocks_of: returns the blocks of a request."""
        for request_id, tokens in scheduled if self.saves else ():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            request = tracked.request
            ends = min(request.num_computed_tokens + tokens, request.num_tokens)  # draft tokens may be rejected
            full = min(ends // self.size, len(request.block_hashes))
            if full > tracked.saved and (blocks := blocks_of(request_id)) is not None:
                # Each block counts as used 1 ns before the block that precedes it in the text.
                save = Save(
                    tracked.names(tracked.saved, full), tracked.when - tracked.saved, [*blocks[tracked.saved : full]]
                )
                self._next.saves.append(save)
                tracked.saved = full
        planned, self._next = self._next, Transfers()
        return planned

    def renew(self, space: str) -> None:
        """Continue in another namespace, which is empty."""
        self.space = space
        for tracked in self._requests.values():
            tracked.space = space_of(space, tracked.request.cache_salt)
            tracked.lookup = _NO_LOOKUP


def keepable(request: Any) -> bool:
    """Return whether a request's hashes identify its blocks permanently. Adapters and images are identified by ids that
    may have another meaning in another process."""
    plain = request.lora_request is None and not request.mm_features and request.prompt_embeds is None
    return plain and not request.resumable


def name_of(space: str, key: bytes) -> BlockName:
    """Return the name of the block whose tokens have this hash. It differs in every namespace, so that a file that was
    moved to another one is refused."""
    return BlockName(space, hashlib.sha256(f"{space}\0".encode() + key).hexdigest())


def space_of(space: str, salt: str | None) -> str:
    """Return the namespace of requests with this salt."""
    return f"{space}/{SHARED if not salt else 'salt-' + hashlib.sha256(salt.encode()).hexdigest()[:32]}"
