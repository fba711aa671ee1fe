"""The order in which unnamed sessions leave memory: by the value of what is lost with them.

Sessions of one kind and owner whose texts begin with the same tokens are a tree. What several of them have counts once:
a session is worth the share of its value that its text alone has. So branches that were used once leave first, then
long ones that were used often, and a beginning goes with the last session that has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from kvkeep.blocks.value import part_left
from kvkeep.decode.cached_text import common_prefix
from kvkeep.serve.session import OpenSession


def by_value(sessions: Iterable[OpenSession]) -> list[OpenSession]:
    """Return sessions in the order of their eviction: each is worth the least after those before it have gone."""
    sorted_texts = sorted(sessions, key=lambda one: (one.owner, repr(one.cache.request), one.past.ids))
    shared = [0, *(_shared(one, other) for one, other in pairwise(sorted_texts)), 0]  # by each with its neighbours

    def left(place: int) -> float:
        one = sorted_texts[place]
        length = len(one.past.ids)
        return part_left(one.worth, max(1, length - max(shared[place : place + 2])) / max(1, length))

    found: list[OpenSession] = []
    while sorted_texts:
        place = min(range(len(sorted_texts)), key=left)
        found.append(sorted_texts.pop(place))
        shared[place : place + 2] = [min(shared[place : place + 2])]
    return found


def _shared(one: OpenSession, other: OpenSession) -> int:
    """Return the number of first tokens that two sessions have in common."""
    same = one.owner == other.owner and one.cache.request == other.cache.request
    return common_prefix(one.past.ids, other.past.ids) if same else 0
