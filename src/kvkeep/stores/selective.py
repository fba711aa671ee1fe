"""The layer of selective recall: a step attends to what is resident, and to the pages of the log that promise most.

Attention over what is resident and new gives the log-sum-exp of their scores, and the bounds of a page
(:mod:`kvkeep.stores.bounds`) the most that any of its entries can score. So before anything is recalled it is known how
much of the attention a page can have at most; a :class:`Choice` says which pages are worth it, by lane, and what is
left out is bounded by

    S / (1 + S),    S = sum over pages left out of  n exp(bound · scaling - lse)

with n the page's entries that are not resident and ``lse`` of everything attended in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.stores import exchange
from kvkeep.stores.bounds import PAGE, Bounds
from kvkeep.stores.checkpoints import Checkpoint, expanded, latent
from kvkeep.stores.logged import LoggedLayer
from kvkeep.stores.parts import Parts
from kvkeep.stores.streamed import Step, fresh

FEW = 8
"""Queries at most for which pages are chosen; a longer step recalls everything."""


class Choice(Protocol):
    """Which pages are recalled; :mod:`kvkeep.policies.recalls` has them."""

    def choose(self, excess: Tensor) -> Tensor | None:
        """Return which pages each lane recalls, (lanes, pages) bool, or None for none. ``excess``: (lanes, heads,
        queries, pages), the logarithm of the most that a page can add to what is attended already, whose sum is 1."""


@dataclass(frozen=True)
class Certificate:
    """What one layer can have left out. last: the largest bound on the attention any query of the last step gave to
    entries left out; worst: the same over all steps. recalled: entries recalled in a step, and away: entries there were
    to recall, both for one KV head of one row, mean over the steps of few queries."""

    layer: int
    last: float
    worst: float
    recalled: float
    away: float


class SelectiveLayer(LoggedLayer):
    """A :class:`LoggedLayer` that recalls what ``choice`` says, in steps of at most :data:`FEW` queries. In longer
    ones, where the caller masks by hand, and where attention is latent (bounds of what is cached say nothing about
    scores then), it recalls everything."""

    def __init__(self, parts: Parts, log: Checkpoint, choice: Choice) -> None:
        super().__init__(parts, log)
        self.choice, self.bounds = choice, Bounds()
        self.last = self.worst = 0.0
        self._recalled = self._away = 0.0
        self._steps = 0

    @property
    def certificate(self) -> Certificate:
        """What it can have left out so far."""
        steps = max(1, self._steps)
        return Certificate(self.index, self.last, self.worst, self._recalled / steps, self._away / steps)

    # -- a forward pass -----------------------------------------------------------------------------

    def attend(self, step: Step) -> Tensor:
        """Attend over what is resident and new, and the pages that are chosen."""
        if step.own:
            self.last = 0.0
        wide = step.wide(self.length)
        few = step.query.shape[2] <= FEW and wide is None and not latent(step.module)
        lost = self.log.first(self.index) > 0
        if not few and not lost:
            return super().attend(step)
        own = self.folded(step)
        query, wide = own.query, own.wide(self.length)
        single = few and self.alone(step)
        if single:
            self.settle()
        held = self.held_segments(step.module, wide)
        new = None if single else fresh(query, own.key, own.value, own.mask)
        near = held if new is None else [*held, new]
        if few:
            output, lse = self._chosen_pages(query, near, step)
        else:
            output, lse = attend(query, chain(near, self._read(step.module, ~self.held(), wide)), step.scaling)
        if lost:
            self._note(1.0)  # nothing bounds what was lost
        self.observe(query, lse, step.scaling, held, new)
        if step.last:
            self.settle()
            if few:
                self.exchange(query, lse, step.scaling)
        return output.reshape(*step.query.shape[:-1], output.shape[-1])

    def _chosen_pages(self, query: Tensor, own: list[Segment], step: Step) -> tuple[Tensor, Tensor]:
        """Attend over ``own`` and what is recalled; note the bound on the rest."""
        output, lse = attend(query, own, step.scaling)
        away = self.away()
        if away is None:
            return output, lse
        counts = away.unflatten(1, (-1, PAGE)).sum(2)
        most = self.bounds.upper(query).mul_(step.scaling)
        most += counts.log()[:, None, None]
        taken = self.choice.choose(most - self._counted(lse)[..., None])
        recalled = 0
        if taken is not None:
            wanted = away & taken.repeat_interleave(PAGE, 1)
            recalled = int(wanted.sum())
            if recalled:
                output, lse = attend(query, self._recall(step.module, wanted), step.scaling, (output, lse))
            most.masked_fill_(taken[:, None, None], float("-inf"))
        left = (most - self._counted(lse)[..., None]).logsumexp(-1)
        self._note(float(left.sigmoid().max()))  # S / (1 + S), by log S
        if step.own:
            self._recalled += recalled / len(away)
            self._away += int(counts.sum()) / len(away)
            self._steps += 1
        return output, lse

    def exchange(self, query: Tensor, lse: Tensor, scaling: float) -> None:
        """Bring entries back after a step, if that is what the recall does: here it is not."""

    def _counted(self, lse: Tensor) -> Tensor:
        """Return the log-sum-exp that pages are compared with: whatever padding asks for is of no interest."""
        return self.unpadded(lse.clamp(min=torch.finfo(lse.dtype).min))

    def away(self) -> Tensor | None:
        """Return which slots can come back, (lanes, slots of whole pages) bool; None where there are none."""
        if not self.length or not self.banks:
            return None
        away = exchange.away(self)
        if not away.any():
            return None
        return torch.nn.functional.pad(away, (0, self.bounds.pages * PAGE - self.length))

    def _recall(self, module: Any, wanted: Tensor) -> Iterator[Segment]:
        """Yield what is ``wanted``, (lanes, slots) bool: gathered, or where some lane wants most of the log, read as it
        lies and masked."""
        if int(wanted.sum(1).max()) > self.length // 2:
            yield from self._read(module, wanted[:, : self.length], None)
            return
        slots = exchange.compact(wanted)
        keys, values = exchange.fetched(self, slots)
        with self.meter.holding(keys, values):
            yield Segment(keys[:, None], values[:, None], (slots >= 0)[:, None, None])

    def _read(self, module: Any, wanted: Tensor, wide: Tensor | None) -> Iterator[Segment]:
        """Yield the log, a piece at a time, masked by ``wanted`` (lanes, slots) bool and ``wide``."""
        slots = torch.arange(self.length, device=wanted.device).masked_fill(~wanted, -1)
        for start, keys, values in self.log.recall(self.index, self.length):
            own = slots[:, start : start + keys.shape[-2]]
            rows = keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None]
            yield Segment(*expanded(module, *rows), self.seen(own, True, wide))

    def _note(self, bound: float) -> None:
        self.last = max(self.last, bound)
        self.worst = max(self.worst, self.last)

    def settle(self) -> None:
        """Write the entries in hand to the log with their bounds, and let them compete with those that are resident."""
        if self.pending is not None:
            self.bounds.extend(self.pending[0])
        super().settle()

    # -- the cache contract -------------------------------------------------------------------------

    def truncate(self, length: int) -> None:
        """Forget the slots from ``length`` on."""
        super().truncate(length)
        self.bounds.truncate(self.length)

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``."""
        super().select(index)
        self.bounds.select(index)

    def state(self) -> dict[str, Tensor]:
        """Return what must be saved."""
        told = [self.last, self.worst, self._recalled, self._away, self._steps]
        return super().state() | self.bounds.state() | {"certificate": torch.tensor(told, dtype=torch.float64)}

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Take what :meth:`state` gave, as a cache of ``length`` slots."""
        super().restore(state, length)
        self.bounds.restore(state, length)
        self.last, self.worst, self._recalled, self._away, steps = state["certificate"].tolist()
        self._steps = int(steps)

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes of slots, marks and bounds."""
        return super().bookkeeping_bytes + self.bounds.nbytes
