"""The reader of most methods: a step attends to what is resident, and to all that the store of evicted entries has."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import Tensor

from kvkeep.attention import Segment, attend, attend_scored, received
from kvkeep.attention.step import Step
from kvkeep.contracts.recall import Reader
from kvkeep.step import native
from kvkeep.step.plan import LayerStep
from kvkeep.stores.layer import Layer


class ReadEvicted(Reader):
    """Attends over what comes back, what is resident and what is new."""

    def attend(self, layer: Layer, step: Step) -> Tensor:
        """Attend, and let the selector and the store learn what each entry received."""
        store, resident = layer.evicted, layer.resident
        settled = layer.attends_settled(step)
        if settled:
            layer.settle()
        elif step.own:
            store.begin(resident)
        output = self._attended(layer, step, settled)
        store.attended(step, output, resident)
        if step.last:
            layer.finish()
        return output

    def plan(self, layer: Layer) -> LayerStep | None:
        step: LayerStep | None = layer.resident.plan()
        return step

    def _attended(self, layer: Layer, step: Step, settled: bool) -> Tensor:
        """Attend by segments, whatever there is of them."""
        store, resident, wide = layer.evicted, layer.resident, step.wide(layer.length)
        ordered = wide is not None or layer.ledger.visible is not None or native.runs(step.query, step.key, step.value)
        held = [layer.segment(piece, step, wide) for piece in resident.pieces(ordered)]
        pieces = store.pieces(step.query, resident, layer.length)
        evicted: Iterable[Segment] = (layer.segment(piece, step, wide) for piece in pieces)
        if store.listens:
            evicted = list(evicted)  # its pieces are held until it has learnt what they received
        complete = store.listens or store.merges or not store.keeps
        if settled and step.queries == 1 and complete and resident.weighs_at_once(held):
            found = attend_scored(step.query, [*evicted, *held], step.scaling, resident.selector.reduce)
            output, (*others, weights) = found
            resident.learn(weights)
            if store.listens:
                store.observe(others, 1, resident)
            return output
        new = () if settled else (step.arriving(),)
        output, lse = attend(step.query, chain(evicted, held, new), step.scaling, origin=layer.origin)
        resident.observe(step, lse, held, None if settled else layer.pending, layer.length)
        if store.listens:
            observe_evicted(layer, step, lse, evicted)
        return output


def observe_evicted(layer: Layer, step: Step, lse: Tensor, evicted: Iterable[Segment]) -> None:
    """Let a store that listens learn what its pieces received of a step, by the log-sum-exp of everything."""
    resident = layer.resident
    window, lse = resident.selector.observation_window or None, resident.unpadded(lse)
    reduce = resident.selector.reduce
    weights = [received(step.query, piece, lse, step.scaling, window, reduce) for piece in evicted]
    layer.evicted.observe(weights, min(step.queries, window or step.queries), resident)
