"""A text that the model reads once, for several caches: each takes over what attention received in every layer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvkeep.attention import Segment, attend
from kvkeep.attention.inputs import AttentionInputs
from kvkeep.cache import KeepCache
from kvkeep.contracts.store import EvictedStore
from kvkeep.errors import UnsupportedModelError
from kvkeep.models.binding import bind
from kvkeep.models.forward import attending, probing
from kvkeep.step import native
from kvkeep.stores.layer import Layer, ReadEvicted
from kvkeep.stores.readers.backed import attended_exactly

_QUERIES = 512
"""Queries that attend at a time without the native library."""


@dataclass(frozen=True, slots=True)
class LayerPass:
    """The attention of one layer over a complete text. Queries and keys include norms and rotation."""

    module: Any
    """The layer's attention module."""
    scaling: float
    query: Tensor
    """(1, heads, tokens, key_dim)."""
    key: Tensor
    """(1, kv_heads, tokens, key_dim)."""
    value: Tensor
    """(1, kv_heads, tokens, value_dim)."""
    lse: Tensor
    """The log-sum-exp of each query's scores, (1, heads, tokens) float32."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Its tensors, with the tokens in the third dimension."""
        return self.query, self.key, self.value, self.lse

    def first(self, tokens: int) -> LayerPass:
        """Return the pass over the first ``tokens`` tokens, without a copy."""
        return LayerPass(self.module, self.scaling, *(part[:, :, :tokens] for part in self.parts))


@dataclass(frozen=True)
class SharedPass:
    """One pass over a text."""

    layers: list[LayerPass]
    logits: Tensor
    """Logits of the token after the text, (vocabulary,) float32."""
    seconds: float
    """Seconds of the pass, with their share of the pass that it continues."""

    @property
    def tokens(self) -> int:
        """Tokens of the text."""
        return self.layers[0].key.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(part.nbytes for layer in self.layers for part in layer.parts)

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, ids: Tensor, begun: SharedPass | None = None, common: int = 0) -> SharedPass:
        """Read ``ids`` (1, tokens) by a ``model`` whose caches can take over a pass (:func:`takes_over`). The first
        ``common`` tokens are not read again: ``begun`` is a pass over a text that begins with them."""
        start = time.perf_counter()
        recorder = _Recorder([] if begun is None or not common else [layer.first(common) for layer in begun.layers])
        positions = torch.arange(common, ids.shape[1], device=ids.device)[None]
        bind(model)
        with attending(recorder), probing(lambda *_: None):
            logits = model(ids[:, common:], position_ids=positions, use_cache=False, logits_to_keep=1).logits
        share = 0.0 if begun is None else begun.seconds * common / begun.tokens
        return cls(recorder.layers, logits[0, -1].float().cpu(), share + time.perf_counter() - start)

    @torch.no_grad()
    def hand_over(self, ids: Tensor, cache: KeepCache) -> None:
        """Let the empty ``cache`` take over the pass over ``ids`` as if it had made it. Raises UsageError if there are
        more than the model's positions."""
        cache.stream.admit(ids.shape[1])
        hooks = cache.hooks
        hooks.begin_forward(ids, None, None, None)
        with _known_attention(cache, self.layers):
            for index, layer in enumerate(self.layers):
                keys, values = cache.update(layer.key, layer.value, index)
                if cache.stream.streamed(index):
                    hooks.attend(layer.module, layer.query, keys, values, None, layer.scaling)
        hooks.end_forward(completed=True)


def takes_over(cache: object, tokens: int) -> bool:
    """Return whether an empty cache can take over a pass over ``tokens`` tokens: it evicts nothing before its end,
    so that the pass is that of any other cache, and needs nothing of it but what attention receives."""
    if not isinstance(cache, KeepCache):
        return False
    stream, geometry = cache.stream, cache.geometry
    if stream.pass_hooks or stream.draft_passes is not None or stream.wants_residuals:
        return False
    if len(geometry.full_layers) < len(geometry.layers) or geometry.recurrent_layers or not geometry.steady(tokens):
        return False
    try:
        if bind(cache.model).latent:
            return False
    except UnsupportedModelError:  # transformers attends
        return False
    if stream.streams and any(type(layer.reader) is not ReadEvicted for layer in stream.bounded):
        return False
    first = cache.reading and cache.entries is not None and cache.entries >= tokens  # of two readings
    return first or stream.method.oneshot or stream.method.selector.keeps_all


class _Recorder:
    """Attends in a pass without a cache, and records each layer. before: the layers of the tokens before the pass."""

    def __init__(self, before: Sequence[LayerPass]) -> None:
        self.before, self.layers = before, list[LayerPass]()

    def attends(self, layer_idx: int) -> bool:
        return True

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        assert mask is None and cast("int", module.layer_idx) == len(self.layers)
        step = AttentionInputs.of(module, query, key, value, None, scaling, key.shape[1], True, True)
        before = self.before[len(self.layers)] if self.before else None
        output, lse = _attended(step, before)
        parts: Iterable[Tensor] = (query, key, value, lse.reshape(query.shape[:3]))
        if before is not None:
            parts = (torch.cat(pair, 2) for pair in zip(before.parts, parts, strict=True))
        self.layers.append(LayerPass(module, scaling, *parts))
        return step.unfolded(output)


def _attended(step: AttentionInputs, before: LayerPass | None) -> tuple[Tensor, Tensor]:
    """Return attention of new tokens over those ``before`` and themselves, and the log-sum-exp of its scores."""
    past = [] if before is None else [Segment(before.key.transpose(0, 1), before.value.transpose(0, 1))]
    if native.can_attend(step.query, step.key, step.value):
        return attend(step.query, [*past, step.arriving()], step.scaling, step.sinks)
    found = []  # without the kernel, scores take memory
    for start in range(0, step.new, _QUERIES):
        query, key, value = (part[:, :, start : start + _QUERIES] for part in (step.query, step.key, step.value))
        earlier = Segment(step.key[:, :, :start], step.value[:, :, :start])
        found.append(attend(query, [*past, earlier, Segment(key, value, causal=True)], step.scaling, step.sinks))
    outputs, sums = zip(*found, strict=True)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


class _KnownAttention(ReadEvicted):
    """Lets the selector and the store learn a pass whose attention is known. lse: (1, heads, tokens)."""

    def __init__(self, lse: Tensor) -> None:
        self.lse = lse

    def attend(self, layer: Layer, step: AttentionInputs) -> Tensor:
        lse, output = self.lse.view(step.query.shape[:3]), torch.empty(*step.query.shape[:3], step.value.shape[3])
        if type(layer.evicted).attended is not EvictedStore.attended:  # the store reads it
            output = attend(step.query, [step.arriving()], step.scaling, step.sinks, layer.origin)[0]
        attended_exactly(layer, step, output, lse)
        layer.finish()
        return output


@contextmanager
def _known_attention(cache: KeepCache, layers: Sequence[LayerPass]) -> Iterator[None]:
    """Within the block, each streamed layer of the cache learns what ``layers`` recorded."""
    bounded = cache.stream.bounded if cache.stream.streams else []
    before = [layer.reader for layer in bounded]
    for layer, its in zip(bounded, layers, strict=bool(bounded)):
        layer.reader = _KnownAttention(its.lse)
    try:
        yield
    finally:
        for layer, reader in zip(bounded, before, strict=True):
            layer.reader = reader
