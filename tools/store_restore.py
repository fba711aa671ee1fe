"""What it takes to restore a conversation from the store, and to compare entries on disk (docs/cache.md).

python tools/store_restore.py [MODEL] [TOKENS]

Reads a text, saves it, and restores it five times with each method; prints the least seconds of each, and of a step.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import kvkeep
from kvkeep import KeepCache, Session, load_session, save_session

METHODS: tuple[tuple[str, int | None], ...] = (("full", None), ("kv-direct", 256))
TIMES = 5


def least(work: Callable[[], Any]) -> float:
    """Return the least seconds of some runs."""
    seconds = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


@torch.no_grad()
def main(name: str = "smollm2", tokens: str = "8000") -> None:
    """Print a line for each method."""
    model = kvkeep.load(name).model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, int(tokens)), generator=generator)
    for method, budget in METHODS:
        cache = KeepCache(model, method, budget)
        model(ids, cache=cache, use_cache=True, logits_to_keep=1)
        compare = least(cache.stream.check_disk)
        with tempfile.TemporaryDirectory() as folder:
            save_session(folder, Session(cache, ids.tolist()))
            restore = least(lambda folder=folder: load_session(folder, model))  # type: ignore[misc]
        step = least(lambda cache=cache: model(ids[:, :1], cache=cache, use_cache=True))  # type: ignore[misc]
        print(f"{method}: {tokens} tokens restored in {restore:.3f} s, compared in {compare:.3f} s; step {step:.3f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
