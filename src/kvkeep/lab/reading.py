"""Reading a text into a cache and then going on one token at a time, as decoding does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import STOCK, new_cache
from kvkeep.lab.peers import Reader, peer_of
from kvkeep.policies.methods import resolve


def takes(method: str) -> tuple[str, ...]:
    """Return the options that a method or a peer takes; raises UsageError for a name nobody knows."""
    if method == STOCK:
        return ()
    peer = peer_of(method)
    return resolve(method).options if peer is None else peer.takes


def cache_for(model: Any, method: str, budget: str | None, context: int, chunk: int | None = None) -> Any:
    """Return a cache of ``method`` for ``context`` tokens, read and written, or what a peer reads with; ``chunk`` goes
    to those that take one."""
    if (peer := peer_of(method)) is not None:
        return peer.open(model, budget, context)
    options: dict[str, Any] = {"budget": budget, "context": context}
    if chunk is not None and "chunk" in takes(method):
        options["chunk"] = chunk
    return new_cache(model, method, **options)


@torch.no_grad()
def read(
    model: Any, ids: Tensor, cache: Any, new: int, forced: Sequence[int] | None = None
) -> Iterator[tuple[Tensor, float]]:
    """Yield logits (vocabulary,) in float32 and seconds for each of ``new`` positions after ``ids`` (1, tokens): the
    first pays for the prompt. What is given next is ``forced``, or else the token with the largest logit."""
    given = ids
    for position in range(new):
        logits, seconds = cache.step(given) if isinstance(cache, Reader) else _step(model, given, cache)
        yield logits, seconds
        given = ids.new_tensor([[int(logits.argmax()) if forced is None else forced[position]]])


def _step(model: Any, ids: Tensor, cache: Any) -> tuple[Tensor, float]:
    start = time.perf_counter()
    output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits = output.logits[0, -1].float().cpu()  # waits for the device
    return logits, time.perf_counter() - start
