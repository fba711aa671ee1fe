"""The stream of one cache: it records the tokens of each forward pass, attends, and undoes an unfinished pass.

The model's hooks (:mod:`kvkeep.passes.hooks`) call it. A layer is *streamed* if the model sees only its new entries,
and the stream attends to the past. The stream also attends in all other layers if the native library runs them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.hook import PassHook
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.disk_rows import DiskChecks
from kvkeep.memory.inference import outside_inference_mode
from kvkeep.memory.rows import BLOCK, Rows
from kvkeep.native.library import trim_memory
from kvkeep.passes.pass_owner import PassOwner
from kvkeep.passes.record import TextRecord, given_by_ids
from kvkeep.passes.repeated_steps import RepeatedSteps
from kvkeep.policies.assembly import Assembly
from kvkeep.policies.registry import Method
from kvkeep.reconstruction import Rereading
from kvkeep.step import choice
from kvkeep.step.plan import NO_STEPS, LayerStep, MovedSteps, TextSteps
from kvkeep.step.sinks import sinks_of
from kvkeep.stores.layer_group import LayerGroup

MAX_PLANNED = 16
"""The maximum number of tokens of a sequence whose steps are planned together."""
TRIM_TOKENS = 2048
"""Tokens after which freed memory is returned to the system. Data in use lies between it, so a process would otherwise
grow with the text."""


class CacheStream:
    """The forward passes of one cache. rereading: when a text is read a second time (``kvzip``); None: never."""

    pass_hooks: Sequence[PassHook]
    """Hooks of the method's parts, called before and after each pass."""
    rehearsing = False
    """The entries of the present pass are discarded (:mod:`kvkeep.stores.readers.rehearsal`)."""
    open = False
    """A pass is in progress or unfinished."""
    first: Tensor | None = None
    """In a pass, the first slot of each row that is not padding, (rows,); None without padding."""

    def __init__(
        self, method: Method, geometry: ModelGeometry, made: Assembly, rereading: Rereading | None = None
    ) -> None:
        self.method, self.geometry, self.layers, self.rereading = method, geometry, made.layers, rereading
        self.holdings = made.holdings
        self.streams, self.exact, self.decoder, self.device = made.streams, made.exact, made.decoder, made.device
        self.ledger, self.meter, self.checkpoint = made.ledger, made.meter, made.checkpoint
        self.positions, self.draft_passes, self.states = made.positions, made.draft_passes, made.states
        self.chunk = made.chunk or sys.maxsize
        self.observes = made.streams and method.exactness != "exact"
        self.masks_itself = made.exact  # attention is causal and skips padding, so no mask has to be made
        self.pass_hooks = [hook for part in (method.store_fate, method.recall) if (hook := part.hook()) is not None]
        self.exact_tokens = method.recall.exact_tokens(geometry)
        self.bounded: list[Any] = [made.layers[layer.index] for layer in geometry.full_layers]
        self.any_chunk = method.exactness == "exact" and not method.oneshot  # no chunk changes an answer
        self.moving = bool(geometry.sliding_layers or geometry.other_layers)
        self.record, self.owner = TextRecord(), PassOwner()
        self.ends = not method.any_length  # its positions are those of the text
        sources = [layer.source for layer in geometry.layers]
        kinds = {"full": made.positions is None, "sliding": made.exact or made.device.type == "cuda"}
        self._single = [one.index for one in geometry.layers if kinds.get(one.kind) and sources.count(one.index) == 1]
        self._readers = {layer.source: layer.index for layer in geometry.layers}
        self._latent = made.latent
        self.disk = DiskChecks(partial(_rows_on_disk, made))
        self._groups: list[LayerGroup] = []  # layers that are ranked together
        self._known = self._pending_bytes = self._read = 0
        self._entry_bytes = [layer.entry_elements * geometry.dtype_bytes for layer in geometry.layers]
        self._disturbed = False  # whether a lossy method's pass was undone, and no pass has followed
        self._planned = NO_STEPS  # and not committed
        self._repeated = RepeatedSteps(made.layers)
        self._wrote: Callable[[LayerStep], bool] = _none
        self._masked = False  # whether the caller's mask masks more than padding

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Within the block a text is read in one chunk, hooks and listeners are not called, and the caller discards the
        entries (:mod:`kvkeep.stores.readers.rehearsal`)."""
        before = self.chunk, self.pass_hooks
        self.rehearsing, self.chunk, self.pass_hooks = True, sys.maxsize, ()
        listeners = self.record.on_progress, self.record.on_block
        self.record.tell_nobody()
        try:
            yield
        finally:
            self.open = self.rehearsing = False
            self.record.tell(*listeners)
            self.chunk, self.pass_hooks = before

    # -- a forward pass -----------------------------------------------------------------------------

    def chunks(self, count: int, chunk: int | None = None) -> list[int]:
        """Return the sizes of the chunks in which ``count`` new tokens are read, at most ``chunk`` each (None: the
        cache's own number). The first takes the remainder, so that the last queries of a prompt share a chunk."""
        start, stop, ends = self.length, self.length + count, set[int]()
        if self.exact_tokens is not None:  # a chunk is exact as a whole or not at all
            ends = {self.exact_tokens}
        elif self.record.on_block is not None and self.any_chunk and not self.record.continues:
            ends = {(stop - 1) // BLOCK * BLOCK, self.record.message_end}
        marks = [start, *sorted(end for end in ends if start < end < stop), stop]
        parts = [end - begin for begin, end in pairwise(marks)]
        chunk = self.chunk if chunk is None else chunk
        split = [divmod(part, chunk) for part in parts]
        return [size for full, rest in split for size in (*([rest] if rest else []), *[chunk] * full)]

    @property
    def length(self) -> int:
        """The number of tokens processed, without those of an unfinished pass."""
        return self._known if self.open else self._processed()

    def _processed(self) -> int:
        if self.streams:
            return self.ledger.length
        length: int = next(iter(self.bounded), self.layers[0]).get_seq_length()
        return length

    @property
    def rows(self) -> int:
        """Rows of the batch held, 0 before the first token."""
        if self.streams:
            return self.ledger.batch
        return next((rows for holding in self.holdings if (rows := holding.rows)), 0)

    def admit(self, tokens: int) -> None:
        """Raise UsageError if ``tokens`` more would go past the model's positions, before a token is read. A model that
        was not trained for a position answers, but with another distribution than any that was measured."""
        limit, total = self.geometry.max_positions, self.length + tokens
        if limit is None or self.rehearsing:
            return
        if self.rereading is not None:
            self.rereading.check_length(total)
        if self.ends and total > limit:
            raise UsageError(
                f"'{self.method.name}' keeps the positions of the text, and {total} tokens exceed the model's {limit} "
                "positions; use method 'endless' or 'streaming-llm', or shorten the text."
            )
        if self.positions is not None and self.method.oneshot:
            needed = min(self.length, self.positions.entries) + tokens
            if needed > self.positions.limit:
                raise UsageError(
                    f"In one pass, these {tokens} tokens and the entries of the cache need {needed} positions, "
                    f"more than the model's {self.positions.limit}; leave 'oneshot' out to read them in chunks."
                )

    @outside_inference_mode
    def begin_forward(
        self,
        ids: Tensor | None,
        embeddings: Tensor | None,
        positions: Tensor | None,
        mask: Any,
        replayed: bool = False,
    ) -> Tensor | None:
        """Record the tokens of a pass. Return the positions for the model; None: the model computes them. replayed: a
        graph of CUDA has them. Raises UsageError during another thread's pass."""
        self.owner.take()
        self.roll_back()
        if (new := embeddings if ids is None else ids) is not None and new.shape[1] > MAX_PLANNED:
            self._repeated.forget()  # memory grows
        if self._disturbed:
            self._disturbed = False
            warnings.warn(
                f"A forward pass with '{self.method.name}' was undone, and entries that it had evicted are gone, so "
                "what follows may differ; call reset() and read the text again where that matters.",
                stacklevel=2,
            )
        stated = positions if self.ledger.clock is None else None  # else they are the clock's
        self.record.note_pass(given_by_ids(ids, stated, mask, self.length))
        if positions is None and not replayed and self.geometry.recurrent_layers:
            assert new is not None  # Bamba would begin each pass at position 0
            positions = torch.arange(self.length, self.length + new.shape[1], device=new.device).unsqueeze(0)
        if not self.streams:
            self.open, self._known = True, self._processed()
            self._note_padding(mask)
            return positions
        if self.rereading is not None:
            self.rereading.check_ids(ids)
        self._masked = mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2)
        if self._masked and self.checkpoint is not None and self.checkpoint.replays:
            raise UsageError(
                f"Checkpoint kind '{self.checkpoint.spec}' runs the model again with the model's own masks, and "
                "cannot use an attention mask of yours; use kind 'kv' or 'residual'."
            )
        self.open, self._known = True, self.ledger.length
        self.ledger.append(ids, embeddings, positions, mask if isinstance(mask, Tensor) else None)
        self.ledger.continues, self.first = self.record.continues, self.ledger.first
        self.masks_itself = self.exact and not self._masked and self.first is None
        if self.checkpoint is not None and not self._drafting:
            self.checkpoint.begin_forward(embeddings is None, self._known)
        if self.positions is None or replayed:
            return positions
        if positions is None:
            positions = torch.arange(self._known, self.ledger.length, device=self.device).unsqueeze(0)
        return self.positions.begin(positions, self._known)

    def _note_padding(self, mask: Any) -> None:
        """Find the padding in a pass's ``mask``."""
        self.first, self.masks_itself = None, self.exact and mask is None
        if isinstance(mask, Tensor) and mask.ndim == 2 and self.exact:
            host = mask.bool()
            self.first = None if bool(host.all()) else host.int().argmax(1)
            self.masks_itself = self.first is None or bool((host.cummax(1).values == host).all())

    @property
    def wants_residuals(self) -> bool:
        """Whether the checkpoint keeps residuals."""
        return self.checkpoint is not None and self.checkpoint.by_token

    @outside_inference_mode
    def plan(self, count: int, wrote: Callable[[LayerStep], bool]) -> MovedSteps:
        """Return the step of ``count`` tokens in each layer that can plan it. wrote: says whether a step has written
        its entries, if the pass is not completed."""
        before, self._groups, self._planned, self._wrote = self._groups, [], NO_STEPS, wrote
        if not self._plannable or self._latent:
            return NO_STEPS
        if count > 1 and (not self.exact or count > MAX_PLANNED):
            return NO_STEPS
        if (again := self._repeated.again(count)) is not None:
            self._planned = again
            return again
        steps, groups = dict[int, LayerStep](), dict[Hashable, list[tuple[int, LayerStep, Any]]]()
        for index in self._single:
            layer = self.layers[index]
            if (step := layer.plan(count)) is None:
                continue
            steps[index] = step
            if self.streamed(index) and not self._drafting and (key := layer.resident.group) is not None:
                groups.setdefault((key, step.entries), []).append((index, step, layer.resident))
        for members in groups.values():
            indices, planned, residents = zip(*members, strict=True)
            group = next((one for one in before if one.holds(residents)), None) or LayerGroup(residents)
            steps |= zip(indices, group.plan(planned), strict=True)
            self._groups.append(group)
        if steps:
            self._planned = MovedSteps(made := TextSteps(steps))
            if not self.streams:
                self._repeated.keep(count, made)
        return self._planned

    @property
    def _plannable(self) -> bool:
        """Whether each layer can plan a token by itself: nothing that layers share changes."""
        if not self.streams:
            return self.masks_itself and self.first is None
        more = self.pass_hooks or self.rehearsing or self._masked
        return not more and self.ledger.batch == 1 and self.ledger.visible is None

    @outside_inference_mode
    def commit(self, completed: bool) -> None:
        """Record that the steps of :meth:`plan` have run, and let selectors score by their attention. completed: the
        whole pass has run; otherwise those count that have written their entries. An interrupted call can be
        repeated."""
        planned, known = self._planned, self._known
        for index, step in planned.planned.by_layer.items():
            if completed or ((moved := planned.of(index)) is not None and self._wrote(moved)):
                self._pending_bytes = max(self._pending_bytes, self._entry_bytes[index] * step.tokens)
                layer = self.layers[index]
                arrived = layer.arrived if self.streams else layer.get_seq_length()
                for _ in range(known + step.tokens - arrived):
                    layer.commit()
        self._planned = NO_STEPS
        self._wrote = _none  # which refers to this stream, whose memory is freed without a collection
        for group in self._groups:
            group.finish(completed)

    @outside_inference_mode
    def enter_layer(self, layer_idx: int, hidden: Tensor) -> None:
        """Pass the residual entering a layer, (batch, new, hidden_size), to the checkpoint."""
        if self.checkpoint is not None and not self._drafting:
            self.checkpoint.enter_layer(layer_idx, hidden.detach())

    def recur(
        self, layer_idx: int, run: Callable[..., Tensor], hidden: Tensor, cache: Any, mask: Tensor | None
    ) -> Tensor:
        """Return the output of a layer's recurrent module ``run``, (batch, new, hidden_size). It reads tokens with
        drafts one at a time: transformers adds the terms of several tokens in another order, and a draft that is taken
        back must leave no trace in the state."""
        state = self.states.get(layer_idx)
        if state is None or not state.noted:
            return run(hidden, cache, mask)
        outputs = []
        for token in range(hidden.shape[1]):
            if token:
                state.note()
            one = slice(token, token + 1)
            outputs.append(run(hidden[:, one], cache, None if mask is None else mask[:, one]))
        return torch.cat(outputs, 1)

    def attends(self, layer_idx: int) -> bool:
        """Return whether :meth:`attend` computes a layer's attention: it is streamed, or the library runs it."""
        return self.streamed(layer_idx) or (
            self.exact and self.geometry.layers[layer_idx].kind in ("full", "sliding", "shared")
        )

    def streamed(self, layer_idx: int) -> bool:
        """Return whether a layer is streamed; a sliding window is not."""
        layers = self.geometry.layers
        return self.streams and layers[layers[layer_idx].source].kind == "full"

    def attends_to_pieces(self, layer_idx: int) -> bool:
        """Return whether the kernel reads a layer's entries where they lie in this pass, because they lie in pieces,
        which would have to be copied into one tensor. The model then sees only its new entries."""
        return self.masks_itself and bool(getattr(self.layers[layer_idx], "in_pieces", False))

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        """Return attention over the evicted, resident and new entries of a layer, and settle the new ones. None:
        transformers attends."""
        if not self.streamed(module.layer_idx):
            return self._attend_to_all(module, query, key, value, mask, scaling)
        attend = self._attend_streamed if self.rehearsing else self._attend_without_gradients
        return attend(module, query, key, value, mask, scaling)

    def _attend_to_all(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        source = self.geometry.layers[module.layer_idx].source
        layer = self.layers[source]
        pieces = layer.pieces() if self.attends_to_pieces(source) else [(key, value)]
        entries = sum(keys.shape[2] for keys, _ in pieces)
        if mask is not None and mask.shape[-1] != entries:
            raise UsageError(
                f"The attention mask covers {mask.shape[-1]} entries; in layer {source} it has to cover {entries}."
            )
        window = self.geometry.layers[source].window if layer.is_sliding else None
        start = 0 if window is None else layer.get_seq_length() - entries
        sinks, kernels = sinks_of(module), choice.kernels_of(query.device)
        output = kernels.attend_all(query, pieces, mask, scaling, start, self.first, sinks, window)
        if output is not None or mask is not None or not self.masks_itself:
            return output
        if self.attends_to_pieces(source):  # queries of another type
            key, value = layer.keys, layer.values
        # Without a mask, transformers would treat the queries as those of the first tokens.
        slots = torch.arange(key.shape[2], device=key.device)
        queried = slots[-query.shape[2] :, None]
        seen = ((slots <= queried) & (slots > queried - (window or len(slots))))[None, None]
        if self.first is not None:
            seen = seen & (slots + start >= self.first[:, None])[:, None, None]
        return attend(query, [Segment(key, value, seen)], scaling, sinks)[0]

    def _attend_streamed(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        index = module.layer_idx
        source = self.geometry.layers[index].source
        layer = self.layers[source]
        self._pending_bytes = max(self._pending_bytes, sum(part.nbytes for part in layer.pending or ()))
        if self.positions is not None:
            self.positions.place(layer)  # before the new entries, which already have positions
        brings, last = index == source, self._readers[source] == index
        if brings and layer.pending is None:
            raise KvkeepError(
                f"'{self.geometry.model_type}' passed no entries to the cache. Gradient checkpointing does that; "
                "call model.eval()."
            )
        if key.shape[2] == 1 and not self._masked and self.ledger.all_tokens(1):
            mask = None  # a token attends to itself
        if mask is not None and mask.shape[-1] not in (key.shape[2], self.ledger.length):
            raise UsageError(
                f"The attention mask covers {mask.shape[-1]} entries; it has to cover all {self.ledger.length}, "
                f"or the {key.shape[2]} new ones."
            )
        step = AttentionInputs.of(module, query, key, value, mask, scaling, layer.heads, brings, last)
        return step.unfolded(layer.reader.attend(layer, step))

    _attend_without_gradients = outside_inference_mode(_attend_streamed)

    @outside_inference_mode
    def end_forward(self, completed: bool) -> None:
        """End the pass; after an exception it is rolled back where possible."""
        if not completed:
            if (self._drafting or not self.moving) and self.ledger.clock is None:  # nothing is read while capturing
                self.roll_back()
            return
        self.disk.check()
        if self.streams:
            if any(layer.arrived != self.ledger.length for layer in self.bounded):
                raise KvkeepError(
                    f"'{self.geometry.model_type}' did not pass all its entries through the cache's attention; "
                    "the result would be wrong. Use method 'full'."
                )
            held_bytes = sum(one.resident_bytes + one.compressed_bytes for one in self.holdings)
            self.meter.cache(held_bytes + self._pending_bytes)
            self._pending_bytes = 0
        self.open, self.first = False, None
        if self._drafting:
            return
        length = self._processed()
        self._read += max(0, length - self._known)  # since memory was trimmed
        if self._read >= TRIM_TOKENS:
            trim_memory()
            self._read = 0
        if self.record.on_progress is not None:
            self.record.on_progress(length)
        if (listener := self.record.on_block) is not None and (not length % BLOCK or length == self.record.message_end):
            listener(length)

    @outside_inference_mode
    def roll_back(self, restoring: bool = False, computed: bool = True) -> None:
        """Undo an unfinished pass, and all drafts if it drafts. Hooks miss some interrupts, so this may run at the next
        use. restoring: the caller then restores windows and recurrent states. computed: False if it wrote nothing;
        earlier drafts then stay. Raises KvkeepError if the pass cannot be undone, EntriesLost if entries on disk are
        lost, and UsageError during another thread's pass."""
        self.owner.check()
        self.disk.check()
        if self.open:
            self.commit(False)
        lost = any(layer.lost for layer in self.bounded)
        if lost or (self.open and self.moving and not (restoring or self._drafting)):
            moved = "recurrent state" if self.geometry.recurrent_layers else "sliding window"
            reason = "a store could not take evicted entries" if lost else f"a {moved} cannot be rolled back"
            raise KvkeepError(
                f"The cache was left in the middle of a step, and {reason}; call reset() and read the text again."
            )
        if not self.open:
            return
        # Until all of it is done the pass stays open: an interrupt may come here, too.
        if self.draft_passes is not None and self._drafting:
            if computed:
                self.draft_passes.end()
            else:
                self.draft_passes.forget_from(self._known)
        else:
            self.record.note_undone()
            self._disturbed = computed and self.observes and not self.method.recall.endless
            for layer in self.bounded:
                layer.truncate(self._known)
            self.forget_from(self._known)
        self.open = False

    @property
    def must_reread(self) -> bool:
        """Whether the text is complete, and so long that ``compress()`` has to read it again."""
        reads_on = self.record.continues or self.rehearsing
        return self.rereading is not None and self.ledger.length > self.rereading.entries and not reads_on

    def check_disk(self) -> None:
        """Compare entries on disk with what was written: all of them, but those of ``endless`` beyond its exact part,
        which are compared when they are recalled. Raises EntriesLost."""
        self.disk.check(compare=self.exact_tokens is None or self.length <= self.exact_tokens)

    def forget_from(self, length: int) -> None:
        """Truncate the parts that all layers share to ``length`` slots, after the layers."""
        self.record.forget_from(length)
        self._repeated.forget_from(length)
        if not self.streams:
            return
        self.ledger.truncate(length)
        if self.positions is not None:
            self.positions.truncate(length)
        if self.checkpoint is not None:
            self.checkpoint.truncate_residuals(length)

    def select(self, index: Tensor) -> None:
        """Make the rows of the batch those of ``index``, before the layers do. Raises as :meth:`roll_back`."""
        self.roll_back()
        self.disk.check(compare=True)  # digests are made anew of what is copied
        self._repeated.forget()
        self._groups = []
        self.record.select(index.tolist())

    def abandon(self) -> None:
        """Undo an unfinished pass, and forget drafts. Raises KvkeepError as :meth:`roll_back`."""
        self.roll_back()
        if self.draft_passes is not None:
            self.draft_passes.end()

    @property
    def _drafting(self) -> bool:
        return self.draft_passes is not None and self.draft_passes.active


def _rows_on_disk(made: Assembly) -> Iterator[Rows]:
    """Yield the rows of a cache that may lie on disk."""
    if made.checkpoint is not None:
        yield from (rows for _, rows in made.checkpoint.stores())
    yield from (made.ledger.ids, made.ledger.positions)


def _none(step: LayerStep) -> bool:
    """Return that a step has written nothing."""
    return False
