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
from kvkeep.memory.meter import storage_bytes
from kvkeep.step.plan import Destination, LayerStep, Span


class SlidingLayer(CacheLayerMixin):
    """An exact layer in which a token sees itself and the ``window`` - 1 tokens before it. Its memory has rows for
    further entries, so that a step copies one. Without a free row, the entries move to new memory; the former stays as
    it was, for those who noted it (:func:`noted`)."""

    is_croppable = True
    is_sliding = True
    supports_early_init = False
    is_kvkeep = True
    compressed_bytes = bookkeeping_bytes = 0

    def __init__(self, window: int) -> None:
        self.is_initialized = False  # transformers' constructor also sets keys and values
        self.sliding_window, self.arrived = window, 0
        self._memory: tuple[Tensor, Tensor, int] | None = None  # keys, values, and the slot of the first row
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

    def record_as(self, other: SlidingLayer) -> None:
        """Record as ``other``, of whose text this layer holds a copy, and copy the entries that it has recorded."""
        self._recorded = other._recorded
        if other.record_past and other.keys is not None and other.values is not None:
            self._hold(other.keys, other.values)

    def expect_drafts(self) -> None:
        """Keep what removing some of the next tokens needs, until :meth:`forget_drafts`."""
        self._before_drafts, self.record_past = self._recorded, True

    def forget_drafts(self) -> None:
        """Record again as before :meth:`expect_drafts`."""
        before, self._before_drafts = self._before_drafts, None
        self._recorded = None if before is None else min(before, self.arrived)

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

    def _hold(self, keys: Tensor, values: Tensor, spare: int = 0) -> None:
        """Copy the last entries of the text to new memory, with at least ``spare`` rows behind them."""
        count = keys.shape[2]
        rows = max(window_rows(self.sliding_window, self.arrived + spare), count + spare)
        with torch.inference_mode(False):  # tensors created in it are read-only outside
            made = [part.new_empty(*part.shape[:2], rows, part.shape[3]) for part in (keys, values)]
        for memory, part in zip(made, (keys, values), strict=True):
            memory[:, :, :count] = part
        self._memory = made[0], made[1], self.arrived - count

    def _reserve(self, count: int) -> None:
        """Make room for ``count`` more entries."""
        assert self._memory is not None
        if self.arrived + count - self._memory[2] > self._memory[0].shape[2]:
            self._hold(*self._from(self.first), count)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the memory takes its shape from the first entries."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new entries, (batch, kv_heads, new, dim), and return all that their tokens see."""
        self.is_initialized, count = True, key_states.shape[2]
        seen = self.arrived - self.sliding_window + 1  # the first slot that the new tokens see
        learns = torch.is_grad_enabled() and key_states.requires_grad  # what backward needs must not be overwritten
        if self._memory is not None and count <= spare_rows(self.sliding_window) and not learns:
            self._reserve(count)
            keys, values, first = self._memory
            rows = slice(self.arrived - first, self.arrived - first + count)
            keys[:, :, rows], values[:, :, rows] = key_states, value_states
            self.arrived += count
            return self._from(seen)
        first = self.arrived if self._memory is None else self.first
        if self._memory is not None:
            keys, values = self._from(first)
            key_states, value_states = torch.cat((keys, key_states), 2), torch.cat((values, value_states), 2)
        self._memory = key_states, value_states, first
        self.arrived += count
        found = self._from(seen)
        self._hold(*self._from(self.first))
        return found

    def plan(self, count: int = 1) -> LayerStep | None:
        """Return the step for the next ``count`` entries of one row; None where there are several rows, or on a GPU."""
        if self._memory is None or len(self._memory[0]) > 1 or not self._memory[0].is_cpu:
            return None
        self._reserve(count)
        keys, values, first = self._memory
        row = self.arrived - first
        spans = [Span(keys, values, 0, row + count)]
        append = Destination(keys, values, row)
        return LayerStep(append, self.arrived, attend=spans, tokens=count, window=self.sliding_window, first=first)

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
        most = window_rows(self.sliding_window, self.arrived)
        if self._memory is not None and self._memory[0].shape[2] > most and not self.record_past:
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

    def restore(self) -> None:
        """Restore this state in the layer."""
        self.layer._memory, self.layer.arrived, self.layer._recorded = self.memory, self.arrived, self.recorded


def sliding_layers(cache: Any) -> list[SlidingLayer]:
    """Return the sliding layers of a cache."""
    return [cache.layers[layer.index] for layer in cache.geometry.sliding_layers]


def noted(layers: Sequence[SlidingLayer]) -> list[WindowState]:
    """Return the present states of layers."""
    return [WindowState(layer, layer._memory, layer.arrived, layer._recorded) for layer in layers]
