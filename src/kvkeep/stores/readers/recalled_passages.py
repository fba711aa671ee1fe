"""The reader of ``endless``: beyond a number of tokens, a step attends to the newest entries and to a few passages.

The entries before the resident ones are in a checkpoint, with the keys of their positions in the text. They form
passages of consecutive tokens, of which all layers recall the same few (:mod:`kvkeep.stores.readers.passage_choice`).
The passages are placed one after the other, in the order of the text, directly before the newest entries. So no
distance exceeds the model's positions (InfLLM, arXiv:2402.04617, gives all of them one far position instead). Scores
depend on distances alone: the reader copies the chosen passages, and rotates their keys by as many positions as the
passage moves. The copies serve until the next choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.part import Site
from kvkeep.errors import UsageError
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.memory.extent import Extent
from kvkeep.memory.meter import nbytes
from kvkeep.models.adapter import Adapter
from kvkeep.step.plan import JoinedSpans, LayerStep, Span
from kvkeep.stores.checkpoints.entries import EntryCheckpoint
from kvkeep.stores.layer import Layer, ReadEvicted
from kvkeep.stores.readers.passage_choice import PassageChoice


class RecalledPassages(ReadEvicted):
    """Attends to all entries of a text of at most ``exact`` tokens, like :class:`ReadEvicted`. Beyond them it attends
    to the passages of ``choice``, and to all entries after the last passage."""

    def __init__(self, site: Site, adapter: Adapter, choice: PassageChoice, exact: int | None) -> None:
        assert isinstance(site.checkpoint, EntryCheckpoint)
        self.checkpoint, self.index, self.meter, self.first = site.checkpoint, site.layer.index, site.meter, site.first
        self.adapter, self.choice, self.exact, self.entries = adapter, choice, exact, site.entries
        self._copied: Tensor | None = None  # the choice whose passages are copied
        self._copies: Span | None = None

    @property
    def bookkeeping_bytes(self) -> int:
        return 0 if self._copies is None else nbytes(self._copies.keys, self._copies.values)

    def plan(self, layer: Layer, count: int = 1) -> LayerStep | None:
        step = super().plan(layer) if count == 1 else None
        if step is None or self._exactly(layer):
            return step
        if not self.choice.holds or self._copied is None or self._copied is not self.choice.numbers:
            return None
        if self.choice.gone != self._gone:
            return None
        near = _last(step.attend, layer.length + 1 - self.choice.passages * self.choice.size)
        return step._replace(attend=near if self._copies is None else [self._copies, *near])

    def attend(self, layer: Layer, step: AttentionInputs) -> Tensor:
        if self._exactly(layer):
            return super().attend(layer, step)
        if layer.ledger.visible is not None or step.wide(layer.length) is not None:
            raise UsageError(
                f"Beyond {self.exact} tokens, attention reads recalled passages, which support neither padding nor "
                "your own mask over the past; read each text by itself, or shorten it."
            )
        settled = layer.attends_settled(step)
        if settled:
            layer.settle()
        taken = layer.resident.evicted
        if self.first:  # all layers have taken as many
            older = min(taken, max(0, layer.length - self.entries))  # after a crop newer ones are in the checkpoint
            self.choice.choose(older // self.choice.size, step.new, self._gone)
        if self._copied is not self.choice.numbers:
            self._copy(layer)
        near = [] if self._copies is None else [self._copies.segment()]
        if (start := self.choice.passages * self.choice.size) < taken:
            keys, values = self.checkpoint.between(self.index, start, taken)
            near.append(Segment(keys[:, None], values[:, None]))
        near += [layer.segment(piece, step, None) for piece in layer.resident.pieces(ordered=False)]
        if not settled:
            near.append(step.arriving())
        output, _ = attend(step.query, near, step.scaling, step.sinks)
        if step.last:
            layer.finish()
        return output

    def truncate(self, layer: Layer, length: int) -> None:
        self.choice.truncate(length)
        self._copied = self._copies = None

    def select(self, layer: Layer, lanes: Tensor) -> None:
        self.choice.select()
        self._copied = self._copies = None

    def state(self) -> dict[str, Tensor]:
        return {"choice": self.choice.state} if self.first else {}

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        if self.first:
            self.choice.restore(state["choice"])

    def check(self, extent: Extent) -> None:
        if self.first:
            self.choice.check(extent.slots)

    @property
    def _gone(self) -> tuple[int, int]:
        """The passages that the checkpoint has lost: the first of them, and the first after them."""
        size, after = self.choice.size, self.checkpoint.first(self.index)
        return min(after, self.checkpoint.beginning(self.index)) // size, after // size

    def _exactly(self, layer: Layer) -> bool:
        return self.exact is None or layer.ledger.length <= self.exact

    def _copy(self, layer: Layer) -> None:
        """Copy the chosen passages, with their keys at the places before the newest entries."""
        self._copied, self._copies, size = self.choice.numbers, None, self.choice.size
        assert self._copied is not None
        count = self._copied.shape[1]
        if not count:
            return
        numbers = self._copied.repeat_interleave(layer.heads, 0)
        keys, values = (part.flatten(1, 2) for part in self.checkpoint.passages(self.index, numbers, size))
        places = torch.arange(self.choice.passages - count, self.choice.passages, device=numbers.device)
        moved = ((places - numbers) * size).repeat_interleave(size, 1)
        plain = keys[:, None].float()
        turned = self.adapter.turn(self.index, plain, self.adapter.angles(self.index, plain, moved))
        with self.meter.holding(keys, plain, turned):
            self._copies = Span(turned[:, 0].to(keys.dtype).contiguous(), values, 0, count * size)


def copied_bytes(layer: LayerGeometry, geometry: ModelGeometry, entries: int) -> int:
    """Return the bytes of copies of ``entries`` entries for each KV head."""
    return entries * layer.entry_elements * geometry.dtype_bytes


def _last(spans: Sequence[Span], count: int) -> list[Span]:
    """Return the last ``count`` entries of ``spans``."""
    found: list[Span] = []
    for span in reversed(spans):
        if count <= 0:
            break
        if span.entries <= count:
            part = [span]
        elif isinstance(span.keys, JoinedSpans):
            part = _last(span.keys.spans, count)
        else:
            part = [Span(span.keys, span.values, span.stop - count, span.stop)]
        found = [*part, *found]
        count -= sum(one.entries for one in part)
    return found
