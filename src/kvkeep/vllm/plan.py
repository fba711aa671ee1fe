"""What the scheduler's side of the connector decides: which blocks of a request are loaded, and which are saved.

A request is any object with the attributes of vLLM's: ``request_id``, ``block_hashes`` (a key for each block whose
tokens are known, of all tokens before it as well), ``num_tokens``, ``num_computed_tokens``, ``num_preemptions``,
``cache_salt``, ``lora_request``, ``mm_features``, ``prompt_embeds`` and ``resumable``.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvkeep.vllm.folder import Name

LOOK_S = 0.25
"""Seconds for which it is remembered what a waiting request would find."""
NOT_YET = (0.0, -1, 0)
SHARED = "shared"
"""The word of a namespace for requests without a salt."""


@dataclass(frozen=True)
class Load:
    """Blocks of one request to be read into the cache's ``blocks``."""

    request: str
    names: list[Name]
    blocks: list[int]


@dataclass(frozen=True)
class Use:
    """Blocks of one text in use at ``when`` (ns since 1970), given in its order: of two the one that others build upon
    is the later used."""

    names: list[Name]
    when: int


@dataclass(frozen=True)
class Save(Use):
    """Blocks in use that are in the cache's ``blocks``, and are to be saved unless they are there."""

    blocks: list[int]


@dataclass
class Plan:
    """What a step loads and saves, and which blocks were used by requests that ended."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)


@dataclass
class _Known:
    """A request, whose blocks are in namespace ``space``. when: it was let in (ns since 1970); saved: blocks that were
    offered; tried: its preemptions when blocks were last loaded for it; looked: when, for how many tokens, and how many
    blocks were found."""

    request: Any
    space: str
    when: int = 0
    saved: int = 0
    tried: int = -1
    looked: tuple[float, int, int] = NOT_YET
    computed: int = 0

    def names(self, first: int, last: int) -> list[Name]:
        """Return what the blocks from ``first`` to ``last``, not included, are called."""
        return [Name(self.space, key) for key in self.request.block_hashes[first:last]]


class Planner:
    """Decides for one engine. space: the namespace of its model, layout and codec; size: tokens of a block; has:
    whether there is a block; loads, saves: whether it does."""

    def __init__(
        self, space: str, size: int, has: Callable[[Name], bool], *, loads: bool = True, saves: bool = True
    ) -> None:
        self.space, self.size, self.has, self.loads, self.saves = space, size, has, loads, saves
        self._known: dict[str, _Known] = {}
        self._plan = Plan()

    def begin(self, request: Any) -> None:
        """Take note of a new request."""
        if keepable(request):
            self._known[request.request_id] = _Known(request, space_of(self.space, request.cache_salt))

    def end(self, request_id: str) -> None:
        """Forget a request; its blocks were used until then."""
        known = self._known.pop(request_id, None)
        if known is not None and (full := known.request.num_computed_tokens // self.size):
            self._plan.uses.append(Use(known.names(0, full), time.time_ns()))

    def found(self, request: Any, computed: int) -> int:
        """Return how many tokens behind the first ``computed`` ones, which the engine has, can be loaded. The last
        token is never one of them: it has to be read for the next one."""
        known = self._known.get(request.request_id)
        if known is None or not self.loads or known.tried == request.num_preemptions:
            return 0  # what could not be loaded once is read
        when, before, number = known.looked
        if before != computed or time.monotonic() - when > LOOK_S:
            first, last = computed // self.size, (request.num_tokens - 1) // self.size
            number = 0
            for name in known.names(first, last):
                if not self.has(name):
                    break
                number += 1
            known.looked = time.monotonic(), computed, number
        known.computed = computed
        return number * self.size

    def admit(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        """Take note that a request has its ``blocks``, and that ``tokens`` of those found are to be loaded."""
        known = self._known.get(request.request_id)
        if known is None:
            return
        known.saved, known.looked, known.when = 0, NOT_YET, time.time_ns()
        if tokens:
            known.tried = request.num_preemptions
            first = known.computed // self.size
            last = first + tokens // self.size
            self._plan.loads.append(Load(request.request_id, known.names(first, last), [*blocks[first:last]]))

    def step(self, scheduled: Iterable[tuple[str, int]], blocks_of: Callable[[str], Sequence[int] | None]) -> Plan:
        """Return what this step loads and saves. scheduled: requests and how many of their tokens are read in it;
        blocks_of: the blocks of a request."""
        for request_id, tokens in scheduled if self.saves else ():
            known = self._known.get(request_id)
            if known is None:
                continue
            request = known.request
            ends = min(request.num_computed_tokens + tokens, request.num_tokens)  # drafts are not known to be right
            full = min(ends // self.size, len(request.block_hashes))
            if full > known.saved and (blocks := blocks_of(request_id)) is not None:
                # The time of each is that of the first, less its place: none is used later than what it builds upon.
                save = Save(known.names(known.saved, full), known.when - known.saved, [*blocks[known.saved : full]])
                self._plan.saves.append(save)
                known.saved = full
        plan, self._plan = self._plan, Plan()
        return plan

    def renew(self, space: str) -> None:
        """Go on in another namespace; nothing is found there."""
        self.space = space
        for known in self._known.values():
            known.space = space_of(space, known.request.cache_salt)
            known.looked = NOT_YET


def keepable(request: Any) -> bool:
    """Return whether the keys of a request's blocks say all that the blocks depend on, for longer than this process
    lives: adapters and images are known by names that may come to mean something else."""
    plain = request.lora_request is None and not request.mm_features and request.prompt_embeds is None
    return plain and not request.resumable


def space_of(space: str, salt: str | None) -> str:
    """Return the namespace of requests with this salt."""
    return f"{space}/{SHARED if not salt else 'salt-' + hashlib.sha256(salt.encode()).hexdigest()[:32]}"
