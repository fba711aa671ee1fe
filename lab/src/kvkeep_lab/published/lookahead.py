"""Lookahead, as in the published code of AsymKV and KVSlimmer: the model reads each chunk twice.

The first pass stores no entries; its attention decides which earlier entries are merged. The second pass reads the
chunk after the merged entries. The last decision therefore uses the end of the prompt.

AsymKV also runs a backward pass: the weights are frozen, and the loss of the chunk is differentiated by the earlier
keys of all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvkeep.attention import attend, received
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.contracts.hook import PassHook
from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.inference import outside_inference_mode
from kvkeep.memory.ledger import Ledger
from kvkeep.memory.meter import Meter
from kvkeep.models.packed import Packed
from kvkeep.step.scores import scores_of
from kvkeep.step.torch import sink_scores
from kvkeep.stores.layer import Layer
from kvkeep.stores.readers.rehearsal import Rehearsal, rehearsing


class Lookahead(PassHook):
    """Runs the first passes of one cache, whose layers have a :class:`~kvkeep_lab.published.merge_ahead.MergeAhead`.
    gradients: whether a backward pass follows."""

    def __init__(self, gradients: bool) -> None:
        self.gradients = gradients

    @outside_inference_mode
    def before(self, cache: Any, given: dict[str, Any]) -> None:
        """Read several tokens, or one token into a full cache, and merge earlier entries."""
        cache.stream.roll_back()
        layers, past = cache.stream.bounded, cache.ledger.length
        tokens = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
        full = any(layer.evicted.full(layer.resident) for layer in layers)
        if not past or not (full or tokens.shape[1] > 1):
            return
        readers = [LookaheadPass(self.gradients) for _ in layers]
        with rehearsing(cache, readers):
            if self.gradients:
                _go_back(cache, given, readers)
            else:
                cache.made.decoder(**given)
            real = real_tokens(cache.ledger, past)
        for layer, reader in zip(layers, readers, strict=True):
            layer.evicted.merge_before(layer.resident, real, reader.received, reader.gradients)


class LookaheadPass(Rehearsal):
    """The reader of a layer in the first pass.

    received: attention that the entries of each non-empty bank received from the tokens, (lanes, entries). leaves: the
    keys by which the loss is differentiated, if it is. gradients: the gradient by each of them, (lanes, entries, dim).
    """

    def __init__(self, differentiable: bool) -> None:
        self.differentiable = differentiable
        self.received: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def attended(self, layer: Layer, step: AttentionInputs) -> Tensor:
        if self.differentiable:
            return self._differentiable(layer, step)
        resident, wide = layer.resident, step.wide(layer.length)
        segments = [layer.segment(piece, step, wide) for piece in resident.pieces()]
        output, lse = attend(step.query, [*segments, step.arriving()], step.scaling, step.sinks, layer.origin)
        lse = layer.ledger.unpadded(lse, layer.heads)
        self.received = [received(step.query, segment, lse, step.scaling) for segment in segments]
        return output

    def _differentiable(self, layer: Layer, step: AttentionInputs) -> Tensor:
        """Compute the attention in plain operations, with a graph whose leaves are the keys."""
        wide, new, parts = step.wide(layer.length), step.arriving(), []
        self.received, pieces = [], layer.resident.pieces()
        visible = layer.ledger.visible_by(step.heads)
        for bank in layer.resident.banks:
            query, key, value = bank.of(step.query), bank.of(new.key), bank.of(new.value)
            mask = new.mask if new.mask is None or len(new.mask) == 1 else bank.of(new.mask)
            new_scores = masked_scores(query, key, mask, new.causal, step.scaling)
            sinks = () if step.sinks is None else (bank.of(sink_scores(step.sinks, step.query)),)
            if not bank.used:
                weights = torch.cat([new_scores, *sinks], -1).softmax(-1)[..., : step.new]
                parts.append(weights.to(value.dtype) @ value)
                continue
            piece = next(pieces)
            self.leaves.append(piece.keys[:, 0].detach().requires_grad_())
            past = layer.segment(piece._replace(keys=self.leaves[-1][:, None]), step, wide)
            scores = masked_scores(query, past.key, past.mask, False, step.scaling)
            weights = torch.cat([scores, new_scores, *sinks], -1).softmax(-1)[..., : bank.used + step.new]
            parts.append(weights.to(value.dtype) @ torch.cat([past.value, value], 2))
            heard = weights[..., : bank.used].detach()
            if visible is not None:
                heard = heard * bank.of(visible)[..., -step.queries :].transpose(2, 3)
            self.received.append(heard.sum(2).mean(1))
        if len(parts) == 1:
            return parts[0]
        order = torch.cat([bank.lanes for bank in layer.resident.banks]).argsort()
        return torch.cat(parts)[order]


def masked_scores(query: Tensor, keys: Tensor, mask: Tensor | None, causal: bool, scaling: float) -> Tensor:
    """Return the scores of ``keys``, (lanes, heads, queries, entries) float32. Masked scores are the smallest finite
    number, so that the gradient of a query without visible entries is finite; its value has no meaning."""
    found, least = scores_of(query.float() @ keys.float().transpose(2, 3), scaling), torch.finfo(torch.float32).min
    if causal:
        mask = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).tril()
    if mask is None:
        return found
    if mask.dtype == torch.bool:
        return found.masked_fill(~mask, least)
    return (found + mask).masked_fill(mask == float("-inf"), least)


def real_tokens(ledger: Ledger, past: int) -> Tensor:
    """Return a mask of the tokens after ``past``, (rows, n) bool; False for padding."""
    if ledger.visible is None:
        return torch.ones((ledger.batch, ledger.length - past), dtype=torch.bool, device=ledger.device)
    return ledger.visible[:, past:].clone().to(ledger.device)


@torch.inference_mode(False)
@torch.enable_grad()
def _go_back(cache: Any, given: dict[str, Any], readers: Sequence[LookaheadPass]) -> None:
    """Read the tokens of ``given`` and set the readers' gradients: those of the loss by the keys of all layers'
    banks."""
    if given.get("input_ids") is None:
        raise UsageError("A loss is of token ids, and embeddings have none; 'kvslimmer-published' needs no loss.")
    inputs = {name: part.clone() if isinstance(part, Tensor) else part for name, part in given.items()}
    past = cache.ledger.length
    with frozen(cache.model), graph(cache.model, cache.meter):
        logits = cache.model(**inputs).logits
        leaves = [leaf for reader in readers for leaf in reader.leaves]
        found = iter(torch.autograd.grad(loss(logits, inputs["input_ids"], real_tokens(cache.ledger, past)), leaves))
    for reader in readers:
        reader.gradients = [next(found) for _ in reader.leaves]
        reader.leaves = []


@contextmanager
def graph(model: Any, meter: Meter) -> Iterator[None]:
    """Count each tensor of the graph as workspace during the block."""
    known, graph_bytes = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}, 0

    def kept(tensor: Tensor) -> Tensor:
        nonlocal graph_bytes
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            graph_bytes += storage.nbytes()
            meter.hold(storage.nbytes())
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
            yield
    finally:
        meter.hold(-graph_bytes)


def loss(logits: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """Return the loss of a chunk, (): the cross-entropy of each real token that follows a real token, as the mean over
    a row and the sum over rows. logits: (rows, n, vocabulary). ids, real: (rows, n). A chunk of a single token has no
    following token; its loss is that of the most probable token."""
    chances = logits.float().log_softmax(-1)
    if ids.shape[1] == 1:
        return -chances.amax(-1).sum()
    follows = real[:, :-1] & real[:, 1:]
    each = chances[:, :-1].gather(2, ids[:, 1:, None].long()).squeeze(2) * follows
    return -(each.sum(1) / follows.sum(1).clamp(min=1)).sum()


def check_gradients(model: Any, geometry: ModelGeometry, instead: str) -> None:
    """Raise UnsupportedModelError for packed weights. instead: the method that needs no gradients."""
    if any(isinstance(module, Packed) for module in model.modules()):
        raise UnsupportedModelError(
            f"'{geometry.model_type}' has packed weights, which have no gradients; load it with "
            f"weights float32, or use {instead}."
        )


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """Disable the gradients of all weights of ``model`` within the block."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for weight in weights:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)
