"""The layer whose entries are all in a log: what is resident is a working set, and anything that left may come back.

Nothing has to be rescued when it leaves, so no entry counts twice: an exact pass attends to the log and what is new,
and what is resident is only told what attention it got.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.stores.checkpoints import Checkpoint
from kvkeep.stores.parts import Parts
from kvkeep.stores.selected import SelectedLayer
from kvkeep.stores.streamed import Step, fresh, seen
from kvkeep.stores.whereabouts import Whereabouts


class LoggedLayer(SelectedLayer):
    """A :class:`SelectedLayer` whose entries are all in ``log`` too, in order; it attends to all of them."""

    def __init__(self, parts: Parts, log: Checkpoint, tail: int = 0) -> None:
        super().__init__(parts, tail)
        self.log = log

    @property
    def evicted(self) -> int:
        """Slots that the log holds: all that are settled."""
        return self.length

    def attend(self, step: Step) -> Tensor:
        """Attend over the log and what is new."""
        output, lse = attend(step.query, self.everything(step), step.scaling)
        self.attended(self.folded(step), self.by_lane(lse))
        return output

    def everything(self, step: Step) -> Iterator[Segment]:
        """Yield the log, a piece at a time, and what is new."""
        if self.length:
            wide = step.wide(self.length)
            for piece in self.log.recall(self.index, self.length, unformed=True):
                yield seen(piece, step, wide, self.length)
        yield fresh(step.query, step.key, step.value, step.mask)

    def attended(self, own: Step, lse: Tensor) -> None:
        """Tell the selector what a step over everything, folded to lanes, gave what is resident and new; settle after
        the last reader."""
        held = self.held_segments(own.module, own.wide(self.length))
        self.observe(own.query, lse, own.scaling, held, fresh(own.query, own.key, own.value, own.mask))
        if own.last:
            self.settle()

    def settle(self) -> None:
        """Write the entries in hand to the log, and let them compete with those that are resident."""
        if self.pending is not None:
            self.log.evict(self.index, *self.pending)
        super().settle()

    def whereabouts(self, length: int) -> Tensor:
        """Return the codes of every slot: what a fate dropped is in the log, unless that has lost it."""
        codes = super().whereabouts(length)
        codes.masked_fill_(codes == Whereabouts.DROPPED, Whereabouts.CHECKPOINTED)
        lost = codes[..., : self.log.first(self.index)]
        lost.masked_fill_(lost == Whereabouts.CHECKPOINTED, Whereabouts.DROPPED)
        return codes
