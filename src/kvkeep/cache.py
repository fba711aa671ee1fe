"""KeepCache: a transformers cache inside a hard budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from kvkeep import report
from kvkeep.budget import Budget
from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.inference import outside_inference_mode
from kvkeep.memory.meter import Memory, Meter, resident_now
from kvkeep.memory.rows import Rows
from kvkeep.passes.hooks import ForwardHooks, SessionPass
from kvkeep.passes.stream import CacheStream
from kvkeep.policies.assembly import assemble
from kvkeep.policies.methods import Options, Request
from kvkeep.policies.registry import Method
from kvkeep.reconstruction import ReconstructionReader, Rereading, compress
from kvkeep.stores.dynamic import holding_of
from kvkeep.stores.layer import lanes_of
from kvkeep.stores.recurrent_cache import RecurrentCache
from kvkeep.stores.sliding import sliding_layers
from kvkeep.transfer import fork, lacks

if TYPE_CHECKING:
    from kvkeep.passes.graphs import StepGraph


class KeepCache(RecurrentCache):
    """A cache for ``model`` by a named method, within a budget.

    A cache always continues the text that it has read. :meth:`reset` empties it for another text. :meth:`close`, or the
    end of a ``with`` block, frees the memory and the files.

    Args:
        model: a transformers decoder.
        method: a name of ``kvkeep methods``; by default "full" without a budget and "kv-direct" with one.
        budget: entries for each layer (``512``), bytes for the whole cache (``"64MB"``), or a share (``"25%"``) of
            ``context`` tokens.
        checkpoint: form in which evicted entries are stored: "kv", "tokens", "residual" or "residual:STRIDE"; by
            default the smaller of kv and residual; on a GPU kv.
        where: "device", "host" or "disk"; by default disk for a model on the CPU, and host for a model on an
            accelerator.
        capacity: maximum number of entries in a checkpoint of kind "kv".
        folder: folder of a checkpoint on disk.
        chunk: prompt tokens processed in one pass.
        page: rows rebuilt at a time.
        context: tokens of the whole text; by default the maximum context length.
        batch: rows of the batch that share a budget in bytes.
        pin: number of first tokens of each row whose entries are never evicted (:meth:`pin`).
        recall: how evicted entries are read ("verified"), as if the method's name ended with it; without a
            method it is added to "snapkv".
        request: a :class:`~kvkeep.policies.methods.Request`, which replaces all other options.

    Raises:
        UsageError, BudgetError, UnsupportedModelError, StoreError: each with one sentence.
    """

    meter: Meter
    """Bytes and seconds of the cache."""
    graph: StepGraph | None
    """The :class:`~kvkeep.passes.graphs.StepGraph` that reads single tokens; None on a CPU."""
    exact_tokens: int | None
    """The number of tokens up to which a text is exact, for ``endless``; None: exactness does not depend on the length
    of a text."""

    def __init__(
        self,
        model: PreTrainedModel,
        method: str | None = None,
        budget: int | str | Budget | None = None,
        *,
        request: Request | None = None,
        **options: Unpack[Options],
    ) -> None:
        if not hasattr(model, "config"):
            raise UsageError(f"A cache needs a loaded model, not a {type(model).__name__}; pass the model itself.")
        self.model = model
        self.request = request or Request.parse(method, budget, **options)
        self.method: Method = self.request.method
        self.geometry = ModelGeometry.of(model)
        self.reset()

    # -- a text that is read again ------------------------------------------------------------------

    @outside_inference_mode
    def compress(self, readers: list[ReconstructionReader] | None = None) -> list[ReconstructionReader] | None:
        """Read the text a second time and choose the entries that stay, for methods that choose once (``kvzip``). From
        then on the budget holds. A cache calls this by itself at the end of a text that is longer than the budget. With
        any other method, or without a text, it does nothing and returns None.

        It returns what the second reading found, for each full layer; ``scores`` (lanes, slots) float32 are those of
        the entries. readers: what it returned for another cache with the same text and the same parameters of the
        second reading, which is then left out."""
        return compress(self, readers) if self.reading and self.get_seq_length() else None

    @property
    def reading(self) -> bool:
        """Whether the text, or its beginning, waits for its second reading."""
        return self.stream.rereading is not None

    @property
    def shares(self) -> list[list[int]] | None:
        """The entries of each full layer's lanes, for the present rows, where the text decides them: after
        its second reading, or for a selector that divides a layer's budget; else None."""
        if self.reading or not (self.method.reading or self.method.selector.divides):
            return None
        return [list(layer.resident.banks.budgets) for layer in self.stream.bounded]

    @property
    def budgets(self) -> Sequence[Sequence[int]] | None:
        """The entries of each layer's KV heads: one number if all heads of the layer have the same, and numbers for
        each row if rows differ. None if the method gives all layers and heads the same budget."""
        if (shares := self.shares) is None:
            return self.made.budgets
        full = dict(zip((layer.index for layer in self.geometry.full_layers), shares, strict=True))
        return [full.get(layer.index, (self.entries or 0,)) for layer in self.geometry.layers]

    # -- the cache contract -------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's new keys and values, and return those that its attention function receives."""
        if self.hooks.plans(layer_idx):  # the layer's step writes them
            return key_states, value_states
        if self.stream.attends_to_pieces(layer_idx):
            self.layers[layer_idx].append(key_states, value_states)
            return key_states, value_states
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens processed, without those of an unfinished step."""
        if self.stream.streams or self.stream.open:
            return self.stream.length
        return super().get_seq_length(self.geometry.layers[layer_idx].source)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return what masks must cover, (length, offset): only the new entries in layers that the cache streams."""
        if self.stream.streamed(layer_idx):
            return query_length, self.stream.length
        return super().get_mask_sizes(query_length, layer_idx)

    @outside_inference_mode
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. Raises UsageError for a positive number, or for more tokens
        than the cache has read, and RuntimeError if a sliding window has already discarded entries that are needed."""
        self.stream.roll_back()
        if tokens_to_remove > 0 or -tokens_to_remove > self.get_seq_length():
            raise UsageError(
                "crop() takes the number of tokens to remove as a negative number, at least "
                f"-{self.get_seq_length()}, not {tokens_to_remove}."
            )
        if not tokens_to_remove:  # a full sliding window refuses even this
            return
        length = self.get_seq_length() + tokens_to_remove
        if self.positions is not None:
            self.positions.check_cut(length)
        if self.method.recall.endless and lacks(self, length):
            raise UsageError(
                "The checkpoint has lost entries that the text before these tokens attends to, so they cannot be "
                "removed; call reset()."
            )
        for one in (*self.states.values(), *sliding_layers(self)):
            if (check := getattr(one, "check_crop", None)) is not None:
                check(tokens_to_remove)
        for part in (*self.layers, *self.made.beside.values()):
            part.crop(tokens_to_remove)
        self.stream.forget_from(length)

    def reset(self, shares: Sequence[Sequence[int]] | None = None) -> None:
        """Forget everything and free the memory. shares: :attr:`shares` of a text whose entries the caller restores;
        the cache then begins as after a second reading. Raises UsageError during another thread's pass."""
        if (before := vars(self).get("stream")) is not None:
            before.owner.check()
        made = assemble(self.request, self.model, self.geometry, shares, None if shares is None else self.meter)
        first, rereading = self.request.reading if shares is None else None, None
        if first is not None:  # the assembly above only checks the method's layers
            made = assemble(first, self.model, self.geometry)
            rereading = Rereading(self.method.name, made.entries or 0, self.geometry.max_positions)
        self.made, self.entries, self.spec, self.checkpoint = made, made.entries, made.spec, made.checkpoint
        self.ledger, self.meter, self.positions = made.ledger, made.meter, made.positions
        self.draft_passes, self.states = made.draft_passes, made.states
        super().__init__(layers=made.layers)
        self.holdings = [holding_of(layer) for layer in made.layers]
        self.stream = CacheStream((first or self.request).method, self.geometry, made, rereading)
        self.exact_tokens = self.stream.exact_tokens
        self.hooks = ForwardHooks([SessionPass(self.stream)], self.geometry)
        self.graph = None
        if made.device.type == "cuda":
            from kvkeep.passes.graphs import StepGraph  # a CPU does not need it

            self.graph = StepGraph(self.stream)

    def pin(self, count: int) -> None:
        """Pin the first ``count`` tokens of each row of the next text, padding not counted: their entries are never
        evicted, and no other entry is merged into them. They are part of the budget; the method has the rest. An exact
        method needs no pins, and has the same answers.

        Raises UsageError if the cache has read a text, or if the method cannot pin so many tokens, and BudgetError if
        pins leave no room for others."""
        if self.get_seq_length():
            raise UsageError("The cache has read a text without these pins; call reset() first.")
        before = self.request
        if (request := before.pinning(count)) == before:
            return
        try:
            self.request, self.method = request, request.method
            self.reset()
        except BaseException:
            self.request, self.method = before, before.method
            raise

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch ``repeats`` times."""
        if self.rows:
            self.reorder_cache(torch.arange(self.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` of the batch (numbers or flags)."""
        self.reorder_cache(indices.nonzero().squeeze(-1) if indices.dtype == torch.bool else indices)

    @property
    def rows(self) -> int:
        """The number of rows of the batch; 0 before the first token."""
        return int(self.stream.rows)

    @outside_inference_mode
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the rows of the batch those of ``beam_idx``, repeats and reorders allowed."""
        self.stream.select(beam_idx)
        for holding in self.made.holdings:
            holding.select(beam_idx)
        self.ledger.select(beam_idx.to(self.made.device))
        if self.checkpoint is not None:
            self.checkpoint.select(beam_idx, lambda number: lanes_of(beam_idx, self.layers[number].heads))
        if self.positions is not None:
            self.positions.select(beam_idx)

    @outside_inference_mode
    def fork(
        self,
        method: str | None = None,
        budget: int | str | Budget | None = None,
        *,
        ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> KeepCache:
        """Return a second, independent cache that has read the same text.

        Without arguments it has the same method and options, and both
        caches share whole blocks of a checkpoint on disk; all else is copied. With ``method``, ``budget`` or other
        options of a :class:`KeepCache`, the entries move into a cache with those options, as if it had read the text
        itself. Raises UsageError if that is impossible.
        ids: the token ids of the text, which a method may need and this cache may not keep.
        """
        kind = None if method is None and budget is None and not options else (method, budget, options)
        return fork(self, kind, ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory and the files. The cache is empty then, and may read another text."""
        self.reset()

    def __repr__(self) -> str:
        size = sum(holding.resident_bytes + holding.compressed_bytes for holding in self.made.holdings)
        budget = "" if self.request.budget is None else f"budget='{self.request.budget}', "
        budget += f"pin={self.method.pin}, " if self.method.pin else ""
        return (
            f"KeepCache(method='{self.method.name}', {budget}tokens={self.get_seq_length()}, bytes={size}, "
            f"exactness='{self.exactness}')"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> KeepCache:
        return fork(self, None)  # a copy shares the model

    def __getstate__(self) -> Any:
        raise UsageError(
            "A KeepCache cannot be pickled: it belongs to a model in memory. Save the conversation with "
            "kvkeep.Conversation.save(), or the cache with kvkeep.save_session()."
        )

    # -- what it holds ------------------------------------------------------------------------------

    @property
    def exactness(self) -> Exactness:
        """The method's promise; ``endless`` is exact up to :attr:`exact_tokens`. A cache becomes lossy once a
        checkpoint of limited capacity has discarded an entry, or once the text is so long that the model's rotary
        frequencies have changed."""
        lost = any(rows.first > 0 for _, rows in self.checkpoint_rows())
        length = self.get_seq_length()
        if lost or not self.geometry.steady(length):
            return Exactness.LOSSY
        recall, exact = self.method.recall, self.exact_tokens
        return Exactness.EXACT if recall.endless and (exact is None or length <= exact) else self.method.exactness

    @property
    def crops(self) -> bool:
        """Whether entries do not depend on later tokens, so that :meth:`crop` leaves what the shorter text would have
        left, or refuses. Blocks that a full checkpoint has dropped meanwhile stay dropped."""
        return self.method.recall.endless or self.exactness is Exactness.EXACT

    @property
    def lost_tokens(self) -> int:
        """The number of tokens whose entries a checkpoint of limited capacity has discarded."""
        layers = self.geometry.full_layers
        if self.checkpoint is None or not layers:
            return 0
        first = layers[0].index
        return max(0, self.checkpoint.first(first) - self.checkpoint.beginning(first))

    @property
    def exact_part(self) -> int | None:
        """:attr:`exact_tokens`, once the text is longer; None while all of it is exact."""
        return None if self.exactness is Exactness.EXACT else self.exact_tokens

    def checkpoint_rows(self) -> Iterator[tuple[str, Rows]]:
        """Yield the checkpoint's stores by name."""
        return iter(()) if self.checkpoint is None else self.checkpoint.stores()

    def memory(self) -> Memory:
        """Return the measured bytes of the cache by purpose, and those of the whole process."""
        found = report.memory(self.made)
        bookkeeping = found.bookkeeping_bytes + self.stream.record.end_bytes
        return replace(found, bookkeeping_bytes=bookkeeping, process_bytes=resident_now())

    def entry_states(self) -> list[Tensor]:
        """Return the state of every entry: for each layer (batch, kv_heads, slots) int8 codes of
        :class:`~kvkeep.contracts.entries.EntryState`, on the CPU. Padding that is not stored counts as dropped."""
        length, rows = self.get_seq_length(), self.rows
        return [self.holdings[layer.source].entry_states(length, rows) for layer in self.geometry.layers]

    def describe(self) -> list[report.LayerReport]:
        """Return, for every layer, the requested and the effective method and budget."""
        return report.describe(self.request, self.geometry, self.made, self.budgets, self.exactness, self.model)
