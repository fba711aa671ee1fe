"""KeepCache: a transformers cache inside a hard budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from kvkeep import report
from kvkeep.attention.step import Step
from kvkeep.budget import Budget
from kvkeep.contracts import Exactness
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.meter import Memory
from kvkeep.memory.rows import Rows
from kvkeep.policies.assembly import assemble
from kvkeep.policies.methods import Method
from kvkeep.policies.request import PAGE, Request
from kvkeep.stores.backing import recall
from kvkeep.stores.dynamic import held_by
from kvkeep.stores.layer import Layer
from kvkeep.stores.selective import Certificate
from kvkeep.transfer import fork


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
        page: int = PAGE,
        context: int | None = None,
        batch: int = 1,
        recall: str | None = None,
        request: Request | None = None,
    ) -> None:
        self.model = model
        self.request = request or Request.parse(
            method,
            budget,
            checkpoint=checkpoint,
            where=where,
            capacity=capacity,
            folder=folder,
            chunk=chunk,
            page=page,
            context=context,
            batch=batch,
            recall=recall,
        )
        self.method: Method = self.request.method
        self.geometry = ModelGeometry.from_config(model.config, next(model.parameters()).dtype.itemsize)
        self.earlier_outputs: list[Tensor] = []
        self.on_progress: Callable[[int], None] | None = None  # called with the tokens so far, between chunks
        self._readers = {layer.source: layer.index for layer in self.geometry.layers}
        self._start()

    def _start(self) -> None:
        made = assemble(self.request, self.model, self.geometry)
        self.ledger, self.meter = made.ledger, made.meter
        self.entries, self.chunk, self.streams, self.budgets = made.entries, made.chunk, made.streams, made.budgets
        self.spec, self.checkpoint, self.positions = made.spec, made.checkpoint, made.positions
        self.round, self.table = made.round, made.table
        self._open, self._known, self._in_hand = False, 0, 0
        super().__init__(layers=made.layers)
        self.held = [held_by(layer) for layer in made.layers]
        self.bounded: list[Layer] = (
            [self.layers[own.index] for own in self.geometry.full_layers] if made.streams else []
        )

    # -- the forward pass ---------------------------------------------------------------------------

    def admit(self, tokens: int) -> None:
        """Raise UsageError if ``tokens`` more would go past the positions the model has, before anything is read."""
        limit = self.geometry.max_positions
        if limit is None or self.positions is not None or self.budgets is None or self.method.store_fate.keeps:
            return
        if (total := self.get_seq_length() + tokens) > limit:
            raise UsageError(
                f"'{self.method.name}' keeps the positions of the text, and {total} tokens are more than the {limit} "
                "that the model has; 'streaming-llm' with positions within the cache has no such end."
            )

    def begin_forward(
        self, ids: Tensor | None, embeddings: Tensor | None, positions: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        """Take note of the tokens about to be processed; return the positions to tell the model, None for its own."""
        if self._open:
            self.roll_back()
        if self.round is not None:
            self.round.before_forward()
        self._open, self._known = True, self.ledger.length
        self.ledger.append(ids, embeddings, positions, mask)
        if self.checkpoint is not None and not self._drafting:
            self.checkpoint.begin_forward(embeddings is None, self._known)
        if self.positions is None:
            return positions
        if positions is None:
            positions = torch.arange(self._known, self.ledger.length, device=self.device).unsqueeze(0)
        return self.positions.begin(positions, self._known)

    def enter_layer(self, layer_idx: int, hidden: Tensor) -> None:
        """Let the checkpoint keep the residual entering a layer."""
        if self.checkpoint is not None and not self._drafting:
            self.checkpoint.enter_layer(layer_idx, hidden.detach())

    def attends(self, layer_idx: int) -> bool:
        """Tell whether a layer's past is streamed (it is not where a sliding window keeps it)."""
        return self.streams and self.geometry.layers[self.geometry.layers[layer_idx].source].kind == "full"

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
        step = Step.of(module, query, key, value, mask, scaling, layer.heads, own, last)
        return step.unfolded(layer.attend(step))

    def end_forward(self, completed: bool) -> None:
        """Close the step; one that an exception left is rolled back where that can be done."""
        if not completed:
            if self._drafting or not any(self.is_sliding):
                self.roll_back()
            return
        self._open = False
        if any(layer.arrived != self.ledger.length for layer in self.bounded):
            raise KvkeepError(
                f"'{self.geometry.model_type}' did not pass all its entries through the cache's attention; "
                "the result would be wrong. Use method 'full'."
            )
        self.meter.cache(self.resident_bytes() + self.compressed_bytes() + self._in_hand)
        self._in_hand = 0
        if self.round is not None:
            self.round.after_forward()
        if self.on_progress is not None:
            self.on_progress(self.ledger.length)

    def roll_back(self) -> None:
        """Undo a step that was left in the middle; hooks are not told of every interrupt, so this may be late. Raises
        KvkeepError where it cannot be undone."""
        if not self._open:
            return
        if self.round is not None and self.round.open:
            self._open = False
            self.round.retract()
            return
        lost = any(layer.lost for layer in self.bounded)
        if lost or any(self.is_sliding):
            reason = "entries left that its store could not take" if lost else "sliding windows cannot be rolled back"
            raise KvkeepError(
                f"The cache was left in the middle of a step, and its {reason}; call reset() and read the text again."
            )
        self._open = False
        for layer in self.bounded:
            layer.truncate(self._known)
        self._forget_from(self._known)

    @property
    def _drafting(self) -> bool:
        return self.round is not None and self.round.drafting

    @property
    def device(self) -> torch.device:
        """The device the model runs on."""
        return next(self.model.parameters()).device

    # -- the cache contract -------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens processed, those of an unfinished step not counted."""
        if self.streams:
            return self._known if self._open else self.ledger.length
        return super().get_seq_length(self.geometry.layers[layer_idx].source)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return what masks must cover: (length, offset); only the new entries where the past is streamed."""
        if self.attends(layer_idx):
            return query_length, self.get_seq_length()
        return super().get_mask_sizes(query_length, layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. Raises UsageError for a positive number or more than there are,
        and RuntimeError where a sliding window has forgotten what would be needed."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.get_seq_length():
            raise UsageError(
                f"crop() takes the tokens to remove as a negative number, of {self.get_seq_length()} at most, not "
                f"{tokens_to_remove}."
            )
        if self.positions is not None and self.positions.holds_on_to(self.ledger.length + tokens_to_remove):
            raise UsageError("The first entries have moved along with the stream and cannot be cut off; call reset().")
        super().crop(tokens_to_remove)
        if self.streams:
            self._forget_from(self.ledger.length + tokens_to_remove)

    def _forget_from(self, length: int) -> None:
        self.ledger.truncate(length)
        if self.positions is not None:
            self.positions.truncate(length)
        if self.checkpoint is not None:
            self.checkpoint.truncate_residuals(length)

    def reset(self) -> None:
        """Forget everything and free the memory."""
        self._start()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the rows of the batch those of ``beam_idx``."""
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch ``repeats`` times."""
        if self.rows:
            self.select(torch.arange(self.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` of the batch (numbers or flags)."""
        self.select(indices.nonzero().squeeze(-1) if indices.dtype == torch.bool else indices)

    @property
    def rows(self) -> int:
        """Rows of the batch held, 0 before the first token."""
        if self.streams:
            return self.ledger.batch
        return next((rows for held in self.held if (rows := held.rows)), 0)

    def select(self, index: Tensor) -> None:
        """Make the batch the rows of ``index``, repeats and reorders allowed."""
        for held in self.held:
            held.select(index)
        self.ledger.select(index.to(self.device))
        if self.checkpoint is not None:
            self.checkpoint.select(index, lambda number: self.layers[number].lanes_of(index))
        if self.positions is not None:
            self.positions.select(index)

    def fork(self, method: str | None = None, budget: int | str | Budget | None = None, **options: Any) -> KeepCache:
        """Return a second cache with the same past; what either of them takes in afterwards the other does not see.

        Without arguments it is of the same kind: "paged" shares its blocks until one of them is written, any other
        cache is copied. With ``method``, ``budget`` or other options of a :class:`KeepCache` the past is put into a cache
        of that kind, as if it had read the text itself. Raises UsageError where that cannot be.
        """
        return fork(self, None if method is None and budget is None and not options else (method, budget, options))

    def __deepcopy__(self, memo: dict[int, Any]) -> KeepCache:
        return fork(self, None)  # the model is not the cache's to copy

    # -- entries that leave and come back by hand -------------------------------------------------------

    @torch.no_grad()
    def evict(self, count: int) -> None:
        """Let the ``count`` lowest-ranked resident entries of every KV head leave now; they stay in the checkpoints,
        and those that come next find room. Raises UsageError for a method that does not keep all entries there."""
        if count < 0:
            raise UsageError(f"A number of entries to evict is 0 or more, not {count}.")
        for layer in self._backed():
            layer.resident.evict(count)

    @torch.no_grad()
    def recall(self, positions: Sequence[int], limit: int = 64) -> int:
        """Bring the slots ``positions`` (places in the sequence, padding included) back from the checkpoints, in every
        layer and KV head where they are not resident: the first ``limit`` of them, in place of the lowest-ranked.
        Return how many entries came back, of all layers, rows and KV heads. Raises UsageError for a slot that there is
        not, or a method that does not keep all entries in checkpoints of which single ones can be had."""
        layers = self._backed()
        length, slots = self.get_seq_length(), list(dict.fromkeys(positions))
        if limit < 0 or any(not 0 <= slot < length for slot in slots):
            raise UsageError(f"There are slots 0 to {length - 1} to recall, and a limit is 0 or more.")
        if self.checkpoint is None or not self.checkpoint.picks:
            raise UsageError(
                f"Checkpoint kind '{self.spec}' cannot bring back single entries; 'kv' and 'residual' can."
            )
        chosen = torch.tensor(slots, dtype=torch.int64, device=self.device)
        return sum(recall(layer, layer.reader.backing, chosen, limit) for layer in layers)

    def _backed(self) -> list[Layer]:
        self.roll_back()
        fate = self.method.store_fate
        if not self.method.recall.backed or fate.merges or fate.makes_room:
            raise UsageError(
                f"Method '{self.method.name}' does not keep all its entries in checkpoints, so none can leave and come "
                "back by hand; 'kv-lru' does."
            )
        return self.bounded

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
        return sum(held.resident_bytes for held in self.held)

    def compressed_bytes(self) -> int:
        """Bytes allocated for entries in a smaller form."""
        return sum(held.compressed_bytes for held in self.held)

    def memory(self) -> Memory:
        """Return measured bytes, by what they are for."""
        return report.memory(self)

    def entry_states(self) -> list[Tensor]:
        """Return what became of every entry: for each layer (batch, kv_heads, slots) int8 codes of
        :class:`~kvkeep.contracts.EntryState`, on the CPU. Padding counts as dropped where it is not kept."""
        length, rows = self.get_seq_length(), self.rows
        return [self.held[layer.source].entry_states(length, rows) for layer in self.geometry.layers]

    def describe(self) -> list[report.LayerReport]:
        """Return, for every layer, the requested and the effective method and budget."""
        return report.describe(self)

    def certificate(self) -> list[Certificate]:
        """Return what each layer whose recall is selective can have left out; nothing for other methods."""
        return [layer.reader.certificate for layer in self.bounded] if self.method.recall.reads_single else []

    def merges(self) -> tuple[int, int]:
        """Return how many pairs of neighbours were merged so far, of all layers and heads, and for how many of them the
        formula of the key's weights left [0, 1] or had no value, so that they were clamped. Zeros for other methods."""
        merged = [layer.evicted.merged() for layer in self.bounded]
        return sum(pairs for pairs, _ in merged), sum(clamped for _, clamped in merged)
