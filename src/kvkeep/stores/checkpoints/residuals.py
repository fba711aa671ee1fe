"""Checkpoint kinds ``residual:s`` and ``tokens``: residuals entering every s-th layer.

Residuals exist only while a token is read, so they are written then. The last ``budget`` tokens therefore have both
entries and residuals; KV-Direct's Eq. 28 omits that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

from torch import Tensor

from kvkeep.contracts.checkpoint import Checkpoint
from kvkeep.contracts.entries import Piece
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter
from kvkeep.memory.pages import PagedRows
from kvkeep.memory.places import Place
from kvkeep.memory.rows import Rows
from kvkeep.models.adapter import Adapter
from kvkeep.stores.checkpoints.prices import LONG, price_of_replay
from kvkeep.stores.checkpoints.replay import Replay
from kvkeep.stores.checkpoints.spec import CheckpointSpec


class ResidualCheckpoint(Checkpoint):
    """A checkpoint of residuals (batch, n, hidden_size), one for every ``stride`` layers."""

    by_token = True
    copies = False
    capacity = None

    def __init__(
        self,
        adapter: Adapter,
        ledger: Ledger,
        home: Place,
        geometry: ModelGeometry,
        spec: CheckpointSpec,
        *,
        meter: Meter,
        page: int,
    ) -> None:
        self.home = home
        self.adapter, self.ledger, self.meter, self.page = adapter, ledger, meter, page
        self.layers = [layer.index for layer in geometry.full_layers]
        self.stride = len(geometry.layers) if spec.kind == "tokens" else spec.stride
        self.replays = self.stride > 1
        self.anchors = geometry.residual_anchors(self.stride)
        self.spec, self.geometry = spec, geometry
        self._unpriced = True
        self._windows = [layer.window for layer in geometry.layers]
        self._rows: dict[int, Rows] = {layer: PagedRows(home) for layer in self.anchors if layer > 0}
        self._replay: Replay | None = None

    @property
    def reads_ids(self) -> bool:
        """Whether residuals entering layer 0 are needed, and follow from ids."""
        return 0 in self.anchors and 0 not in self._rows

    # -- writing ------------------------------------------------------------------------------------

    def begin_forward(self, from_ids: bool, known: int) -> None:
        """Drop the residuals rebuilt for the last pass. Layer 0's residuals follow from the ids in the ledger. From the
        first token that comes as an embedding, the checkpoint keeps them as vectors, earlier ones included."""
        self._drop()
        if self.replays and known > LONG and self._unpriced and self.ledger.device.type == "cuda":
            self._unpriced = False
            weights = sum(one.numel() for layer in self.adapter.layers for one in layer.parameters())
            warnings.warn(price_of_replay(self.spec, self.geometry, weights, known), stacklevel=2)
        if from_ids or 0 in self._rows or 0 not in self.anchors:
            return
        self._rows[0] = rows = PagedRows(self.home)
        for low in range(0, known, self.page):
            rows.append(self.adapter.embed(*self.ledger.span(low, min(low + self.page, known))))

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        if layer in self._rows:
            self._rows[layer].append(hidden)

    # -- reading ------------------------------------------------------------------------------------

    def pieces(self, layer: int, stop: int, lazy: bool = False) -> Iterator[Piece]:
        """Project page by page at an anchor, else run the layers from the anchor up to this one first."""
        anchor = layer - layer % self.stride
        later = [other for other in self.layers if layer < other < anchor + self.stride]
        if layer == anchor and not later:
            yield from self._projected(layer, self._anchored(anchor, stop))
            return
        replay = self._roll(anchor, layer, stop)
        if later:
            yield from replay.advance()
        else:
            pages = ((low, replay.hidden[:, low : low + self.page]) for low in range(0, stop, self.page))
            yield from self._projected(layer, pages)
            self._drop()

    def _anchored(self, anchor: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the residuals entering ``anchor``, a page at a time, on the model's device."""
        device = self.ledger.positions.view().device
        rows: Rows | None = self._rows.get(anchor)
        if rows is None:
            for low in range(0, stop, self.page):
                yield low, self.adapter.embed(*self.ledger.span(low, min(low + self.page, stop)))
            return
        for start, piece in rows.read(0, stop):
            for low in range(0, piece.shape[-2], self.page):
                yield start + low, piece[:, low : low + self.page].to(device)

    def _projected(self, layer: int, pages: Iterator[tuple[int, Tensor]]) -> Iterator[Piece]:
        for start, hidden in pages:
            _, positions = self.ledger.span(start, start + hidden.shape[1])
            keys, values = self.adapter.project(layer, hidden, positions)
            with self.meter.holding(keys, values):
                yield Piece(keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None], first=start, formed=True)

    def _roll(self, anchor: int, layer: int, stop: int) -> Replay:
        """Bring the residuals of all slots below ``stop`` to the entry of ``layer``."""
        replay = self._replay
        if replay is None or not anchor <= replay.layer <= layer or replay.hidden.shape[1] != stop:
            self._drop()
            hidden: Tensor | None = None
            for low, page in self._anchored(anchor, stop):
                if hidden is None:
                    hidden = page.new_empty(page.shape[0], stop, page.shape[2])
                hidden[:, low : low + page.shape[1]] = page
            assert hidden is not None
            self.meter.hold(hidden.nbytes)
            replay = Replay(self.adapter, self.ledger, self.meter, self._windows, self.page, anchor, hidden)
            self._replay = replay
        while replay.layer < layer:  # also runs the layers with a sliding window
            for _ in replay.advance():
                pass
        return replay

    def _drop(self) -> None:
        if self._replay is not None:
            self.meter.hold(-self._replay.hidden.nbytes)
            self._replay = None

    # -- keeping ------------------------------------------------------------------------------------

    def length(self, layer: int) -> int:
        return self.ledger.length

    def truncate_residuals(self, length: int) -> None:
        for rows in self._rows.values():
            rows.truncate(length)

    def select(self, index: Tensor, lanes: Callable[[int], Tensor]) -> None:
        for rows in self._rows.values():
            rows.select(index)

    def stores(self) -> Iterator[tuple[str, Rows]]:
        for layer, rows in self._rows.items():
            yield f"residual.{layer}", rows

    def expect(self, names: set[str]) -> None:
        """Open the store of layer 0, which exists only where tokens came as embeddings."""
        if "residual.0" in names:
            self._rows[0] = PagedRows(self.home)
