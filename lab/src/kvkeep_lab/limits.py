"""The physical limit of a step: the bytes that it reads, divided by the rate of memory."""

from __future__ import annotations

import time
from typing import Any

import torch

from kvkeep.cache import KeepCache
from kvkeep.contracts.exactness import Exactness
from kvkeep.stock import memory_of

RATE_BYTES = 512 << 20
"""Bytes read to measure the rate; several times a processor's largest cache."""

_TRIES = 5


@torch.inference_mode()
def memory_rate(device: torch.device) -> float:
    """Return the maximum bytes per second that ``device`` reads from a written tensor, with the current number of
    threads."""
    tensor = torch.ones(RATE_BYTES // 4, device=device)
    ways = (lambda: tensor.dot(tensor), tensor.sum, tensor.amax)
    seconds = []
    for way in ways * _TRIES:
        start = time.perf_counter()
        way().item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return tensor.nbytes / min(seconds)


def weight_bytes(model: Any) -> int | None:
    """Return the bytes of parameters and buffers that a step reads, counting shared ones once. The input embedding is
    left out unless the head shares it, because a step reads one row of it. None for a mixture of experts, whose router
    decides."""
    if any("expert" in name.lower() for name, _ in model.named_modules()):
        return None
    parts = [*model.parameters(), *model.buffers()]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and embedding is not None:
        of_head = {_home(part) for part in (*head.parameters(), *head.buffers())}
        of_embedding = {_home(part) for part in (*embedding.parameters(), *embedding.buffers())} - of_head
        parts = [part for part in parts if _home(part) not in of_embedding]
    return sum({_home(part): part.nbytes for part in parts}.values())


def entry_bytes(cache: Any, tokens: int, rows: int) -> int:
    """Return the bytes of keys and values that attention reads in a step after ``tokens`` tokens in each row. An exact
    cache reads all tokens, including rebuilt ones; another cache reads at most the entries that it holds, in full or
    compressed."""
    memory = memory_of(cache)
    held_bytes = memory.resident_bytes + memory.compressed_bytes
    if not isinstance(cache, KeepCache):
        return held_bytes
    geometry = cache.geometry
    everything = rows * (tokens * geometry.full_bytes_per_token + geometry.fixed_bytes(tokens))
    return everything if cache.exactness is Exactness.EXACT else min(everything, held_bytes)


def step_limit_ms(weights: int | None, entries: int | None, rate: float | None) -> float | None:
    """Return the milliseconds to read ``weights`` and ``entries`` bytes at ``rate`` bytes per second; None if one of
    them is unknown."""
    if weights is None or entries is None or not rate:
        return None
    return 1e3 * (weights + entries) / rate


def _home(part: torch.Tensor) -> tuple[int, torch.device]:
    return part.data_ptr(), part.device
