"""The cache layer: resident entries, a store of evicted ones, and a reader that computes attention; and the reader of
most methods, :class:`ReadEvicted`.

transformers passes new keys and values to a layer (:meth:`Layer.update`) and then asks for attention
(:meth:`Reader.attend`). The new entries are pending until attention has run. Then the layer settles them: it adds them
to the resident entries, which evicts others into the store. A single new entry is settled before attention, which reads
it in place; if its step can be planned (:meth:`Layer.plan`), an executor runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvkeep.attention import Segment, attend, attend_scored, received
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.entries import Beginning, EntryState, EvictedEntries, Piece
from kvkeep.contracts.part import Site
from kvkeep.contracts.recall import Reader
from kvkeep.contracts.resident import Resident
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import UsageError
from kvkeep.memory.extent import Extent, ShapeError
from kvkeep.memory.inference import outside_inference_mode, writable
from kvkeep.step import choice, native
from kvkeep.step.plan import LayerStep


class Layer(CacheLayerMixin):
    """One full layer of a bounded cache, composed of parts."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, site: Site, resident: Resident, evicted: EvictedStore, reader: Reader) -> None:
        super().__init__()
        self.index, self.ledger, self.device = site.layer.index, site.ledger, site.device
        self.geometry, self.dtype = site.layer, next(site.model.parameters()).dtype
        self.resident: Any = resident  # a WorkingSet if parts need one
        self.evicted, self.reader = evicted, reader
        self.heads = 0  # KV heads of a row
        self.length = 0  # number of settled slots
        self.pending: tuple[Tensor, Tensor] | None = None  # new entries, (lanes, n, dim)
        self.lost = False  # whether the store failed to take evicted entries

    # -- a forward pass -----------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Make new entries (batch, kv_heads, n, dim) pending, and return them; the reader attends to the past. Raises
        UsageError outside a forward pass of the cache's model, where no reader attends."""
        if self.arrived + key_states.shape[2] != self.ledger.length:
            raise UsageError(
                "The cache received entries outside a forward pass of its model, or from two threads at once; "
                "use one cache for each model and thread."
            )
        self.take(key_states, value_states)
        return key_states, value_states

    @outside_inference_mode
    def take(self, keys: Tensor, values: Tensor) -> None:
        self.is_initialized, self.heads = True, keys.shape[1]
        self.pending = writable(keys).flatten(0, 1), writable(values).flatten(0, 1)
        self.reader.arrive(self, *self.pending)

    def plan(self, count: int = 1) -> LayerStep | None:
        """Return the step of the next ``count`` tokens of one row without padding. None: they go through :meth:`take`
        and their reader's ``attend``."""
        return self.reader.plan(self, count) if self.heads and self.pending is None else None

    def commit(self) -> None:
        """Note that the next token of the step of :meth:`plan` has run. An interrupted call can be repeated."""
        self.reader.commit(self)

    @outside_inference_mode
    def adopt(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Take the entries of a text into this empty layer: pieces (1, kv_heads, n, dim) in order, which never
        change. Parts that keep all entries hold the pieces themselves."""
        by_lane = [[piece.flatten(0, 1) for piece in pieces] for pieces in (keys, values)]
        if self.resident.adopt(*by_lane):
            self.is_initialized, self.heads = True, keys[0].shape[1]
            self.length = sum(piece.shape[2] for piece in keys)
            return
        for pair in zip(keys, values, strict=True):
            self.take(*pair)
            self.settle(mapped=True)

    @property
    def lends(self) -> bool:
        """Whether another layer can begin with its first entries (:meth:`beginning`)."""
        return bool(self.resident.lends)

    def beginning(self, length: int) -> Beginning:
        """Return the first ``length`` entries, (batch, kv_heads, n, dim), between two passes. Whole blocks never change
        from now on, so that another layer may hold them, too."""
        blocks, rest = self.resident.beginning(length)
        by_row = [[piece.unflatten(0, (-1, self.heads)) for piece in pieces] for pieces in blocks]
        return Beginning(by_row, [part.unflatten(0, (-1, self.heads)) for part in rest])

    def settle(self, mapped: bool = False, take: Callable[[EvictedEntries], None] | None = None) -> None:
        """Make the pending entries resident; the store takes the entries evicted for them. mapped: they are mapped from
        a file. take: receives the evicted entries instead of the store."""
        if self.pending is None:
            return
        (keys, values), self.pending = self.pending, None
        self.reader.settling(self, keys, values, mapped)
        left = self.resident.admit(keys, values, self.length)
        self.length += keys.shape[1]
        if left is None:
            return
        if take is not None:
            take(left)
            return
        self.lost = True
        self.evicted.take(left, self.resident)
        self.lost = False

    def finish(self) -> None:
        """Settle the pending entries after attention, and let a store that listens swap entries."""
        self.settle()
        if self.evicted.listens:
            self.evicted.swap(self.resident, self.length)

    def attends_settled(self, step: AttentionInputs) -> bool:
        """Return whether a step attends to its new entries as settled ones: a single entry is settled before attention,
        and later readers find the entries settled."""
        return self.pending is None or (step.brings_entries and step.new == 1 and step.mask is None)

    @property
    def origin(self) -> Tensor | None:
        """The first slot of each lane that is not padding, (lanes,) in the host's memory; None without padding."""
        origin = self.ledger.origin
        return None if origin is None else origin.repeat_interleave(self.heads)

    @property
    def arrived(self) -> int:
        """Slots received, including those of drafts."""
        return self.length + self.reader.waiting

    # -- what attention sees --------------------------------------------------------------------------

    def segment(self, piece: Piece, step: AttentionInputs, wide: Tensor | None, keep: Tensor | None = None) -> Segment:
        """Return a piece of the past as a segment, masked by padding and gaps. wide: the caller's mask over all slots,
        (lanes, 1, queries, slots). keep: (lanes, slots) bool, the wanted slots of the piece."""
        keys, values = step.expanded(piece.keys, piece.values)
        mask = _seen(piece, self.ledger.visible_by(self.heads) if wide is None else wide)
        if keep is not None:
            mask = _both(mask, _slots_of(piece, keep)[:, None, None])
        if piece.extra is not None:
            mask = _weighted(mask, piece.extra, piece.keys.shape[2], step.query.dtype)
        return Segment(keys, values, mask, lanes=piece.lanes, formed=piece.formed)

    def everything(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of all slots in order, (lanes, slots, dim) each, exact if the method is."""
        entries: list[Tensor] = []
        for piece in self.reader.past(self):
            pair = piece.keys, piece.values
            parts = [part[:, 0] if isinstance(part, Tensor) else part.dense(self.dtype) for part in pair]
            if not entries:
                lanes = self.ledger.batch * self.heads
                entries = [part.new_zeros(lanes, self.length + 1, part.shape[2]) for part in parts]
            slots = piece.slots
            if slots is None:
                slots = torch.arange(piece.first, piece.first + parts[0].shape[1], device=parts[0].device)[None]
            index = torch.where(slots < 0, self.length, slots).long()
            for all_slots, part in zip(entries, parts, strict=True):
                rows = torch.arange(len(all_slots), device=part.device) if piece.lanes is None else piece.lanes
                all_slots[rows[:, None], index] = part
        keys, values = (part[:, : self.length] for part in entries)
        return keys, values

    # -- the cache contract -------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the size of a mask over the new entries only; the ledger knows which past entries are visible."""
        return query_length, self.length

    def crop(self, tokens_to_remove: int) -> None:
        self.truncate(self.length - abs(tokens_to_remove))

    def truncate(self, length: int) -> None:
        self.pending = None
        self.reader.truncate(self, length)
        kept = min(self.length, length)
        self.resident.truncate(kept)
        if kept < self.length:
            self.evicted.truncate(kept, self.resident)
        self.length = kept  # last, so that after an interrupt all of it is done again

    def select(self, index: Tensor) -> None:
        if not self.heads:
            return
        lanes = lanes_of(index, self.heads)
        self.reader.select(self, lanes)
        self.resident.select(lanes)
        self.evicted.select(lanes)

    # -- what it holds ------------------------------------------------------------------------------

    is_kvkeep = True

    @property
    def rows(self) -> int:
        return self.ledger.batch

    @property
    def resident_bytes(self) -> int:
        return self.resident.nbytes

    @property
    def compressed_bytes(self) -> int:
        return self.evicted.compressed_bytes

    @property
    def bookkeeping_bytes(self) -> int:
        return self.resident.bookkeeping_bytes + self.evicted.bookkeeping_bytes + self.reader.bookkeeping_bytes

    def state(self) -> dict[str, Tensor]:
        saved = {"layout": torch.tensor([self.heads])}
        for name, part in (("resident", self.resident), ("evicted", self.evicted), ("reader", self.reader)):
            saved |= {f"{name}.{key}": tensor for key, tensor in part.state().items()}
        return saved

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        def of(name: str) -> dict[str, Tensor]:
            return {key.removeprefix(f"{name}."): one for key, one in state.items() if key.startswith(f"{name}.")}

        self.heads, self.length, self.is_initialized = int(state["layout"][0]), length, length > 0
        self.resident.restore(of("resident"), length)
        self.evicted.restore(of("evicted"))
        self.reader.restore(of("reader"), length)

    def check(self) -> None:
        """Raise ShapeError where the state that :meth:`restore` took from a file does not fit this model."""
        geometry = self.geometry
        if self.heads != geometry.kv_heads and (self.length or self.heads):
            raise ShapeError(f"layer {self.index} has {self.heads} KV heads")
        if not self.heads:
            return
        extent = Extent(self.ledger.batch * self.heads, self.length, geometry.key_dim, geometry.value_dim)
        for part in (self.resident, self.evicted, self.reader):
            part.check(extent)

    def entry_states(self, length: int, batch: int) -> Tensor:
        """Return the state of every slot: (batch, kv_heads, ``length``) int8 codes, on the CPU."""
        codes = self.evicted.states(batch * self.heads, length)
        codes = self.reader.states(self, codes)
        resident = self.resident.resident_slots(unmerged=True)[:, :length].cpu()
        codes[:, : resident.shape[1]].masked_fill_(resident, EntryState.RESIDENT)
        return codes.unflatten(0, (batch, -1))


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

    def plan(self, layer: Layer, count: int = 1) -> LayerStep | None:
        step: LayerStep | None = layer.resident.plan(count)
        return step

    def layout(self, layer: Layer) -> Sequence[Any] | None:
        if not layer.heads or layer.pending is not None or not layer.evicted.idle:
            return None
        found: Sequence[Any] | None = layer.resident.layout()
        return found

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
        done = native.Call(step.query, spans, step.scaling, sinks=step.sinks).attend()
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
        ordered = masked or choice.kernels_of(step.query.device).can_attend(step.query, step.key, step.value)
        resident_segments = [layer.segment(piece, step, wide) for piece in resident.pieces(ordered)]
        pieces = store.pieces(step.query, resident, layer.length)
        evicted: Iterable[Segment] = (layer.segment(piece, step, wide) for piece in pieces)
        if store.listens:
            evicted = list(evicted)  # the store uses the pieces again after the attention
        complete = store.listens or store.merges or not store.keeps
        one_bank = len(resident_segments) == 1 and resident_segments[0].lanes is None
        if settled and step.queries == 1 and complete and one_bank and resident.observes:
            found = attend_scored(
                step.query, [*evicted, *resident_segments], step.scaling, resident.selector.reduce, step.sinks
            )
            output, (*others, weights) = found
            resident.learn(weights)
            if store.listens:
                store.observe(others, 1, resident)
            return output
        new = () if settled else (step.arriving(),)
        segments = chain(evicted, resident_segments, new)
        output, lse = attend(step.query, segments, step.scaling, step.sinks, layer.origin)
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


def lanes_of(index: Tensor, heads: int) -> Tensor:
    """Return the lanes of the rows of ``index`` (rows,), in order: (rows * ``heads``,)."""
    return (index[:, None] * heads + torch.arange(heads, device=index.device)).flatten()


def _seen(piece: Piece, visible: Tensor | None) -> Tensor | None:
    """Return which queries see the entries of a piece, (lanes, 1, queries or 1, n), or None for all. visible: which
    slots they see, (lanes, 1, queries or 1, slots); None: all."""
    if piece.slots is None:
        return None if visible is None else visible[..., piece.first : piece.first + piece.keys.shape[2]]
    slots = piece.slots
    tail = piece.keys.shape[2] - slots.shape[1]  # entries after it, which all queries see
    mask = slots[:, None, None] >= 0 if piece.gaps else None
    if visible is not None:
        visible = visible if piece.lanes is None else visible[piece.lanes]
        index = slots.clamp(min=0)[:, None, None].long().expand(-1, -1, visible.shape[2], -1)
        mask = _both(visible.gather(3, index), mask)
    if mask is None or not tail:
        return mask
    return torch.nn.functional.pad(mask, (0, tail), value=mask.dtype == torch.bool)


def _both(mask: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the conjunction of two masks; ``mask`` bool or additive, ``other`` bool."""
    if mask is None or other is None:
        return mask if other is None else other
    return mask & other if mask.dtype == torch.bool else mask.masked_fill(~other, float("-inf"))


def _weighted(mask: Tensor | None, extra: Tensor, entries: int, dtype: torch.dtype) -> Tensor:
    """Return a mask that weights entries by the number of tokens they stand for.

    An entry that stands for l tokens with values summed to v contributes exp(s) v to the numerator of attention and
    l exp(s) to its denominator: a plain softmax over s + log l with value v / l, so an additive mask does it.
    """
    bias = extra[:, None, None].log1p().to(dtype)
    bias = torch.nn.functional.pad(bias, (0, entries - bias.shape[-1]))
    if mask is None:
        return bias
    return torch.where(mask, bias, float("-inf")) if mask.dtype == torch.bool else mask + bias


def _slots_of(piece: Piece, flags: Tensor) -> Tensor:
    """Return the flags, out of ``flags`` (lanes, slots) bool, of the entries of a piece, (lanes, n)."""
    if piece.slots is None:
        assert piece.lanes is None
        return flags[:, piece.first : piece.first + piece.keys.shape[2]]
    flags = flags if piece.lanes is None else flags[piece.lanes]
    return flags.gather(1, piece.slots.clamp(min=0).long())
