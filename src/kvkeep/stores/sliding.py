"""Layers with a sliding window, which hold the entries of the last tokens with any method and budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvkeep.contracts.entries import EntryState
from kvkeep.geometry import spare_rows, window_rows
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import nbytes, storage_bytes
from kvkeep.step.plan import Destination, LayerStep, Span


class UniformSteps:
    """Steps of a window with the same numbers for every token: the row of the new entry is a tensor, and a mask on the
    device says which rows the token attends to. clock: numbers the tokens; None: there are no such steps."""

    def __init__(self, clock: Ledger | None) -> None:
        self._clock = clock
        self._slots: Tensor | None = None  # of each row
        self._first: int | None = None  # the first of these slots

    def slots(self, keys: Tensor, first: int) -> Tensor:
        """Return the slot of each row of ``keys``, (rows,) int32, the first of which is ``first``. It is the same
        tensor as before, if there are as many rows."""
        rows = keys.shape[2]
        if self._slots is None or len(self._slots) != rows:
            self._slots, self._first = torch.empty(rows, dtype=torch.int32, device=keys.device), None
        if self._first != first:
            self._first = None  # an interrupt may come
            torch.arange(first, first + rows, out=self._slots)
            self._first = first
        return self._slots

    def next(self, memory: tuple[Tensor, Tensor, int], arrived: int, window: int) -> LayerStep:
        """Return the step of the token in slot ``arrived``. memory: keys, values, and the slot of the first row."""
        assert self._clock is not None
        keys, values, first = memory
        slots, slot = self.slots(keys, first), self._clock.number(arrived)
        seen = ((slots <= slot) & (slots > slot - window)).expand(keys.shape[1], -1)
        spans = [Span(keys, values, 0, len(slots))]
        return LayerStep(Destination(keys, values), slot, attend=spans, seen=seen, place=slot - slots[:1])

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return nbytes(self._slots)


class RecordingLayer(CacheLayerMixin):
    """A layer that knows to how many tokens its text may be cropped."""

    def __init__(self) -> None:
        self.is_initialized = False  # transformers' constructor also sets keys and values
        self.arrived = 0
        self._recorded: int | None = None  # the number of tokens to which the text may be cropped
        self._before_drafts: int | None = None  # the same, while drafts are expected, as the caller set it

    @property
    def record_past(self) -> bool:
        """Whether the layer keeps, until a :meth:`crop`, the entries that a token after the present length would see,
        however many tokens arrive. transformers sets it, too."""
        return self._recorded is not None

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._recorded = None if not value else self.arrived if self._recorded is None else self._recorded

    def activate_past_recording(self) -> None:
        """Set :attr:`record_past`."""
        self.record_past = True

    def expect_drafts(self) -> None:
        """Keep what removing some of the next tokens needs, until :meth:`forget_drafts`."""
        self._before_drafts, self.record_past = self._recorded, True

    def forget_drafts(self) -> None:
        """Record again as before :meth:`expect_drafts`."""
        before, self._before_drafts = self._before_drafts, None
        self._recorded = None if before is None else min(before, self.arrived)


class SlidingLayer(RecordingLayer):
    """An exact layer in which a token sees itself and the ``window`` - 1 tokens before it. Its memory has rows for
    further entries, so that a step copies one. Without a free row, the entries move to new memory; the former stays as
    it was, for those who noted it (:func:`noted`).

    clock: the ledger that numbers tokens, where steps may be :attr:`uniform`. Without a free row, the entries then move
    within the memory, unless it is noted.
    """

    is_croppable = True
    is_sliding = True
    supports_early_init = False
    is_kvkeep = True
    compressed_bytes = 0

    def __init__(self, window: int, clock: Ledger | None = None, uniform: bool = False) -> None:
        super().__init__()
        self.sliding_window, self._clock = window, clock
        self._steps = UniformSteps(clock)
        self.uniform = uniform
        """Whether the steps of single tokens have the same numbers and memory, so that a graph can repeat them: on a
        GPU, with a method that drops entries, or in drafts."""
        self._noted = False  # whether the memory must stay as it is, for those who noted it
        self._memory: tuple[Tensor, Tensor, int] | None = None  # keys, values, and the slot of the first row

    def record_as(self, other: SlidingLayer) -> None:
        """Record as ``other``, of whose text this layer holds a copy, and copy the entries that it has recorded."""
        self._recorded = other._recorded
        if other.record_past and other.keys is not None and other.values is not None:
            self._hold(other.keys, other.values)

    @property
    def first(self) -> int:
        """The slot of the first entry that is held. Memory may have earlier ones, which no token sees."""
        length = self.arrived if self._recorded is None else min(self.arrived, self._recorded)
        return max(length - self.sliding_window + 1, 0 if self._memory is None else self._memory[2])

    @property
    def keys(self) -> Tensor | None:
        """The keys that are held, (batch, kv_heads, n, dim); None before the first."""
        return None if self._memory is None else self._from(self.first)[0]

    @property
    def values(self) -> Tensor | None:
        """The values that are held, (batch, kv_heads, n, value_dim); None before the first."""
        return None if self._memory is None else self._from(self.first)[1]

    def _from(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values from a slot on, as views."""
        assert self._memory is not None
        keys, values, first = self._memory
        rows = slice(max(0, slot - first), self.arrived - first)
        return keys[:, :, rows], values[:, :, rows]

    def _hold(
        self, keys: Tensor, values: Tensor, spare: int = 0, kept: tuple[Tensor, Tensor, int] | None = None
    ) -> None:
        """Copy the last entries of the text to new memory, with at least ``spare`` rows behind them, and from there to
        ``kept``, earlier memory, if it has as many rows. Where steps may be uniform, an entry's row follows from its
        slot, so that their bits do not depend on how the entries came here."""
        count = keys.shape[2]
        rows = max(window_rows(self.sliding_window, self.arrived + spare), count + spare)
        before = 0 if self._clock is None else (self.arrived - count) % spare_rows(self.sliding_window)
        before = before if before + count + spare <= rows else 0
        with torch.inference_mode(False):  # tensors created in it are read-only outside
            # Uniform steps give rows without an entry the weight 0, so these must have finite numbers.
            made = [part.new_zeros(*part.shape[:2], rows, part.shape[3]) for part in (keys, values)]
        for memory, part in zip(made, (keys, values), strict=True):
            memory[:, :, before : before + count] = part
        first = self.arrived - count - before
        self._memory = made[0], made[1], first
        if kept is not None and [one.shape for one in kept[:2]] == [one.shape for one in made]:
            for memory, part in zip(kept[:2], made, strict=True):
                memory.copy_(part)
            self._memory = kept[0], kept[1], first  # last, because an interrupt may come before
        self._noted = False

    @property
    def _kept(self) -> tuple[Tensor, Tensor, int] | None:
        """The memory, if entries may be moved within it."""
        return None if self._clock is None or self._noted else self._memory

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more entries."""
        if self._memory is not None and self.arrived + count - self._memory[2] > self._memory[0].shape[2]:
            self._hold(*self._from(self.first), count, self._kept)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the memory takes its shape from the first entries."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new entries, (batch, kv_heads, new, dim), and return all that their tokens see."""
        self.is_initialized, count = True, key_states.shape[2]
        seen = self.arrived - self.sliding_window + 1  # the first slot that the new tokens see
        learns = torch.is_grad_enabled() and key_states.requires_grad  # what backward needs must not be overwritten
        if self._memory is not None and count <= spare_rows(self.sliding_window) and not learns:
            self.reserve(count)
            keys, values, first = self._memory
            rows = slice(self.arrived - first, self.arrived - first + count)
            keys[:, :, rows], values[:, :, rows] = key_states, value_states
            self.arrived += count
            return self._from(seen)
        first, kept = self.arrived if self._memory is None else self.first, None if learns else self._kept
        if self._memory is not None:
            keys, values = self._from(first)
            key_states, value_states = torch.cat((keys, key_states), 2), torch.cat((values, value_states), 2)
        self._memory = key_states, value_states, first
        self.arrived += count
        found = self._from(seen)
        self._hold(*self._from(self.first), kept=kept)
        return found

    def plan(self, count: int = 1) -> LayerStep | None:
        """Return the step for the next ``count`` entries of one row; None where there are several rows, or on a GPU,
        unless steps are :attr:`uniform`."""
        if self._memory is None or len(self._memory[0]) > 1:
            return None
        if self.uniform:
            self.reserve(1)
            return self._steps.next(self._memory, self.arrived, self.sliding_window) if count == 1 else None
        if not self._memory[0].is_cpu:
            return None
        self.reserve(count)
        keys, values, first = self._memory
        row = self.arrived - first
        spans = [Span(keys, values, 0, row + count)]
        append = Destination(keys, values, row)
        return LayerStep(append, self.arrived, attend=spans, tokens=count, window=self.sliding_window, first=first)

    def layout(self) -> Sequence[Any] | None:
        """Make room for an entry, and return the tensors of its step (:meth:`plan`); None until the memory has all of
        its rows, and where :meth:`plan` has other steps."""
        if not self.uniform or self._memory is None or len(self._memory[0]) > 1:
            return None
        self.reserve(1)
        keys, values, first = self._memory
        slots = self._steps.slots(keys, first)
        return None if len(slots) != window_rows(self.sliding_window) else [keys, values, slots]

    def follows(self, step: LayerStep) -> int | None:
        """Return how many tokens after ``step``, which was planned earlier, the same step comes next; None where other
        memory is written or read meanwhile."""
        if self._memory is None or self._memory[0] is not step.append.keys:
            return None
        row = self.arrived - step.first
        return row - step.append.row if row + step.tokens <= step.append.keys.shape[2] else None

    def commit(self) -> None:
        """Note that the next token of the step of :meth:`plan` has run."""
        self.arrived += 1

    def get_seq_length(self) -> int:
        return self.arrived

    def get_max_length(self) -> int:
        return self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        before = min(self.arrived, self.sliding_window - 1)
        return before + query_length, self.arrived - before

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise RuntimeError if the window has discarded entries that it needs after a crop."""
        left = self.arrived + tokens_to_remove
        if self._memory is not None and self.first > max(0, left - self.sliding_window + 1):
            raise RuntimeError(
                f"A sliding window has {self.arrived - self.first} of {self.arrived} entries, and cannot go back "
                f"{-tokens_to_remove}; call activate_past_recording() before the tokens that may be removed."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. Raises RuntimeError as :meth:`check_crop`."""
        self.check_crop(tokens_to_remove)
        self.arrived = max(0, self.arrived - abs(tokens_to_remove))
        if self.record_past:
            self._recorded = self.arrived

    def trim(self) -> None:
        """Release memory that recorded entries needed, once the layer no longer records."""
        limit = window_rows(self.sliding_window, self.arrived)
        if self._memory is not None and self._memory[0].shape[2] > limit and not self.record_past:
            self._hold(*self._from(self.first))

    def select(self, index: Tensor) -> None:
        if self._memory is not None:
            keys, values = (part.index_select(0, index.to(part.device)) for part in self._memory[:2])
            self._memory = keys, values, self._memory[2]

    @property
    def rows(self) -> int:
        return 0 if self._memory is None else len(self._memory[0])

    @property
    def resident_bytes(self) -> int:
        return 0 if self._memory is None else storage_bytes(*self._memory[:2])

    @property
    def bookkeeping_bytes(self) -> int:
        return self._steps.nbytes

    def entry_states(self, length: int, batch: int) -> Tensor:
        heads = 1 if self._memory is None else self._memory[0].shape[1]
        codes = torch.full((batch, heads, length), EntryState.RESIDENT, dtype=torch.int8)
        codes[..., : max(0, length - self.sliding_window + 1)] = EntryState.DROPPED
        return codes

    def state(self) -> dict[str, Tensor]:
        """Return what the next token sees, without other recorded entries."""
        if self._memory is None:
            return {}
        keys, values = self._from(self.arrived - self.sliding_window + 1)
        return {"keys": keys, "values": values}

    def restore(self, state: dict[str, Tensor], length: int) -> None:
        """Replace the entries by those of a text of ``length`` tokens."""
        self.is_initialized, self.arrived, self._memory = bool(state), length if state else 0, None
        if state:
            self._hold(state["keys"], state["values"])


@dataclass
class WindowState:
    """A layer with a sliding window, and its state at the time of the copy. Tokens that are read and then removed must
    not move the window."""

    layer: SlidingLayer
    memory: tuple[Tensor, Tensor, int] | None
    arrived: int
    recorded: int | None

    def restore(self, again: bool = False) -> None:
        """Restore this state in the layer. again: whether it may be restored once more."""
        self.layer._memory, self.layer.arrived, self.layer._recorded = self.memory, self.arrived, self.recorded
        self.layer._noted = again


def sliding_layers(cache: Any) -> list[SlidingLayer]:
    """Return the sliding layers of a cache."""
    return [cache.layers[layer.index] for layer in cache.geometry.sliding_layers]


def noted(layers: Sequence[SlidingLayer]) -> list[WindowState]:
    """Return the present states of layers."""
    for layer in layers:
        layer._noted = True
    return [WindowState(layer, layer._memory, layer.arrived, layer._recorded) for layer in layers]
