"""A rehearsal: passes in which a cache's layers attend, and whose entries are discarded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.recall import Reader
from kvkeep.stores.layer import Layer
from kvkeep.stores.sliding import noted, sliding_layers


class Rehearsal(Reader):
    """The reader of a layer in a rehearsal."""

    def arrive(self, layer: Layer, keys: Tensor, values: Tensor) -> None:
        """Do nothing, because the entries are not stored."""

    def attend(self, layer: Layer, step: AttentionInputs) -> Tensor:
        output = self.attended(layer, step)
        if step.last:
            self.waiting, layer.pending = step.new, None
        return output

    @abstractmethod
    def attended(self, layer: Layer, step: AttentionInputs) -> Tensor:
        """Return attention over past and new entries, (lanes, heads, queries, value_dim)."""

    def truncate(self, layer: Layer, length: int) -> None:
        self.waiting = 0


@contextmanager
def rehearsing(cache: Any, readers: Sequence[Rehearsal]) -> Iterator[Callable[[], None]]:
    """Within the block ``readers``, one for each full layer, attend for ``cache``, in one chunk. The entries are
    discarded, and hooks are not called. Yields a function that forgets the tokens read so far, as the end of the block
    does. Gradients flow where they are enabled."""
    stream, layers = cache.stream, cache.stream.bounded
    stream.roll_back()
    length, windows = cache.ledger.length, noted(sliding_layers(cache))
    states = [(state, state.copied()) for state in cache.made.states.values()]
    readers_before = [layer.reader for layer in layers]
    for layer, reader in zip(layers, readers, strict=True):
        layer.reader = reader

    def forget() -> None:
        for layer in layers:
            layer.pending, layer.reader.waiting = None, 0
        for window in windows:
            window.restore(again=True)
        for state, copy in states:
            state.restore(copy, length)
        cache.ledger.truncate(length)

    with stream.rehearsal():
        try:
            yield forget
        finally:
            forget()
            for layer, reader in zip(layers, readers_before, strict=True):
                layer.reader = reader
