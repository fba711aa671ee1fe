"""Sliding windows beyond their length, where the KV-Direct paper's recompute breaks (section 5.4); ours must not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvkeep.cache import KeepCache
from kvkeep.errors import UsageError
from kvkeep.geometry import CheckpointKind, ModelGeometry
from kvkeep.models.adapter import layers_of
from kvkeep.models.binding import bind
from kvkeep_lab.generation import greedy
from kvkeep_lab.patching import replacing
from kvkeep_lab.reconstruction import Difference, difference, observed


@dataclass(frozen=True)
class Windows:
    """After a text longer than the window.

    held: the keys and values that transformers' own windowed cache holds, against those rebuilt at the absolute
    positions (the paper's Eq. 16 expects keys to differ here). matching: kv-direct's greedy tokens equal to the stock
    cache's, by checkpoint kind. The paper's recompute runs sliding layers without their window:
    blind: what that does to the same keys and values, and blind_logits to the last logits; blind_matching: its greedy
    tokens equal to the stock cache's, each after the stock cache's own.
    """

    text_tokens: int
    window: int
    held: Difference
    matching: dict[str, int]
    blind: Difference
    blind_logits: float
    blind_matching: int
    of: int

    @property
    def holds(self) -> bool:
        """Not a bit differs in what the window holds, and all tokens are the same."""
        return self.held.none and all(matching == self.of for matching in self.matching.values())


def text_length(geometry: ModelGeometry, new: int = 0) -> int:
    """Return how long a text the check takes: past the widest window, twice its length if that is no more than 512
    beyond; 0 where the model has no sliding layers, or too few positions to get past them."""
    windows = [layer.window for layer in geometry.sliding_layers if layer.window is not None]
    if not windows:
        return 0
    length = min(2 * max(windows), max(windows) + 512) + 64
    if geometry.max_positions is not None:
        length = min(length, geometry.max_positions - new)
    return length if length > max(windows) else 0


@torch.no_grad()
def beyond_the_window(
    model: Any, ids: Tensor, *, new: int = 12, kinds: Sequence[CheckpointKind] = ("residual", "tokens")
) -> Windows:
    """Compare the stock cache, kv-direct, and the paper's recompute after the first tokens of ``ids``."""
    adapter = bind(model)
    geometry = ModelGeometry.from_config(model.config)
    window = max(layer.window or 0 for layer in geometry.sliding_layers)
    ids = ids[:, : text_length(geometry, new)].to(next(model.parameters()).device)
    if ids.shape[1] <= window:
        raise UsageError(f"A text of {ids.shape[1]} tokens does not reach beyond a window of {window}.")

    entering, cache, _ = observed(adapter.decoder, ids, DynamicCache(config=model.config))
    with ExitStack() as stack:  # a layer without a mask is causal
        for layer in layers_of(adapter.decoder):
            stack.enter_context(replacing(layer, attention_mask=None))
        _, unbound, _ = observed(adapter.decoder, ids, DynamicCache())
    positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    held, blind = Difference(), Difference()
    for sliding in geometry.sliding_layers:
        index = sliding.index
        kept = (cache.layers[index].keys, cache.layers[index].values)
        rebuilt = adapter.project(index, entering[index], positions)
        held |= difference(_last(rebuilt, kept), kept)
        blind |= difference(_last((unbound.layers[index].keys, unbound.layers[index].values), kept), kept)

    expected, _ = greedy(model, ids, new, past_key_values=DynamicCache(config=model.config))
    matching: dict[str, int] = {}
    for kind in kinds:
        direct = KeepCache(model, "kv-direct", max(16, window // 4), checkpoint=kind, where="host")
        got, _ = greedy(model, ids, new, past_key_values=direct)
        matching[kind] = sum(a == b for a, b in zip(got, expected, strict=True))

    sequence = torch.cat([ids, torch.tensor([expected[:-1]], dtype=ids.dtype, device=ids.device)], dim=1)
    honest = model(sequence, use_cache=False, logits_to_keep=new).logits[0]
    with ExitStack() as stack:
        for layer in layers_of(adapter.decoder):
            stack.enter_context(replacing(layer, attention_mask=None))
        wrong = model(sequence, use_cache=False, logits_to_keep=new).logits[0]
    return Windows(
        ids.shape[1],
        window,
        held,
        matching,
        blind,
        float((wrong.double() - honest.double()).abs().max()),
        int((wrong.argmax(-1).cpu() == torch.tensor(expected)).sum()),
        new,
    )


def _last(entries: tuple[Tensor, Tensor], kept: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cut whole keys and values to as many of the newest as a window kept."""
    count = kept[0].shape[-2]
    return entries[0][..., -count:, :], entries[1][..., -count:, :]
