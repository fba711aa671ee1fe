"""Passes: the forward passes of a cache; an unfinished one is undone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.contracts.hook import PassHook
from kvkeep.errors import KvkeepError
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.assembly import Assembly
from kvkeep.step import native
from kvkeep.step.plan import LayerStep
from kvkeep.stores.dynamic import held_by


class Passes:
    """The forward passes of a cache whose attention is transformers' own.

    decoder: the only decoder whose passes count, None: any. open: a step is in progress or unfinished. chunk: tokens of
    a prompt read at a time. earlier_outputs: outputs of a prompt's earlier chunks. on_progress: called with the tokens
    so far, after every pass. exact: attention is the native library's, whose bits depend on the entries alone. cut:
    what is read now is a part of a text, and not its last.
    """

    streams = observes = False
    last_outputs = 0
    text: tuple[int, list[int]] | None = None
    cut = False
    pass_hooks: Sequence[PassHook] = ()

    def __init__(self, geometry: ModelGeometry, made: Assembly) -> None:
        self.geometry, self.layers, self.decoder = geometry, made.layers, made.decoder
        self.chunk = made.chunk or sys.maxsize
        self.bounded: list[Any] = [made.layers[layer.index] for layer in geometry.full_layers]
        sources = [layer.source for layer in geometry.layers]
        self._single = [layer.index for layer in geometry.full_layers if sources.count(layer.index) == 1]
        self.moving = any(layer.kind not in ("full", "shared") for layer in geometry.layers)
        self.earlier_outputs: list[Tensor] = []
        self.on_progress: Callable[[int], None] | None = None
        self.open, self._known = False, 0
        self.exact = made.exact
        self.first: Tensor | None = None
        self.masks_itself = made.exact
        self._latent = made.latent

    @property
    def due(self) -> bool:
        """Whether a text was read, and the cache is to choose what stays before it goes on."""
        return False

    @property
    def length(self) -> int:
        """Tokens processed, those of an unfinished step not counted."""
        return self._known if self.open else self._processed()

    def _processed(self) -> int:
        return next(iter(self.bounded), self.layers[0]).get_seq_length()

    @property
    def rows(self) -> int:
        """Rows of the batch held, 0 before the first token."""
        return next((rows for layer in self.layers if (rows := held_by(layer).rows)), 0)

    def admit(self, tokens: int) -> None:
        """Raise if there is no room for ``tokens`` more, before a token is read."""

    def begin_forward(
        self, ids: Tensor | None, embeddings: Tensor | None, positions: Tensor | None, mask: Any
    ) -> Tensor | None:
        """Record the tokens of a pass; return positions for the model, None for its own."""
        self.roll_back()
        self.open, self._known = True, self._processed()
        self.see(mask)
        return positions

    def see(self, mask: Any) -> None:
        """Note the padding that a pass's ``mask`` tells of. masks_itself: nothing else is masked, so that causal layers
        need no mask."""
        self.first, self.masks_itself = None, self.exact and mask is None
        if isinstance(mask, Tensor) and mask.ndim == 2 and self.exact:
            host = mask.bool()
            self.first = None if bool(host.all()) else host.int().argmax(1)
            self.masks_itself = self.first is None or bool((host.cummax(1).values == host).all())

    @property
    def wants_residuals(self) -> bool:
        """Whether :meth:`enter_layer` does anything."""
        return False

    def plan(self) -> dict[int, LayerStep]:
        """Return what the one token of a pass that has begun does, by layer, of those layers where it can be told."""
        return self._planned() if self.masks_itself and self.first is None else {}

    def _planned(self) -> dict[int, LayerStep]:
        steps = {} if self._latent else {index: self.layers[index].plan() for index in self._single}
        return {index: step for index, step in steps.items() if step is not None}

    def commit(self, layers: Iterable[int], completed: bool) -> None:
        """Note the ``layers`` in which the steps of :meth:`plan` have run; ``completed``: the pass has as well."""
        for index in layers:
            self.layers[index].commit()

    def enter_layer(self, layer_idx: int, hidden: Tensor) -> None:
        """Receive the residual entering a layer, (batch, new, hidden_size)."""

    def attends(self, layer_idx: int) -> bool:
        """Return whether a layer's attention is computed here: its past is streamed, or the kernel attends to all."""
        return self.exact and self.geometry.layers[layer_idx].kind in ("full", "sliding", "shared")

    def streamed(self, layer_idx: int) -> bool:
        """Return whether a layer's past is streamed."""
        return False

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        """Return attention over all entries of a layer, None where that is left to transformers."""
        layer = self.layers[self.geometry.layers[module.layer_idx].source]
        start = layer.cumulative_length - key.shape[2] if hasattr(layer, "cumulative_length") else 0
        output = native.attend_all(query, key, value, mask, scaling, start, self.first)
        if output is not None or mask is not None or not self.masks_itself:
            return output
        # No mask was made, and without one transformers would take the queries for the first tokens.
        slots = torch.arange(key.shape[2], device=key.device)
        seen = (slots <= slots[-query.shape[2] :, None])[None, None]
        if self.first is not None:
            seen = seen & (slots + start >= self.first[:, None])[:, None, None]
        return attend(query, [Segment(key, value, seen)], scaling)[0]

    def end_forward(self, completed: bool) -> None:
        """End the step; after an exception it is rolled back where possible."""
        if not completed:
            if not self.moving:
                self.roll_back()
            return
        self.open = False
        self._report_progress()

    def _report_progress(self) -> None:
        if self.on_progress is not None:
            self.on_progress(self._processed())

    def roll_back(self) -> None:
        """Undo an unfinished step. Hooks miss some interrupts, so this may run at the next use. Raises KvkeepError
        if it cannot be undone."""
        if not self.open:
            return
        lost = any(layer.lost for layer in self.bounded)
        if lost or self.moving:
            reason = "a store could not take evicted entries" if lost else "a sliding window cannot be rolled back"
            raise KvkeepError(
                f"The cache was left in the middle of a step, and {reason}; call reset() and read the text again."
            )
        self.open = False
        for layer in self.bounded:
            layer.truncate(self._known)
        self.forget_from(self._known)

    def forget_from(self, length: int) -> None:
        """Truncate the parts that all layers share to ``length`` slots, after the layers."""

    def abandon(self) -> None:
        """Undo an unfinished step."""
        self.roll_back()
