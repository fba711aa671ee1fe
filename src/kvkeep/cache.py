"""KeepCache: a transformers cache inside a hard budget."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from kvkeep.budget import Budget
from kvkeep.errors import KvkeepError, UsageError, unknown
from kvkeep.geometry import LayerGeometry, ModelGeometry
from kvkeep.policies.methods import Method, resolve
from kvkeep.policies.request import Exactness, Request
from kvkeep.stores import exchange
from kvkeep.stores.checkpoints import CheckpointSpec
from kvkeep.stores.drafting import DraftingLayer, Phase
from kvkeep.stores.ledger import Ledger
from kvkeep.stores.logged import LoggedLayer
from kvkeep.stores.merged import MergedLayer
from kvkeep.stores.meter import Memory, Meter, nbytes
from kvkeep.stores.paged import BlockTable, PagedLayer
from kvkeep.stores.places import PLACES
from kvkeep.stores.rows import Rows
from kvkeep.stores.selected import SelectedLayer
from kvkeep.stores.selective import Certificate, SelectiveLayer
from kvkeep.stores.streamed import OrderedLayer, Step, StreamedLayer
from kvkeep.stores.whereabouts import Whereabouts


@dataclass(frozen=True)
class LayerReport:
    """What one layer asked for and what it got; ``note`` says why where they differ."""

    layer: int
    kind: str
    requested: str
    effective: str
    requested_budget: str
    entries: int | None
    exactness: str
    note: str


class KeepCache(Cache):
    """A cache for ``model`` by a named method, within a budget.

    model: a transformers decoder. method: a name of ``kvkeep methods``; by default "full" without a budget and
    "kv-direct" with one. budget: entries for each layer (``512``), bytes for the whole cache (``"64MB"``), or a share
    (``"25%"``) of ``context`` tokens (by default all the model's positions). checkpoint: "kv", "tokens",
    "residual" or "residual:STRIDE"; by default the smaller of kv and residual. where: "device", "host" or "disk"; by
    default disk beside a CPU model, host beside an accelerator. capacity: entries the checkpoint may hold. folder:
    for disk. chunk: tokens of a prompt taken at a time. page: rows rebuilt at a time. batch: rows of the batch that
    share a budget given in bytes. recall: how what left comes back, as the last part of the method's name would say
    ("verified", "pages:8"); without a method, that of "snapkv".

    Raises UsageError, BudgetError, UnsupportedModelError or StoreError, each with one sentence.
    """

    def __init__(
        self,
        model: Any,
        method: str | None = None,
        budget: int | str | Budget | None = None,
        *,
        checkpoint: str | None = None,
        where: str | None = None,
        capacity: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        chunk: int | None = None,
        page: int = 512,
        context: int | None = None,
        batch: int = 1,
        recall: str | None = None,
    ) -> None:
        self.method: Method = resolve(spec_for(method, recall, budget is not None))
        self.geometry = ModelGeometry.from_config(model.config, next(model.parameters()).dtype.itemsize)
        self.request = Request(
            model,
            self.geometry,
            None if budget is None else Budget.parse(budget),
            checkpoint,
            where,
            capacity,
            None if folder is None else os.fspath(folder),
            chunk,
            page,
            context,
            batch,
        )
        self.earlier_outputs: list[Tensor] = []
        self.on_progress: Callable[[int], None] | None = None  # called with the tokens so far, between chunks
        self._readers = {layer.source: layer.index for layer in self.geometry.layers}
        self._start()

    def _start(self) -> None:
        self.ledger, self.meter = Ledger(self.method.records), Meter()
        plan = self.method.plan(self.request, self.ledger, self.meter)
        self.entries, self.chunk, self.streams = plan.entries, plan.chunk, plan.streams
        self.spec, self.checkpoint, self.fate, self.budgets = plan.spec, plan.checkpoint, plan.fate, plan.budgets
        self.positions, self.round = plan.positions, plan.round
        self._begun = 0  # slots before the round in progress
        self._uneven = False  # whether rows kept different numbers of tokens
        self.rounds: Any = None  # what decoding in rounds last did
        self._agreed = False  # whether drafts were right since the resident entries were last chosen
        self._windows: list[tuple[Any, Tensor, Tensor, int, bool]] = []  # sliding layers as they were before it
        self._open, self._known, self._in_hand = False, 0, 0
        super().__init__(layers=plan.layers)

    # -- the forward pass ---------------------------------------------------------------------------

    def begin_forward(
        self, ids: Tensor | None, embeddings: Tensor | None, positions: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        """Take note of the tokens about to be processed; return the positions to tell the model, None for its own."""
        if self._open:
            self._roll_back()
        if self._uneven and self.round is not None and self.round.phase is Phase.EXACT:
            raise UsageError(
                "The rows of this batch took different numbers of tokens in their rounds, so a further text does not "
                "line up with them; call reset() and read all of it."
            )
        if self._drafting and not self._agreed:  # the round may do without drafts of the model's own; now it will not
            for layer in self._drafters():
                layer.choose()
            self._agreed = True
        self._open, self._known = True, self.ledger.length
        self.ledger.append(ids, embeddings, positions, mask)
        if self.checkpoint is not None and not self._drafting:
            self.checkpoint.begin_forward(embeddings is None, self._known)
        if self.positions is None:
            return positions
        if positions is None:
            positions = torch.arange(self._known, self.ledger.length, device=self.request.device).unsqueeze(0)
        return self.positions.begin(positions, self._known)

    def admit(self, tokens: int) -> None:
        """Raise UsageError if ``tokens`` more would go past the positions the model has, before anything is read."""
        limit = self.geometry.max_positions
        if self.fate is None or not self.fate.forgets or self.positions is not None or limit is None:
            return
        if (total := self.get_seq_length() + tokens) > limit:
            raise UsageError(
                f"'{self.method.name}' keeps the positions of the text, and {total} tokens are more than the {limit} "
                "that the model has; 'streaming-llm' with positions within the cache has no such end."
            )

    def _roll_back(self) -> None:
        """Undo a step that was left in the middle; hooks are not told of every interrupt, so this may be late."""
        if self.round is not None and self.round.phase is not Phase.EXACT:
            self.retract()
            return
        if any(self.is_sliding):
            raise KvkeepError(
                "The cache was left in the middle of a step, and its sliding windows cannot be rolled back; "
                "call reset() and read the text again."
            )
        self._open = False
        for layer in self.layers:
            if hasattr(layer, "truncate"):
                layer.truncate(self._known)
        self._forget_from(self._known)

    def enter_layer(self, layer_idx: int, hidden: Tensor) -> None:
        """Let the checkpoint keep the residual entering a layer."""
        if self.checkpoint is not None and not self._drafting:
            self.checkpoint.enter_layer(layer_idx, hidden.detach())

    def attends(self, layer_idx: int) -> bool:
        """Tell whether a layer's past is streamed (it is not where a sliding window keeps it)."""
        return isinstance(self.layers[self.geometry.layers[layer_idx].source], StreamedLayer)

    @torch.no_grad()
    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        """Attend over what was evicted, what is resident and what is new; then settle the new entries."""
        index = module.layer_idx
        source = self.geometry.layers[index].source
        layer = self.layers[source]
        self._in_hand = max(self._in_hand, layer.pending_bytes)
        if self.positions is not None:
            self.positions.place(layer)  # before the new entries come in, whose positions are told already
        own, last = index == source, self._readers[source] == index
        return layer.attend(Step(module, query, key, value, mask, scaling, self.ledger.visible, own, last))

    def end_forward(self, completed: bool) -> None:
        """Close the step; one that an exception left is rolled back where that can be done."""
        if completed:
            self._open = False
            if any(layer.arrived != self.ledger.length for layer in self._streamed()):
                raise KvkeepError(
                    f"'{self.geometry.model_type}' did not pass all its entries through the cache's attention; "
                    "the result would be wrong. Use method 'full'."
                )
            compressed = 0 if self.fate is None else self.fate.compressed_bytes
            self.meter.cache(self.resident_bytes() + compressed + self._in_hand)
            self._in_hand = 0
            if self.round is not None and self.round.phase is Phase.EXACT:
                self._agreed = False
            if self.on_progress is not None:
                self.on_progress(self.ledger.length)
            return
        if not any(self.is_sliding) or self._drafting:
            self._roll_back()

    # -- rounds of draft and verify -----------------------------------------------------------------

    @property
    def _drafting(self) -> bool:
        return self.round is not None and self.round.phase is Phase.DRAFT

    def draft(self) -> None:
        """Begin a round: from here on tokens are read with what is resident alone, one a row at a time, until
        :meth:`verify`. Raises UsageError for a method that does not draft."""
        if self.round is None:
            raise UsageError(f"Method '{self.method.name}' does not draft; one that ends in '+verified' does.")
        self._begun = self.ledger.length
        self._windows = [
            (layer, layer.keys, layer.values, layer.cumulative_length, layer.record_past)
            for layer, sliding in zip(self.layers, self.is_sliding, strict=True)
            if sliding
        ]
        self.round.phase = Phase.DRAFT

    def verify(self) -> None:
        """Take the drafts back; the next forward pass reads the tokens to be verified, all at once and exactly."""
        self.retract()
        assert self.round is not None
        self.round.phase = Phase.VERIFY
        for layer, *_ in self._windows:
            layer.record_past = True

    def commit(self, counts: Sequence[int], agreed: bool) -> None:
        """Keep the first ``counts`` tokens of each row that were verified, and forget the others; where rows keep
        different numbers, the slots between are padding from now on. ``agreed``: no draft was wrong."""
        assert self.round is not None
        self.round.phase, self._agreed = Phase.EXACT, self._agreed and agreed
        count = max(counts)
        self._uneven = self._uneven or min(counts) < count
        surplus = self.ledger.length - self._begun - count
        self.ledger.keep(self._begun, list(counts))
        for layer in self._drafters():
            layer.commit(count, agreed)
        for layer, *_, recorded in self._windows:
            layer.crop(-surplus)
            layer.record_past = recorded
        self._windows = []
        if self.checkpoint is not None:
            self.checkpoint.truncate(self.ledger.length, [getattr(layer, "evicted", 0) for layer in self.layers])
        self.meter.cache(self.resident_bytes() + (0 if self.fate is None else self.fate.compressed_bytes))

    def retract(self) -> None:
        """Forget everything since :meth:`draft`, and end the round."""
        assert self.round is not None
        self._open, self.round.phase = False, Phase.EXACT
        for layer, keys, values, length, recorded in self._windows:
            layer.keys, layer.values, layer.cumulative_length, layer.record_past = keys, values, length, recorded
        for layer in self._drafters():
            layer.truncate(self._begun)
        self._forget_from(self._begun)

    # -- entries that leave and come back ------------------------------------------------------------

    @torch.no_grad()
    def evict(self, count: int) -> None:
        """Let the ``count`` lowest-ranked resident entries of every KV head leave now; they stay in the checkpoints,
        and those that come next find room. Raises UsageError for a method that does not keep all entries there."""
        if count < 0:
            raise UsageError(f"A number of entries to evict is 0 or more, not {count}.")
        for layer in self._exchanging():
            exchange.evict(layer, count)

    @torch.no_grad()
    def recall(self, positions: Sequence[int], limit: int = 64) -> int:
        """Bring the slots ``positions`` (places in the sequence, padding included) back from the checkpoints, in every
        layer and KV head where they are not resident: the first ``limit`` of them, in place of the lowest-ranked.
        Return how many entries came back, of all layers, rows and KV heads. Raises UsageError for a slot that there is
        not, or a method that does not keep all entries in checkpoints of which single ones can be had."""
        layers = self._exchanging()
        length, slots = self.get_seq_length(), list(dict.fromkeys(positions))
        if limit < 0 or any(not 0 <= slot < length for slot in slots):
            raise UsageError(f"There are slots 0 to {length - 1} to recall, and a limit is 0 or more.")
        if self.checkpoint is None or not self.checkpoint.picks:
            raise UsageError(
                f"Checkpoint kind '{self.spec}' cannot bring back single entries; 'kv' and 'residual' can."
            )
        chosen = torch.tensor(slots, dtype=torch.int64, device=self.request.device)
        return sum(exchange.recall(layer, chosen, limit) for layer in layers)

    def certificate(self) -> list[Certificate]:
        """Return what each layer whose recall is selective can have left out; nothing for other methods."""
        return [layer.certificate for layer in self.layers if isinstance(layer, SelectiveLayer)]

    def merges(self) -> tuple[int, int]:
        """Return how many pairs of neighbours were merged so far, of all layers and heads, and for how many of them the
        formula of the key's weights left [0, 1] or had no value, so that they were clamped. Zeros for other methods."""
        tallies = [layer.tally.tolist() for layer in self.layers if isinstance(layer, MergedLayer)]
        return int(sum(pairs for pairs, _ in tallies)), int(sum(clamped for _, clamped in tallies))

    def _exchanging(self) -> list[LoggedLayer]:
        if self._open:
            self._roll_back()
        layers = list(self._logged())
        if not layers or self.fate is None or not self.fate.forgets:
            raise UsageError(
                f"Method '{self.method.name}' does not keep all its entries in checkpoints, so none can leave and come "
                "back by hand; 'kv-lru' does."
            )
        return layers

    def _logged(self) -> Iterator[LoggedLayer]:
        return (layer for layer in self.layers if isinstance(layer, LoggedLayer))

    def _drafters(self) -> Iterator[DraftingLayer]:
        return (layer for layer in self.layers if isinstance(layer, DraftingLayer))

    # -- the cache contract -------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens processed, those of an unfinished step not counted."""
        if self.streams:
            return self._known if self._open else self.ledger.length
        return super().get_seq_length(self.geometry.layers[layer_idx].source)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. Raises UsageError for a positive number, and RuntimeError where
        a sliding window has forgotten what would be needed."""
        if tokens_to_remove > 0:
            raise UsageError(f"crop() takes the tokens to remove as a negative number, not {tokens_to_remove}.")
        if self.positions is not None and self.positions.holds_on_to(self.ledger.length + tokens_to_remove):
            raise UsageError("The first entries have moved along with the stream and cannot be cut off; call reset().")
        super().crop(tokens_to_remove)
        if self.streams:
            self._forget_from(self.ledger.length + tokens_to_remove)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return what masks must cover: (length, offset); only the new entries where the past is streamed."""
        if self.attends(layer_idx):
            return query_length, self.get_seq_length()
        return super().get_mask_sizes(query_length, layer_idx)

    def _forget_from(self, length: int) -> None:
        if self.fate is not None:
            self.fate.truncate(length)  # while the ledger knows the positions of what is forgotten
        self.ledger.truncate(length)
        if self.positions is not None:
            self.positions.truncate(length)
        if self.checkpoint is not None and (self.fate is None or any(True for _ in self._logged())):
            self.checkpoint.truncate(length, [getattr(layer, "evicted", 0) for layer in self.layers])

    def _streamed(self) -> Iterator[StreamedLayer]:
        return (layer for layer in self.layers if isinstance(layer, StreamedLayer))

    def fork(self) -> KeepCache:
        """Return a second cache that shares everything so far, copy-on-write (method "paged" only).

        What either of them takes in afterwards the other does not see; blocks are freed with their last holder.
        """
        if not any(isinstance(layer, PagedLayer) for layer in self.layers):
            raise UsageError(f"Method '{self.method.name}' cannot share its entries with a second cache; 'paged' can.")
        twin = copy.copy(self)
        twin.meter, twin.ledger = Meter(), copy.deepcopy(self.ledger)
        tables: dict[int, BlockTable] = {}
        twin.layers = []
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                table = tables.get(id(layer.table)) or tables.setdefault(id(layer.table), layer.table.fork())
                twin.layers.append(layer.fork(table, twin.meter))
            else:
                twin.layers.append(copy.deepcopy(layer))
        return twin

    def reset(self) -> None:
        """Forget everything and free the memory."""
        self._start()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the rows of the batch those of ``beam_idx``."""
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch ``repeats`` times."""
        if self.batch_size_now:
            self.select(torch.arange(self.batch_size_now).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` of the batch (numbers or flags)."""
        self.select(indices.nonzero().squeeze(-1) if indices.dtype == torch.bool else indices)

    @property
    def batch_size_now(self) -> int:
        """Rows of the batch held, 0 before the first token."""
        for layer in self.layers:
            if (keys := getattr(layer, "keys", None)) is not None and keys.numel():
                return int(keys.shape[0])
        return self.ledger.batch

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``, repeats and reorders allowed."""
        for layer in self.layers:
            if hasattr(layer, "select"):
                layer.select(index)
            elif getattr(layer, "is_initialized", False) and layer.keys is not None:
                layer.reorder_cache(index)
        self.ledger.select(index.to(self.request.device))
        for _, rows in self.checkpoint_rows():
            rows.select(index)
        if self.fate is not None:
            self.fate.select(index)
        if self.positions is not None:
            self.positions.select(index)

    # -- what it holds ------------------------------------------------------------------------------

    @property
    def exactness(self) -> Exactness:
        """The method's promise; lossy as soon as a checkpoint of limited capacity has lost an entry."""
        lost = any(rows.first > 0 for _, rows in self.checkpoint_rows())
        return Exactness.LOSSY if lost else self.method.exactness

    def checkpoint_rows(self) -> Iterator[tuple[str, Rows]]:
        """Yield the checkpoint's stores by name."""
        return iter(()) if self.checkpoint is None else self.checkpoint.stores()

    def resident_bytes(self) -> int:
        """Bytes allocated for entries that attention reads directly."""
        total = 0
        for layer in self.layers:
            own = getattr(layer, "resident_bytes", None)
            total += own if own is not None else nbytes(*held_by(layer))
        return total

    def memory(self) -> Memory:
        """Return measured bytes, by what they are for."""
        resident = self.resident_bytes()
        self.meter.cache(resident + (self.fate.compressed_bytes if self.fate is not None else 0))
        places = {"device": 0, "host": 0, "disk": 0}
        bookkeeping = self.ledger.positions.nbytes + sum(
            layer.bookkeeping_bytes for layer in self.layers if isinstance(layer, SelectedLayer)
        )
        compressed = 0
        if self.fate is not None:
            bookkeeping += self.fate.bookkeeping_bytes
            compressed = self.fate.compressed_bytes
        if self.spec is not None:
            places[self.spec.where] += sum(rows.nbytes for _, rows in self.checkpoint_rows())
        # Where entries are rebuilt from ids, those are a checkpoint; elsewhere they are only a record.
        if self.checkpoint is not None and self.checkpoint.reads_ids:
            places["device"] += self.ledger.ids.nbytes
        else:
            bookkeeping += self.ledger.ids.nbytes
        return Memory(
            resident_bytes=resident,
            compressed_bytes=compressed,
            checkpoint_bytes=places,
            bookkeeping_bytes=bookkeeping,
            peak_cache_bytes=self.meter.peak_cache,
            peak_workspace_bytes=self.meter.peak_workspace,
        )

    def whereabouts(self) -> list[Tensor]:
        """Return what became of every entry: for each layer (batch, kv_heads, slots) int8 codes of
        :class:`~kvkeep.stores.whereabouts.Whereabouts`, on the CPU. Padding counts as dropped where it is not kept."""
        return [self._whereabouts(layer) for layer in self.geometry.layers]

    def _whereabouts(self, layer: LayerGeometry) -> Tensor:
        own = self.layers[layer.source]
        length, batch = self.get_seq_length(), self.batch_size_now
        codes = torch.full((batch, max(1, layer.kv_heads), length), Whereabouts.RESIDENT, dtype=torch.int8)
        if isinstance(own, SelectedLayer):
            return own.whereabouts(length)
        if self.geometry.layers[layer.source].kind == "sliding":
            codes[..., : max(0, length - own.keys.shape[-2])] = Whereabouts.DROPPED
        elif isinstance(own, OrderedLayer):
            codes[..., : own.evicted] = Whereabouts.CHECKPOINTED
        return codes

    def describe(self) -> list[LayerReport]:
        """Return, for every layer, the requested and the effective method and budget."""
        budget = "none" if self.request.budget is None else str(self.request.budget)
        reports = []
        for layer in self.geometry.layers:
            effective, entries, note = self.method.name, self.entries, ""
            if layer.kind == "sliding":
                effective, entries = "sliding window", layer.window
                note = "the model's own window bounds it already"
            elif layer.kind == "full" and self.budgets is not None:
                own = self.budgets[layer.index]
                entries = sum(own) // len(own)
                note = "" if len(set(own)) == 1 else f"by head: {', '.join(map(str, own))}"
            elif layer.kind == "shared":
                effective, entries, note = "none", 0, f"reads the entries of layer {layer.source}"
            elif layer.kind != "full":
                effective, entries, note = STOCK_STATE, None, "not keys and values; left to transformers"
            reports.append(
                LayerReport(
                    layer.index,
                    layer.kind,
                    self.method.name,
                    effective,
                    budget,
                    entries,
                    str(self.exactness if layer.kind == "full" else Exactness.EXACT),
                    note,
                )
            )
        return reports


STOCK = "stock"
STOCK_STATE = "transformers' own"


def spec_for(method: str | None, recall: str | None, bounded: bool) -> str:
    """Return the name of the method that was asked for, by itself or with a recall."""
    if recall is not None:
        return f"{method or 'snapkv'}+{recall}"
    return method or ("kv-direct" if bounded else "full")


def check_request(
    method: str | None, budget: str | None, checkpoint: str | None, where: str | None, recall: str | None = None
) -> None:
    """Raise for names and budgets that no model could make right, before anything is loaded."""
    if method != STOCK:
        resolve(spec_for(method, recall, budget is not None))
    Budget.parse(budget)
    if checkpoint is not None:
        CheckpointSpec.parse(checkpoint, where or "host")
    if where is not None and where not in PLACES:
        raise unknown("place for checkpoints", where, PLACES)


def new_cache(model: Any, method: str | None = None, **options: Any) -> Cache:
    """Return a :class:`KeepCache`, or transformers' own default cache for method "stock", the yardstick."""
    if method != STOCK:
        return KeepCache(model, method, **options)
    if given := [
        name for name, value in options.items() if value is not None and name not in ("context", "page", "batch")
    ]:
        raise UsageError(f"Method 'stock' is transformers' own cache and takes no {given[0]}; 'kv-direct' does.")
    return DynamicCache(config=model.config)


def held_by(layer: Any) -> list[Tensor]:
    """Return the key and value tensors of one of transformers' own layers."""
    return [tensor for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)) if tensor is not None]


def stock_memory(cache: Cache) -> Memory:
    """Return the bytes of one of transformers' own caches; each step copies the largest layer's whole."""
    held = [nbytes(*held_by(layer)) for layer in cache.layers]
    total = sum(held)
    return Memory(resident_bytes=total, peak_cache_bytes=total, peak_workspace_bytes=max(held, default=0))


def memory_of(cache: Any) -> Memory:
    """Return the bytes any cache holds, by its own account where it keeps one."""
    own = getattr(cache, "memory", None)
    return stock_memory(cache) if own is None else own()
