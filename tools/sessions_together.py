"""Tokens a second of sessions that decode together and one by one (docs/serving.md, Speed).

python tools/sessions_together.py [ROUNDS]

One thread, processor time, the least of interleaved rounds: figures that other work on the machine changes little.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import kvkeep
from kvkeep.engine.batch import Read, forward
from kvkeep.models.fused import FusedLayer, FusedLayers
from kvkeep.step import native

METHODS: tuple[tuple[str, int | None], ...] = (("kv-direct", 512), ("full", None), ("h2o", 512))
COUNTS = (1, 4, 8, 16)
FIRST, LAST = 500, 2000
"""Tokens that the sessions have read: evenly between these."""


def sessions(model: nn.Module, method: str, budget: int | None, count: int) -> list[kvkeep.KeepCache]:
    """Return caches that have read more and more of one text of random ids."""
    ids = torch.randint(5, 40000, (LAST,), generator=torch.Generator().manual_seed(0)).tolist()
    cache, caches = kvkeep.KeepCache(model, method, budget), []
    for number in range(count):
        stop = FIRST + (LAST - FIRST) * number // (count - 1)
        while (start := cache.get_seq_length()) < stop:
            forward(model, [Read(cache, ids[start : min(start + 256, stop)], 0)])
        caches.append(cache.fork())
    return caches


def step(model: nn.Module, caches: list[kvkeep.KeepCache]) -> float:
    """Read a token of each session in one pass; return the seconds."""
    began = time.process_time()
    for one in forward(model, [Read(cache, [1000]) for cache in caches]):
        if isinstance(one, Exception):
            raise one
    return time.process_time() - began


def divided(model: nn.Module, caches: list[kvkeep.KeepCache], rounds: int) -> str:
    """Return the milliseconds of the quickest step by what they went to: products (with norms and rotations) and
    attention are calls of the kernels, the rest is Python. Layer by layer, to tell them apart: a step that goes
    through all layers in one call has less of the rest."""
    spent: dict[str, float] = {}

    def timed(part: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return own(*given, **named)
            finally:
                spent[part] = spent.get(part, 0.0) + time.process_time() - began

        return run

    calls = (
        (FusedLayer, "_enter", "products"),
        (FusedLayer, "_leave", "products"),
        (native, "run", "attention"),
    )
    steps = []
    with ExitStack() as stack:
        stack.enter_context(patch.object(FusedLayers, "can_run", lambda *_: False))
        for owner, name, part in (*calls, (type(model.lm_head), "forward", "products")):
            stack.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        for _ in range(rounds):
            spent.clear()
            whole = step(model, caches)
            steps.append((whole, {**spent, "rest": whole - sum(spent.values())}))
    whole, parts = min(steps, key=lambda one: one[0])
    return f"{whole * 1e3:.1f} ms: " + ", ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in parts.items())


def measure(model: nn.Module, method: str, budget: int | None, rounds: int) -> None:
    """Print the tokens a second of each number of sessions, the least seconds of interleaved rounds."""
    caches = sessions(model, method, budget, max(COUNTS))
    chosen = {count: caches[max(COUNTS) // count // 2 :: max(COUNTS) // count] for count in COUNTS}
    alone = dict.fromkeys(range(max(COUNTS)), float("inf"))
    together = dict.fromkeys(COUNTS, float("inf"))
    for _ in range(rounds):
        for number, cache in enumerate(caches):
            alone[number] = min(alone[number], step(model, [cache]))
        for count in COUNTS:
            together[count] = min(together[count], step(model, chosen[count]))
    for count in COUNTS:
        one_by_one = sum(alone[caches.index(cache)] for cache in chosen[count])
        print(
            f"{method}, {count} sessions: one by one {count / one_by_one:.0f} tok/s, together "
            f"{count / together[count]:.0f} tok/s ({together[count] * 1e3:.1f} ms),"
            f" {one_by_one / together[count]:.2f} x",
            flush=True,
        )
    for count in (1, 8):
        print(f"{method}, a step of {count}: {divided(model, chosen[count], 2 * rounds)}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    smollm2 = kvkeep.load("smollm2").model
    for name, entries in METHODS:
        measure(smollm2, name, entries, int(sys.argv[1]) if sys.argv[1:] else 20)
