"""The stream: how a bounded cache takes part in a model's forward pass.

transformers passes a module and tensors to its attention function, not the cache. The hooks of
:mod:`kvkeep.models.binding` find the stream on the cache and pass it the new tokens; it computes the attention of
layers whose past is streamed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention.step import Step
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.inference import outside_inference_mode
from kvkeep.passes import Passes
from kvkeep.policies.assembly import Assembly
from kvkeep.policies.methods import Method
from kvkeep.step.plan import LayerStep
from kvkeep.stores.dynamic import held_by
from kvkeep.stores.layer import Layer
from kvkeep.stores.layer_group import LayerGroup

ROOM = 64
"""Positions at least for a piece of a text that is read once more, and for what introduces it."""


class Stream(Passes):
    """The forward passes of a bounded cache, made as ``made``. limit: the entries beyond which the text is read once
    more, None where it is not; rehearsing: nobody keeps what is read now (:mod:`kvkeep.stores.rehearsal`)."""

    streams = True
    bounded: list[Layer]

    def __init__(self, method: Method, geometry: ModelGeometry, made: Assembly, limit: int | None = None) -> None:
        super().__init__(geometry, made)
        self.method, self.device, self.limit, self.rehearsing = method, made.device, limit, False
        self.pass_hooks = [hook for part in (method.store_fate, method.recall) if (hook := part.hook()) is not None]
        self.held = [held_by(layer) for layer in made.layers]
        self.ledger, self.meter, self.checkpoint = made.ledger, made.meter, made.checkpoint
        self.positions, self.round = made.positions, made.round
        # Positions are limited if evicted entries are dropped; recalled ones keep those of the text.
        recalls = method.store_fate.keeps or method.recall.reads_all
        self.ends = made.budgets is not None and made.positions is None and not recalls
        self._readers = {layer.source: layer.index for layer in geometry.layers}
        self.observes = method.exactness != "exact"
        self._groups: list[LayerGroup] = []  # layers that are ranked at once
        self._pending_bytes = 0
        self._masked = False  # whether the caller's mask is not of padding alone

    def _processed(self) -> int:
        return self.ledger.length

    @property
    def rows(self) -> int:
        """Rows of the batch held, 0 before the first token."""
        return self.ledger.batch

    def admit(self, tokens: int) -> None:
        """Raise UsageError if ``tokens`` more would go past the model's positions, before a token is read."""
        limit, total = self.geometry.max_positions, self.length + tokens
        if limit is None or self.rehearsing:
            return
        if self.limit is not None and total > max(self.limit, limit - ROOM):
            raise UsageError(
                f"'{self.method.name}' reads a text once more at the positions that follow, and the model has {limit}: "
                f"{total} tokens leave too few; shorten the text to {limit - ROOM}."
            )
        if self.ends and total > limit:
            raise UsageError(
                f"'{self.method.name}' keeps the positions of the text, and {total} tokens are more than the {limit} "
                "that the model has; 'streaming-llm' with positions within the cache has no such end."
            )
        if self.positions is not None and self.method.oneshot:
            most = min(self.length, self.positions.entries) + tokens
            if most > self.positions.limit:
                raise UsageError(
                    f"Read at once, these {tokens} tokens and what the cache holds have {most} positions, more than "
                    f"the model's {self.positions.limit}; without 'oneshot' they are read in chunks."
                )

    @outside_inference_mode
    def begin_forward(
        self, ids: Tensor | None, embeddings: Tensor | None, positions: Tensor | None, mask: Any
    ) -> Tensor | None:
        """Record the tokens of a pass; return positions for the model, None for its own."""
        self.roll_back()
        if self.limit is not None and ids is None:
            raise UsageError(
                f"'{self.method.name}' reads a text once more by its token ids, not by embeddings; pass input_ids."
            )
        if self.round is not None:
            self.round.before_forward()
        self._masked = mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2)
        if self._masked and self.checkpoint is not None and self.checkpoint.replays:
            raise UsageError(
                f"Checkpoint kind '{self.checkpoint.spec}' runs the model again by its own masks, and cannot by one of "
                "the caller's; use kind 'kv' or 'residual'."
            )
        self.open, self._known = True, self.ledger.length
        self.ledger.append(ids, embeddings, positions, mask if isinstance(mask, Tensor) else None)
        self.first = self.ledger.first
        self.masks_itself = self.exact and not self._masked and self.first is None
        if self.checkpoint is not None and not self._drafting:
            self.checkpoint.begin_forward(embeddings is None, self._known)
        if self.positions is None:
            return positions
        if positions is None:
            positions = torch.arange(self._known, self.ledger.length, device=self.device).unsqueeze(0)
        return self.positions.begin(positions, self._known)

    @property
    def wants_residuals(self) -> bool:
        """Whether the checkpoint keeps residuals."""
        return self.checkpoint is not None and self.checkpoint.by_token

    @outside_inference_mode
    def plan(self) -> dict[int, LayerStep]:
        """Return what the token does; nothing where more than a layer has a part in it."""
        apart = self.positions or self.round or self.pass_hooks or self.rehearsing or self._masked
        if apart or self.ledger.batch > 1 or self.ledger.visible is not None:
            return {}
        steps, members = self._planned(), dict[Hashable, list[int]]()
        for index in steps:
            if (key := self.layers[index].resident.group) is not None:
                members.setdefault(key, []).append(index)
        before, self._groups = self._groups, []
        for own in members.values():
            residents = [self.layers[index].resident for index in own]
            group = next((one for one in before if one.holds(residents)), None) or LayerGroup(residents)
            group.plan([steps[index] for index in own])
            self._groups.append(group)
        return steps

    @outside_inference_mode
    def commit(self, layers: Iterable[int], completed: bool) -> None:
        """Note the layers in which the steps have run, and let selectors learn of the attention."""
        for index in layers:
            own = self.geometry.layers[index]
            size = own.kv_heads * (own.key_dim + own.value_dim) * self.geometry.dtype_bytes
            self._pending_bytes = max(self._pending_bytes, size)
        super().commit(layers, completed)
        for group in self._groups:
            group.finish(completed)

    @outside_inference_mode
    def enter_layer(self, layer_idx: int, hidden: Tensor) -> None:
        """Let the checkpoint keep the residual entering a layer."""
        if self.checkpoint is not None and not self._drafting:
            self.checkpoint.enter_layer(layer_idx, hidden.detach())

    def attends(self, layer_idx: int) -> bool:
        """Return whether a layer's attention is computed here."""
        return self.streamed(layer_idx) or super().attends(layer_idx)

    def streamed(self, layer_idx: int) -> bool:
        """Return whether a layer's past is streamed; a sliding window's is not."""
        return self.geometry.layers[self.geometry.layers[layer_idx].source].kind == "full"

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        """Attend to evicted, resident and new entries; then settle the new ones."""
        attend = self._attend if self.rehearsing else self._attend_outside_inference_mode
        return attend(module, query, key, value, mask, scaling)

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        index = module.layer_idx
        if not self.streamed(index):
            return super().attend(module, query, key, value, mask, scaling)
        source = self.geometry.layers[index].source
        layer = self.layers[source]
        self._pending_bytes = max(self._pending_bytes, layer.pending_bytes)
        if self.positions is not None:
            self.positions.place(layer)  # before the new entries, which have positions already
        own, last = index == source, self._readers[source] == index
        if own and layer.pending is None:
            raise KvkeepError(
                f"'{self.geometry.model_type}' passed no entries to the cache, as under gradient checkpointing; "
                "call model.eval()."
            )
        if key.shape[2] == 1 and not self._masked and self.ledger.all_tokens(1):
            mask = None  # a token sees itself
        if mask is not None and mask.shape[-1] not in (key.shape[2], self.ledger.length):
            raise UsageError(
                f"The attention mask covers {mask.shape[-1]} entries; there are {self.ledger.length}, {key.shape[2]} "
                "of them new, and a mask covers the former or the latter."
            )
        step = Step.of(module, query, key, value, mask, scaling, layer.heads, own, last)
        return step.unfolded(layer.attend(step))

    _attend_outside_inference_mode = outside_inference_mode(_attend)

    @outside_inference_mode
    def end_forward(self, completed: bool) -> None:
        """End the step; after an exception it is rolled back where possible."""
        if not completed:
            if self._drafting or not self.moving:
                self.roll_back()
            return
        self.open = False
        if any(layer.arrived != self.ledger.length for layer in self.bounded):
            raise KvkeepError(
                f"'{self.geometry.model_type}' did not pass all its entries through the cache's attention; "
                "the result would be wrong. Use method 'full'."
            )
        self.meter.cache(sum(held.resident_bytes + held.compressed_bytes for held in self.held) + self._pending_bytes)
        self._pending_bytes = 0
        if self.round is not None:
            self.round.after_forward()
        self._report_progress()

    @outside_inference_mode
    def roll_back(self) -> None:
        """Undo an unfinished step, and the round with it."""
        if self.open and self.round is not None and self.round.open:
            self.open = False
            self.round.retract()
        super().roll_back()

    @property
    def due(self) -> bool:
        """Whether a whole text was read that is longer than the budget, and not once more yet."""
        return self.limit is not None and self.ledger.length > self.limit and not (self.cut or self.rehearsing)

    def forget_from(self, length: int) -> None:
        """Truncate the parts that all layers share to ``length`` slots, after the layers."""
        self.ledger.truncate(length)
        if self.positions is not None:
            self.positions.truncate(length)
        if self.checkpoint is not None:
            self.checkpoint.truncate_residuals(length)

    @outside_inference_mode
    def abandon(self) -> None:
        """Undo an unfinished step or round."""
        self.roll_back()
        if self.round is not None and self.round.open:
            self.round.retract()

    @property
    def _drafting(self) -> bool:
        return self.round is not None and self.round.drafting
