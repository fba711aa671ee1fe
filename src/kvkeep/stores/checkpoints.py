"""Checkpoints: what evicted entries are kept as, and how exact keys and values come back from it.

K and V of layer l are projections of the residual entering layer l, so "one vector per token" and "one
matrix product per token and layer" are two different checkpoints (KV-Direct's Eqs. 24 and 26 quote one's
memory with the other's latency). Both are here, and what lies between:

* :class:`Entries` (``kv``): the keys and values themselves, elsewhere. Recall is a copy.
* :class:`Residuals` (``residual:s``): the residual entering every s-th layer. Recall at such a layer is a
  projection; the layers between are run over all evicted tokens, one layer at a time.
* ``tokens`` is the stride that spans all layers: the residual entering layer 0 is its token id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.attention.recall import available
from kvkeep.attention.visibility import new_mask, past_mask
from kvkeep.errors import UsageError, unknown
from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import Adapter
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.meter import Meter
from kvkeep.stores.places import Place
from kvkeep.stores.residual_page import ResidualPage
from kvkeep.stores.rows import Buffer, Pages, Ring, Rows

KINDS = ("tokens", "residual", "kv")
Piece = tuple[int, Any, Any]  # first slot, keys, values: tensors, or twice the same unformed page where asked for


@dataclass(frozen=True)
class CheckpointSpec:
    """What to keep of evicted entries, and where.

    kind: "tokens", "residual" or "kv". stride: layers per residual, for kind "residual". where: "device",
    "host" or "disk". capacity: entries the store may hold; the oldest beyond it are lost, and the cache is
    lossy from then on; None: unbounded. folder: for "disk".
    """

    kind: str
    where: str
    stride: int = 1
    capacity: int | None = None
    folder: str | None = None

    @staticmethod
    def parse(text: str, where: str, *, capacity: int | None = None, folder: str | None = None) -> CheckpointSpec:
        """Read ``"kv"``, ``"tokens"``, ``"residual"`` or ``"residual:STRIDE"``."""
        kind, _, stride = text.partition(":")
        if kind not in KINDS:
            raise unknown("checkpoint kind", kind, KINDS)
        if stride and (kind != "residual" or not stride.isdigit() or int(stride) < 1):
            raise UsageError(
                f"Checkpoint '{text}' is not understood: a stride is a whole number of layers from 1 on, "
                "and only 'residual' has one (residual:4)."
            )
        if capacity is not None and (
            capacity < 1 or not (kind == "kv" or (kind == "residual" and stride in ("", "1")))
        ):
            raise UsageError(
                "A capacity is a number of entries from 1 on, for checkpoint kinds 'kv' and 'residual' (stride "
                "1) only: the others rebuild later entries from earlier ones."
            )
        if folder is not None and where != "disk":
            raise UsageError(f"A checkpoint folder is for '--where disk', not '{where}'.")
        return CheckpointSpec(kind, where, int(stride or 1), capacity, folder)

    def __str__(self) -> str:
        return f"{self.kind}:{self.stride}" if self.kind == "residual" and self.stride > 1 else self.kind


class Checkpoint(Protocol):
    """What evicted entries are rebuilt from, for all layers of one cache."""

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Note the residual entering a layer, (batch, new, hidden)."""

    def evict(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take entries that leave the resident store, the oldest first."""

    def recall(self, layer: int, stop: int, unformed: bool = False) -> Iterator[Piece]:
        """Yield exact keys and values of slots below ``stop``, a piece at a time. ``unformed``: they may also come as
        pages that know their attention, one object for keys and values."""

    def pick(self, layer: int, lane: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Return exact keys and values (n, dim) of single entries: KV head ``lane`` (n,) of all rows of the batch, and
        ``slot`` (n,), none lost. Only where :attr:`picks`."""

    @property
    def picks(self) -> bool:
        """Whether single entries come back without all those before them."""

    def first(self, layer: int) -> int:
        """Return the first slot that is still there; those before are lost."""

    def truncate(self, length: int, evicted: Sequence[int]) -> None:
        """Forget the slots from ``length`` on; ``evicted``: how many each layer no longer holds itself."""

    def stores(self) -> Iterator[tuple[str, Rows]]:
        """Yield every store of rows with a name, for counting, saving and moving."""

    @property
    def copies(self) -> bool:
        """Whether a recall is a copy at most, and computes nothing."""

    @property
    def reads_ids(self) -> bool:
        """Whether the ledger's ids are part of what entries are rebuilt from."""

    def expect(self, names: set[str]) -> None:
        """Make room for the stores called ``names``, about to be filled from a file."""

    def begin_forward(self, from_ids: bool, known: int) -> None:
        """Prepare for new tokens, after the ``known`` slots before them; ``from_ids``: they came as ids."""


class Entries:
    """Kind ``kv``: evicted keys and values of each layer, moved as they are."""

    copies = True
    picks = True

    def __init__(
        self,
        home: Place,
        device: torch.device,
        layers: Sequence[int],
        spec: CheckpointSpec,
        meter: Meter,
        page: int,
    ) -> None:
        self.device, self.meter, self.page = device, meter, page
        self._rows = {layer: (_rows(home, spec), _rows(home, spec)) for layer in layers}

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Nothing: residuals are not kept."""

    def evict(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Append to the layer's store."""
        for rows, new in zip(self._rows[layer], (keys, values), strict=True):
            rows.append(new)

    def recall(self, layer: int, stop: int, unformed: bool = False) -> Iterator[Piece]:
        """Yield views where the entries lie in the device's own memory, else copies of a page at a time."""
        keys, values = self._rows[layer]
        for (start, key), (_, value) in zip(keys.read(keys.first, stop), values.read(values.first, stop), strict=True):
            if key.device == self.device:
                yield start, key, value
                continue
            for low in range(0, key.shape[-2], self.page):
                window = slice(low, low + self.page)
                moved = key[..., window, :].to(self.device), value[..., window, :].to(self.device)
                with self.meter.holding(*moved):
                    yield start + low, *moved

    def pick(self, layer: int, lane: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Gather them."""
        keys, values = (rows.pick(lane, slot).to(self.device) for rows in self._rows[layer])
        return keys, values

    def first(self, layer: int) -> int:
        """Return the first slot that the ring has not overwritten."""
        return self._rows[layer][0].first

    def truncate(self, length: int, evicted: Sequence[int]) -> None:
        """Keep what each layer has evicted, and nothing it still holds."""
        for layer, pair in self._rows.items():
            for rows in pair:
                rows.truncate(min(length, evicted[layer]))

    @property
    def reads_ids(self) -> bool:
        """Never: the entries themselves are kept."""
        return False

    def stores(self) -> Iterator[tuple[str, Rows]]:
        """Yield ``keys.L`` and ``values.L``."""
        for layer, (keys, values) in self._rows.items():
            yield f"keys.{layer}", keys
            yield f"values.{layer}", values

    def expect(self, names: set[str]) -> None:
        """Nothing: every store is there from the start."""

    def begin_forward(self, from_ids: bool, known: int) -> None:
        """Nothing to prepare."""


class Residuals:
    """Kinds ``residual:s`` and ``tokens``: residuals entering every s-th layer, written as they pass by.

    Residuals are written when a token arrives, not when it leaves (by then they are gone), so the last
    ``budget`` tokens have both entries and residuals: Eq. 28 leaves that out.
    """

    copies = False

    def __init__(
        self,
        adapter: Adapter,
        ledger: Ledger,
        home: Place,
        geometry: ModelGeometry,
        spec: CheckpointSpec,
        meter: Meter,
        page: int,
    ) -> None:
        self.adapter, self.ledger, self.meter, self.page = adapter, ledger, meter, page
        self.layers = [layer.index for layer in geometry.full_layers]
        self.windows = [layer.window for layer in geometry.layers]
        self.stride = len(geometry.layers) if spec.kind == "tokens" else spec.stride
        self.anchors = geometry.residual_anchors(self.stride)
        self._home, self._spec = home, spec
        self._rows: dict[int, Rows] = {layer: _rows(home, spec) for layer in self.anchors if layer > 0}
        self._rolling: _Rolling | None = None

    def begin_forward(self, from_ids: bool, known: int) -> None:
        """Drop what was rebuilt for the last pass. Layer 0's residuals follow from the ids in the ledger; once
        tokens come as embeddings they do not, and are kept as vectors from then on, earlier ones included."""
        self._drop()
        if from_ids or 0 in self._rows or 0 not in self.anchors:
            return
        self._rows[0] = rows = _rows(self._home, self._spec)
        for low in range(0, known, self.page):
            rows.append(self.adapter.embed(*self.ledger.span(low, min(low + self.page, known))))

    def expect(self, names: set[str]) -> None:
        """Open the store of layer 0, which is there only where embeddings came instead of ids."""
        if "residual.0" in names:
            self._rows[0] = _rows(self._home, self._spec)

    @property
    def picks(self) -> bool:
        """Where every layer has its own residuals."""
        return self.stride == 1

    def pick(self, layer: int, lane: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Project the slots that any lane asks for, once for all of them, a page at a time; take each lane's own."""
        union, place = slot.unique(return_inverse=True)
        rows: Rows | None = self._rows.get(layer)
        lanes = torch.arange(self.ledger.batch, device=slot.device).repeat_interleave(self.page)
        parts: list[tuple[Tensor, Tensor]] = []
        for low in range(0, len(union), self.page):
            own = union[low : low + self.page]
            ids, positions = (part.view()[:, own].squeeze(-1) for part in (self.ledger.ids, self.ledger.positions))
            if rows is None:
                hidden = self.adapter.embed(ids, positions)
            else:
                by_row = lanes.view(-1, self.page)[:, : len(own)].flatten()
                hidden = rows.pick(by_row, own.repeat(self.ledger.batch)).unflatten(0, (-1, len(own))).to(slot.device)
            parts.append(self.adapter.project(layer, hidden, positions))
        keys, values = (torch.cat(part, 2).flatten(0, 1) for part in zip(*parts, strict=True))
        with self.meter.holding(keys, values):
            return keys[lane, place], values[lane, place]

    def first(self, layer: int) -> int:
        """Return the first slot that the ring has not overwritten."""
        return self._rows[layer].first if layer in self._rows else 0

    def truncate(self, length: int, evicted: Sequence[int]) -> None:
        """Residuals are there for every slot."""
        for rows in self._rows.values():
            rows.truncate(length)

    @property
    def reads_ids(self) -> bool:
        """Whether residuals entering layer 0 are needed, and had from ids."""
        return 0 in self.anchors and 0 not in self._rows

    def _drop(self) -> None:
        if self._rolling is not None:
            self.meter.hold(-self._rolling.hidden.nbytes)
            self._rolling = None

    def enter_layer(self, layer: int, hidden: Tensor) -> None:
        """Keep the residual if the layer is an anchor; layer 0's follows from the ids in the ledger."""
        if layer in self._rows:
            self._rows[layer].append(hidden)

    def evict(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Nothing: the residual is kept already."""

    def recall(self, layer: int, stop: int, unformed: bool = False) -> Iterator[Piece]:
        """Project page by page at an anchor, else run the layers from the anchor up to this one first."""
        anchor = layer - layer % self.stride
        later = [other for other in self.layers if layer < other < anchor + self.stride]
        if layer == anchor and not later:
            yield from self._projected(layer, self._anchored(anchor, stop), unformed)
            return
        rolling = self._roll(anchor, layer, stop)
        if later:
            yield from self._advanced(rolling)
        else:
            pages = ((low, rolling.hidden[:, low : low + self.page]) for low in range(0, stop, self.page))
            yield from self._projected(layer, pages, unformed)
            self._drop()

    def _anchored(self, anchor: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the residuals entering ``anchor``, a page at a time, on the model's device."""
        device = self.ledger.positions.view().device
        rows: Rows | None = self._rows.get(anchor)
        if rows is None:
            for low in range(0, stop, self.page):
                yield low, self.adapter.embed(*self.ledger.span(low, min(low + self.page, stop)))
            return
        for start, piece in rows.read(rows.first, stop):
            for low in range(0, piece.shape[-2], self.page):
                yield start + low, piece[:, low : low + self.page].to(device)

    def _projected(self, layer: int, pages: Iterator[tuple[int, Tensor]], unformed: bool) -> Iterator[Piece]:
        for start, hidden in pages:
            _, positions = self.ledger.span(start, start + hidden.shape[1])
            weights = self.adapter.projection(layer) if unformed and available(hidden.device) else None
            if weights is not None:
                angles = self.adapter.rotation(layer, hidden, positions)
                page = ResidualPage(weights, hidden, angles, self.meter)
                yield start, page, page
                continue
            keys, values = self.adapter.project(layer, hidden, positions)
            with self.meter.holding(keys, values):
                yield start, keys, values

    def _roll(self, anchor: int, layer: int, stop: int) -> _Rolling:
        """Bring the residuals of all slots below ``stop`` to the entry of ``layer``."""
        rolling = self._rolling
        if rolling is None or not anchor <= rolling.layer <= layer or rolling.hidden.shape[1] != stop:
            self._drop()
            hidden: Tensor | None = None
            for low, page in self._anchored(anchor, stop):
                if hidden is None:
                    hidden = page.new_empty(page.shape[0], stop, page.shape[2])
                hidden[:, low : low + page.shape[1]] = page
            assert hidden is not None
            self.meter.hold(hidden.nbytes)
            rolling = self._rolling = _Rolling(anchor, hidden)
        while rolling.layer < layer:  # layers that keep their own window are passed through here
            for _ in self._advanced(rolling):
                pass
        return rolling

    def _advanced(self, rolling: _Rolling) -> Iterator[Piece]:
        """Run one layer over the residuals, in place and in chunks of rows; then yield its keys and values.

        The chunks go through the whole layer, its MLP included, so the workspace is the residuals, this layer's
        keys and values, and one chunk's activations.
        """
        layer, hidden = rolling.layer, rolling.hidden
        stop = hidden.shape[1]
        scratch = _Scratch(stop, self.ledger.visible, self.windows[layer])
        for low in range(0, stop, self.page):
            rows = hidden[:, low : low + self.page]
            _, positions = self.ledger.span(low, low + rows.shape[1])
            hidden[:, low : low + self.page] = self.adapter.advance(layer, rows, positions, scratch)
        rolling.layer += 1
        keys, values = scratch.keys.view(), scratch.values.view()
        with self.meter.holding(scratch.keys.data, scratch.values.data):
            yield 0, keys, values

    def stores(self) -> Iterator[tuple[str, Rows]]:
        """Yield ``residual.L``."""
        for layer, rows in self._rows.items():
            yield f"residual.{layer}", rows


@dataclass
class _Rolling:
    """Residuals of evicted tokens on their way up: ``hidden`` (batch, slots, hidden_size) enters ``layer``."""

    layer: int
    hidden: Tensor


class _Scratch:
    """The cache of one layer run over evicted tokens: full, causal, with the layer's own window."""

    def __init__(self, slots: int, visible: Tensor | None, window: int | None) -> None:
        self.keys, self.values = Buffer(limit=slots), Buffer(limit=slots)
        self.visible, self.window = visible, window
        self._new = 0

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.append(keys)
        self.values.append(values)
        self._new = keys.shape[-2]
        return keys, values

    def attends(self, layer_idx: int) -> bool:
        return True

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        stop, queries = self.keys.length, query.shape[2]
        first = stop - queries
        low = max(0, first - self.window + 1) if self.window is not None else 0
        segments = []
        if low < first:
            seen = past_mask(first, queries, low, first, visible=self.visible, window=self.window, device=query.device)
            past = expanded(module, self.keys.view(low, first), self.values.view(low, first))
            segments.append(Segment(*past, seen))
        if self.visible is None and self.window is None:
            segments.append(Segment(key, value, causal=True))
        else:
            own = new_mask(queries, queries, query.device)
            seen = past_mask(first, queries, first, stop, visible=self.visible, window=self.window, device=query.device)
            segments.append(Segment(key, value, own if seen is None else own & seen))
        return attend(query, segments, scaling)[0]


def latent(module: Any) -> bool:
    """Tell whether the attention of ``module`` multiplies with something else than what it caches."""
    return getattr(module, "expand_kv", None) is not None


def expanded(module: Any, keys: Any, values: Any) -> tuple[Any, Any]:
    """Return what the attention of ``module`` multiplies with: latent attention (DeepSeek-V3) caches the
    compressed latents and expands them each time, from what is written out."""
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = getattr(module, "expand_kv", None)
    if expand is None:
        return keys, values
    if not isinstance(keys, Tensor):
        dtype = next(module.parameters()).dtype
        keys, values = keys.dense(dtype)[:, None], values.dense(dtype)[:, None]
    return expand(keys, values)


def _rows(home: Place, spec: CheckpointSpec) -> Rows:
    return Pages(home) if spec.capacity is None else Ring(spec.capacity, home)
