"""A text that the model reads once, for several caches: each takes over what attention received in every layer."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import KeepCache
from kvkeep.models.binding import bind
from kvkeep_lab.attention_inputs import Attended, watching


@dataclass(frozen=True)
class SharedPass:
    """One pass over a text."""

    attended: list[Attended]
    """What attention received, layer by layer, without its output."""
    logits: Tensor
    """Logits of the token after the text, (vocabulary,) float32."""
    seconds: float
    """Seconds of the pass, and of the pass that it continues."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(part.nbytes for one in self.attended for part in (one.query, one.key, one.value))

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, ids: Tensor, begun: SharedPass | None = None, common: int = 0) -> SharedPass:
        """Read ``ids`` (1, tokens) by a ``model`` whose caches can take over a pass (:func:`takes_over`). The first
        ``common`` tokens are not read again: ``begun`` is a pass over a text that begins with them."""
        start, attended = time.perf_counter(), list[Attended]()
        before = [] if begun is None else [one.first(common) for one in begun.attended]
        positions = torch.arange(common, ids.shape[1], device=ids.device)[None]
        bind(model)
        with watching(lambda one: attended.append(replace(one, output=one.output[:, :, :0].clone())), before):  # unused
            logits = model(ids[:, common:], position_ids=positions, use_cache=False, logits_to_keep=1).logits
        earlier = 0.0 if begun is None else begun.seconds
        return cls(attended, logits[0, -1].float().cpu(), earlier + time.perf_counter() - start)

    @torch.no_grad()
    def hand_over(self, ids: Tensor, cache: KeepCache) -> None:
        """Let the empty ``cache`` take over the pass over ``ids`` as if it had made it, with its own attention."""
        hooks = cache.hooks
        hooks.begin_forward(ids, None, None, None)
        for one in self.attended:
            keys, values = cache.update(one.key, one.value, one.layer)
            if cache.stream.attends(one.layer):
                hooks.attend(one.module, one.query, keys, values, None, one.scaling)
        hooks.end_forward(completed=True)


def takes_over(cache: object, tokens: int) -> bool:
    """Return whether an empty cache can take over a pass over ``tokens`` tokens: it evicts nothing before its end,
    so that the pass is that of any other cache, and needs nothing of it but what attention receives."""
    if not isinstance(cache, KeepCache):
        return False
    stream, geometry = cache.stream, cache.geometry
    if stream.pass_hooks or stream.round is not None or stream.wants_residuals:
        return False
    if len(geometry.full_layers) < len(geometry.layers):
        return False
    first = cache.reading and cache.entries is not None and cache.entries >= tokens  # of two readings
    return first or stream.method.oneshot or stream.method.selector.keeps_all
