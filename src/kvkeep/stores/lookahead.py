"""Lookahead: a chunk is read twice. The first pass keeps nothing; by what it attended to, earlier entries are merged,
and the second reads the chunk after what is left of them. So the last decision sees the end of the prompt.

As AsymKV and KVSlimmer are published. AsymKV also goes back through the model: the weights are frozen, and the loss of
the chunk is differentiated by the keys before it, of all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention.step import Step
from kvkeep.errors import UsageError
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter


class Lookahead:
    """The first passes of one cache.

    gradients: they go back through the ``model``. layers: those whose entries are merged, each with a
    :class:`~kvkeep.contracts.store.LookaheadStore`. open: such a pass is in
    progress.
    """

    def __init__(self, model: Any, gradients: bool, ledger: Ledger, meter: Meter) -> None:
        self.model, self.gradients, self.ledger, self.meter = model, gradients, ledger, meter
        self.layers: list[Any] = []
        self.open = False
        self._real: Tensor | None = None  # (rows, n) bool, which of the new tokens are no padding

    def wanted(self, past: int, count: int) -> bool:
        """Return whether ``count`` tokens after ``past`` are read twice: several are, one where there is no room."""
        if self.open or not past:
            return False
        return count > 1 or any(layer.evicted.full(layer.resident) for layer in self.layers)

    def look(self, decoder: Any, given: dict[str, Any]) -> None:
        """Read the tokens of ``given``, the arguments of a pass, and merge entries before them."""
        gradients: list[Tensor] = []
        self.open = True
        try:
            if self.gradients:
                gradients = self._backwards(given)
            else:
                decoder(**given)
        finally:
            self.open = False
            for layer in self.layers:
                layer.evicted.leaves.clear()
        real, self._real, found = self._real, None, iter(gradients)
        assert real is not None
        with torch.inference_mode(False), torch.no_grad():
            for layer in self.layers:
                layer.evicted.merge_before(layer.resident, real, found)

    def attend(self, layer: Any, step: Step) -> Tensor:
        """Return a layer's attention in such a pass, (lanes, heads, queries, value_dim): its new entries are not
        kept."""
        output, layer.pending = layer.evicted.look(layer, step), None
        return output

    def note(self, past: int) -> None:
        """Note which tokens of a pass after ``past`` are real, before they are forgotten."""
        visible, shape = self.ledger.visible, (self.ledger.batch, self.ledger.length - past)
        self._real = torch.ones(shape, dtype=torch.bool) if visible is None else visible[:, past:].clone()
        self._real = self._real.to(self.ledger.device)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _backwards(self, given: dict[str, Any]) -> list[Tensor]:
        """Return the gradient of the tokens' loss by the keys of all layers' banks, in their order."""
        ids = given.get("input_ids")
        if ids is None:
            raise UsageError("A loss is of token ids, and embeddings have none; 'kvslimmer-published' needs no loss.")
        own = {name: part.clone() if isinstance(part, Tensor) else part for name, part in given.items()}
        with _frozen(self.model), self._graph():
            logits = self.model(**own).logits
            assert self._real is not None
            leaves = [leaf for layer in self.layers for leaf in layer.evicted.leaves]
            return list(torch.autograd.grad(loss(logits, own["input_ids"], self._real), leaves))

    @contextmanager
    def _graph(self) -> Iterator[None]:
        """Count the tensors that the graph keeps, each once, as workspace while the block runs."""
        known, held = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}, 0

        def kept(tensor: Tensor) -> Tensor:
            nonlocal held
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                held += storage.nbytes()
                self.meter.hold(storage.nbytes())
            return tensor

        try:
            with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
                yield
        finally:
            self.meter.hold(-held)


def loss(logits: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """Return the loss of a chunk, (): the cross-entropy of each real token after a real one, mean over a row's, summed
    over rows. logits (rows, n, vocabulary), ids and real (rows, n). One token has none after it in its chunk; its loss
    is that of the token that the model ranks first."""
    chances = logits.float().log_softmax(-1)
    if ids.shape[1] == 1:
        return -chances.amax(-1).sum()
    follows = real[:, :-1] & real[:, 1:]
    each = chances[:, :-1].gather(2, ids[:, 1:, None].long()).squeeze(2) * follows
    return -(each.sum(1) / follows.sum(1).clamp(min=1)).sum()


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Let no weight of ``model`` have a gradient within the block."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for weight in weights:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)
