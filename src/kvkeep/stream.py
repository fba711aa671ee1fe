"""The stream: how a bounded cache takes part in a model's forward pass.

transformers hands its attention function a module and tensors, not the cache. The hooks of :mod:`kvkeep.models.binding`
find the stream on the cache and tell it what comes in; it answers the attention of the layers whose past is streamed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention.step import Step
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.assembly import Assembly
from kvkeep.policies.methods import Method
from kvkeep.stores.dynamic import held_by
from kvkeep.stores.layer import Layer


class Stream:
    """The forward passes of one cache, made as ``made``. chunk: tokens of a prompt taken at a time. earlier_outputs: of
    a prompt's earlier chunks, for the last. on_progress: called with the tokens so far, after every pass."""

    def __init__(self, method: Method, geometry: ModelGeometry, made: Assembly) -> None:
        self.method, self.geometry, self.chunk = method, geometry, made.chunk
        self.layers, self.device = made.layers, made.device
        self.held = [held_by(layer) for layer in made.layers]
        self.ledger, self.meter, self.checkpoint = made.ledger, made.meter, made.checkpoint
        self.positions, self.round = made.positions, made.round
        # Positions end where what leaves is gone: what comes back is where the text has it.
        self.ends = made.budgets is not None and made.positions is None and not method.store_fate.keeps
        self.bounded: list[Layer] = [made.layers[layer.index] for layer in geometry.full_layers]
        self.windows = [made.layers[layer.index] for layer in geometry.sliding_layers]
        self.earlier_outputs: list[Tensor] = []
        self.on_progress: Callable[[int], None] | None = None
        self._readers = {layer.source: layer.index for layer in geometry.layers}
        self._open, self._known, self._in_hand = False, 0, 0

    @property
    def length(self) -> int:
        """Tokens processed, those of an unfinished step not counted."""
        return self._known if self._open else self.ledger.length

    def admit(self, tokens: int) -> None:
        """Raise UsageError if ``tokens`` more would go past the positions the model has, before anything is read."""
        limit = self.geometry.max_positions
        if self.ends and limit is not None and (total := self.length + tokens) > limit:
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
        return self.geometry.layers[self.geometry.layers[layer_idx].source].kind == "full"

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
            if self._drafting or not self.windows:
                self.roll_back()
            return
        self._open = False
        if any(layer.arrived != self.ledger.length for layer in self.bounded):
            raise KvkeepError(
                f"'{self.geometry.model_type}' did not pass all its entries through the cache's attention; "
                "the result would be wrong. Use method 'full'."
            )
        self.meter.cache(sum(held.resident_bytes + held.compressed_bytes for held in self.held) + self._in_hand)
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
        if lost or self.windows:
            reason = "entries left that its store could not take" if lost else "sliding windows cannot be rolled back"
            raise KvkeepError(
                f"The cache was left in the middle of a step, and its {reason}; call reset() and read the text again."
            )
        self._open = False
        for layer in self.bounded:
            layer.truncate(self._known)
        self.forget_from(self._known)

    def forget_from(self, length: int) -> None:
        """Forget what all layers share of the slots from ``length`` on; the layers did already."""
        self.ledger.truncate(length)
        if self.positions is not None:
            self.positions.truncate(length)
        if self.checkpoint is not None:
            self.checkpoint.truncate_residuals(length)

    def abandon(self) -> None:
        """Undo a step or a round that was left in the middle."""
        self.roll_back()
        if self.round is not None and self.round.open:
            self.round.retract()

    @property
    def _drafting(self) -> bool:
        return self.round is not None and self.round.drafting
