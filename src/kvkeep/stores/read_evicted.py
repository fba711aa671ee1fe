"""The reader of most methods: a step attends to what is resident, and to all that the store of evicted entries has."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import Tensor

from kvkeep.attention import Segment, attend, received, weighed
from kvkeep.attention.kernel import alone, runs
from kvkeep.attention.step import Step
from kvkeep.contracts import Reader
from kvkeep.stores.layer import Layer


class ReadEvicted(Reader):
    """Attends over what comes back, what is resident and what is new."""

    def attend(self, layer: Layer, step: Step) -> Tensor:
        """Attend, and let the selector and the store learn what each entry received."""
        store, resident = layer.evicted, layer.resident
        wide, settled = step.wide(layer.length), layer.attends_settled(step)
        if settled:
            layer.settle()
            if not store.keeps and (output := _alone(layer, step)) is not None:
                return output
        elif step.own:
            store.begin(resident)
        ordered = wide is not None or layer.ledger.visible is not None or runs(step.query, step.key, step.value)
        held = [layer.segment(piece, step, wide) for piece in resident.pieces(ordered)]
        pieces = store.pieces(step.query, resident, layer.length)
        evicted: Iterable[Segment] = (layer.segment(piece, step, wide) for piece in pieces)
        if store.listens:
            evicted = list(evicted)  # its pieces are held until it has learnt what they received
        complete = store.listens or store.merges or not store.keeps
        if settled and step.queries == 1 and complete and resident.weighs_at_once(held):
            output, (weights, *others) = weighed(step.query, [*held, *evicted], step.scaling, resident.selector.reduce)
            resident.learn_all(weights)
            if store.listens:
                store.observe(others, 1, resident)
        else:
            new = () if settled else (step.arriving(),)
            output, lse = attend(step.query, chain(evicted, held, new), step.scaling, origin=layer.origin)
            resident.observe(step, lse, held, None if settled else layer.pending, layer.length)
            if store.listens:
                observe_evicted(layer, step, lse, evicted)
        store.attended(step, output, resident)
        if step.last:
            layer.finish()
        return output


def _alone(layer: Layer, step: Step) -> Tensor | None:
    """Return the attention of a step over what is resident alone, in one call: of every decoded token where what leaves
    is dropped. None where there is more to it."""
    resident = layer.resident
    if step.mask is not None or step.queries > 1 or step.latent or (held := resident.in_one_piece()) is None:
        return None
    keys, values = held
    if not runs(step.query, keys, values):
        return None
    reduce = resident.selector.reduce if resident.observes else ""
    output, weights = alone(step.query, keys, values, step.scaling, reduce)
    if weights is not None:
        resident.learn_all(weights)
    if step.last:
        layer.finish()
    return output


def observe_evicted(layer: Layer, step: Step, lse: Tensor, evicted: Iterable[Segment]) -> None:
    """Let a store that listens learn what its pieces received of a step, by the log-sum-exp of everything."""
    resident = layer.resident
    window, lse = resident.selector.observation_window or None, resident.unpadded(lse)
    reduce = resident.selector.reduce
    weights = [received(step.query, piece, lse, step.scaling, window, reduce) for piece in evicted]
    layer.evicted.observe(weights, min(step.queries, window or step.queries), resident)
