"""What a saved turn costs: bytes of the folder, and seconds (the table of docs/sessions.md).

python tools/session_turns.py
"""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path

import torch

import kvkeep
from kvkeep.blocks.sessions import StoredSession

FIRST, TURN, TURNS = 2048, 64, 4
METHODS = (("full", {}), ("kv-direct", {"budget": 512}), ("h2o", {"budget": 512}), ("revive", {"budget": 512}))


def measure(model: torch.nn.Module, method: str, budget: dict[str, int], folder: str) -> None:
    """Save a prompt of random ids and some turns, and print each save."""
    cache, path = kvkeep.KeepCache(model, method, **budget), f"{folder}/{method}"
    ids = torch.randint(5, 40000, (1, FIRST + TURNS * TURN), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), StoredSession.at(path, writing=True) as stored:
        for low, high in itertools.pairwise([0, *range(FIRST, ids.shape[1] + 1, TURN)]):
            for start in range(low, high, 512):
                model(ids[:, start : min(start + 512, high)], cache=cache, logits_to_keep=1)
            began, before = time.perf_counter(), _size(path)
            kvkeep.save_session(stored, kvkeep.Session(cache, ids[:, :high].tolist()))
            spent, size = time.perf_counter() - began, _size(path)
            print(f"{method}, {high} tokens: {spent:.2f} s, {(size - before) / 1e6:+.1f} MB, {size / 1e6:.1f} MB")


def _size(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


if __name__ == "__main__":
    torch.set_num_threads(1)
    smollm2 = kvkeep.load("smollm2").model
    with tempfile.TemporaryDirectory() as home:
        for name, given in METHODS:
            measure(smollm2, name, given, home)
