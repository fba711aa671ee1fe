"""The reader of most methods: a step attends to the resident entries and to all of the store of evicted entries."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import Tensor

from kvkeep.attention import Segment, attend, attend_scored, received
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.recall import Reader
from kvkeep.step import native
from kvkeep.step.plan import LayerStep
from kvkeep.stores.layer import Layer


class ReadEvicted(Reader):
    """Attends over the store's entries, the resident ones and the new ones."""

    def attend(self, layer: Layer, step: AttentionInputs) -> Tensor:
        """Attend, and let the selector and the store learn the attention of each entry."""
        store, resident = layer.evicted, layer.resident
        settled = layer.attends_settled(step)
        if settled:
            layer.settle()
        elif step.brings_entries:
            store.begin(resident)
        found = self._attended_where_it_lies(layer, step) if settled and step.queries == 1 else None
        output = self._attended(layer, step, settled) if found is None else found
        store.attended(step, output, resident)
        if step.last:
            layer.finish()
        return output

    def plan(self, layer: Layer) -> LayerStep | None:
        step: LayerStep | None = layer.resident.plan()
        return step

    def _attended_where_it_lies(self, layer: Layer, step: AttentionInputs) -> Tensor | None:
        """Attend to the settled entries in one call of the library, and let the selector and the store learn. None
        where some of them are masked or temporary, or where the library cannot read them."""
        store, resident = layer.evicted, layer.resident
        if step.mask is not None or step.latent or layer.ledger.visible is not None:
            return None
        resident_spans, evicted = resident.spans(), store.spans()
        if not resident_spans or evicted is None:
            return None
        if not all(native.can_attend(step.query, span.keys, span.values) for span in (*evicted, *resident_spans)):
            return None
        spans = [*evicted, *resident_spans]
        done = native.Call(step.query, spans, step.scaling).attend()
        assert done is not None
        if resident.observes or store.listens:
            scored = spans if store.listens else resident_spans
            received = native.Call(step.query, scored, step.scaling).received(
                done[1], greatest=resident.selector.reduce == "max"
            )
            *others, weights = received.split([span.entries for span in scored], 1)
            if resident.observes:
                resident.learn(weights)
            if store.listens:
                store.observe(others, 1, resident)
        return done[0]

    def _attended(self, layer: Layer, step: AttentionInputs, settled: bool) -> Tensor:
        store, resident, wide = layer.evicted, layer.resident, step.wide(layer.length)
        masked = wide is not None or layer.ledger.visible is not None
        ordered = masked or native.can_attend(step.query, step.key, step.value)
        resident_segments = [layer.segment(piece, step, wide) for piece in resident.pieces(ordered)]
        pieces = store.pieces(step.query, resident, layer.length)
        evicted: Iterable[Segment] = (layer.segment(piece, step, wide) for piece in pieces)
        if store.listens:
            evicted = list(evicted)  # the store uses the pieces again after the attention
        complete = store.listens or store.merges or not store.keeps
        one_bank = len(resident_segments) == 1 and resident_segments[0].lanes is None
        if settled and step.queries == 1 and complete and one_bank and resident.observes:
            found = attend_scored(step.query, [*evicted, *resident_segments], step.scaling, resident.selector.reduce)
            output, (*others, weights) = found
            resident.learn(weights)
            if store.listens:
                store.observe(others, 1, resident)
            return output
        new = () if settled else (step.arriving(),)
        output, lse = attend(step.query, chain(evicted, resident_segments, new), step.scaling, origin=layer.origin)
        resident.observe(step, lse, resident_segments, None if settled else layer.pending, layer.length)
        if store.listens:
            observe_evicted(layer, step, lse, evicted)
        return output


def observe_evicted(layer: Layer, step: AttentionInputs, lse: Tensor, evicted: Iterable[Segment]) -> None:
    """Let a store that listens learn the attention of its pieces in a step, by the log-sum-exp over all entries."""
    resident = layer.resident
    window, lse = resident.selector.observation_window or None, layer.ledger.unpadded(lse, layer.heads)
    reduce = resident.selector.reduce
    weights = [received(step.query, piece, lse, step.scaling, window, reduce) for piece in evicted]
    layer.evicted.observe(weights, min(step.queries, window or step.queries), resident)
