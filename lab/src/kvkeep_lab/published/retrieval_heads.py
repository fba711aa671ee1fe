"""How strongly each KV head retrieves: measured on synthetic passkeys, or read from a file.

DuoAttention (arXiv:2410.10819, section 2.3) finds its retrieval heads by optimising gates on texts with passkeys. Here
nothing is trained: a passkey of random tokens is planted in random tokens and repeated at the end. Each repeated token
pays attention to the token that followed it in the first occurrence. A KV head's score is this attention, the maximum
over its query heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvkeep.attention import Segment, attend
from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import decoder_of
from kvkeep.models.binding import bind
from kvkeep.models.forward import attending, probing
from kvkeep.step.scores import scores_of
from kvkeep.step.sinks import sinks_of
from kvkeep_lab.published.score_file import numbers

LENGTH, PASSKEY, SAMPLES = 512, 32, 4
"""Tokens of a sample, tokens of its passkey, and the number of samples that are averaged."""


def retrieval_scores(model: Any, geometry: ModelGeometry, path: str = "") -> Tensor:
    """Return scores (layers, kv_heads) in [0, 1], of full layers in order: from a text file of rows of numbers (as
    DuoAttention publishes them), or measured once for each model. Raises UsageError for a file that does not fit."""
    layers = geometry.full_layers
    shape = len(layers), layers[0].kv_heads
    if path:
        scores = numbers(path, 2).float()
        if tuple(scores.shape) != shape:
            raise UsageError(
                f"'{path}' has scores for {scores.shape[0]} layers of {scores.shape[1]} heads, but this model has "
                f"{shape[0]} layers of {shape[1]}; give a file for this model."
            )
        return scores
    known = getattr(model, "_kvkeep_retrieval_scores", None)
    if known is None:
        known = model._kvkeep_retrieval_scores = _measured(model, geometry)
    return known


@torch.no_grad()
def _measured(model: Any, geometry: ModelGeometry) -> Tensor:
    bind(model)
    generator = torch.Generator().manual_seed(0)
    length = min(LENGTH, geometry.max_positions or LENGTH)
    passkey = min(PASSKEY, length // 4)
    ids = torch.randint(0, geometry.vocab_size, (SAMPLES, length), generator=generator)
    places = torch.linspace(passkey, length - 3 * passkey, SAMPLES).long()
    for row, place in enumerate(places.tolist()):
        ids[row, -passkey:] = ids[row, place : place + passkey]
    recorder = _Recorder(geometry, places, passkey)
    with attending(recorder), probing(lambda *_: None):
        decoder_of(model)(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    return torch.stack([recorder.scores[layer.index] for layer in geometry.full_layers])


class _Recorder:
    """Computes the attention of full layers. Records the attention of the repeated passkey to its first occurrence."""

    def __init__(self, geometry: ModelGeometry, places: Tensor, passkey: int) -> None:
        self.full = {layer.index: layer.kv_heads for layer in geometry.full_layers}
        self.places, self.passkey = places, passkey
        self.scores: dict[int, Tensor] = {}

    def attends(self, layer_idx: int) -> bool:
        return layer_idx in self.full

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        segment = Segment(key, value, mask) if mask is not None else Segment(key, value, causal=True)
        output, lse = attend(query, [segment], scaling, sinks_of(module))
        # The query of passkey token i attends to token i + 1 of the first occurrence.
        rows = torch.arange(len(self.places))[:, None]
        targets = key[rows, :, self.places[:, None] + 1 + torch.arange(self.passkey - 1)].transpose(1, 2)
        asking = slice(-self.passkey, -1)
        targets = targets.repeat_interleave(query.shape[1] // key.shape[1], 1)
        found = scores_of((query[:, :, asking] * targets).sum(-1).float(), scaling)
        paid = (found - lse[:, :, asking]).exp().mean((0, 2))
        heads = self.full[module.layer_idx]
        self.scores[module.layer_idx] = paid.view(heads, -1).amax(1).cpu()
        return output
