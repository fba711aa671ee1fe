"""Two caches on a pretended GPU that read the same, one of them by graphs, and what may come between two tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache as memoised
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import LENGTH
from families import tiny
from helpers import prompt
from pretended_gpu import GPU, on_gpu
from pretended_graphs import CapturedGraph
from torch import Tensor

from kvkeep import KeepCache, Session, load_session, save_session
from kvkeep.engine.answer import forward_one
from kvkeep.engine.batch import Read
from kvkeep.transfer import last_token_state

BEFORE = 4
"""How many tokens are read without a graph, at most: the first, and those that are compared."""


@memoised
def model_of(family: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    return on_gpu(copy.deepcopy(tiny(family)).to(dtype))


class Twins:
    """Two caches that read the same: one by graphs where it can, one without."""

    def __init__(self, method: str, budget: int | None = 16, model: Any = None, **options: Any) -> None:
        self.model = model_of() if model is None else model
        self.with_graphs, self.without = (KeepCache(self.model, method, budget, **options) for _ in range(2))
        self.tokens = iter(prompt(1, 10_000, 3)[0].tolist())

    @property
    def both(self) -> tuple[KeepCache, KeepCache]:
        return self.with_graphs, self.without

    def next(self, count: int = 1) -> list[int]:
        return [next(self.tokens) for _ in range(count)]

    @torch.no_grad()
    def read(self, ids: list[int]) -> None:
        """Read a part of a text at once, and compare."""
        ours = forward_one(self.model, Read(self.with_graphs, ids))
        theirs = self.model(torch.tensor([ids]).to(GPU), cache=self.without, logits_to_keep=1).logits[0]
        if isinstance(ours, Exception):
            raise ours
        assert torch.equal(ours.cpu(), theirs.cpu())

    def step(self, count: int = 1) -> None:
        """Read tokens one by one, and compare what the caches hold."""
        for _ in range(count):
            self.read(self.next())
        ours, theirs = ([part.cpu() for part in parts_of(one)] for one in self.both)
        assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
        assert self.with_graphs.get_seq_length() == self.without.get_seq_length()

    def each(self, change: Callable[[KeepCache], object]) -> None:
        for one in self.both:
            change(one)

    def interrupt(self, when: str = "after") -> None:
        """Read a token by a graph, with an interrupt before or after the replay."""
        replay = CapturedGraph.replay

        def interrupted(graph: CapturedGraph) -> None:
            if when == "after":
                replay(graph)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(CapturedGraph, "replay", interrupted)
            with pytest.raises(KeyboardInterrupt):
                forward_one(self.model, Read(self.with_graphs, [5]))

    @property
    def captured(self) -> bool:
        return self.with_graphs.graph.captured


def parts_of(cache: KeepCache) -> list[Tensor]:
    """Return what a cache holds."""
    banks = [bank for layer in cache.stream.bounded if hasattr(layer, "resident") for bank in layer.resident.banks]
    held = [*last_token_state(cache).values()]  # windows and recurrent states
    return [part for bank in banks for part in bank.tensors()] + held + cache.entry_states()


def full(method: str = "h2o", budget: int = 16, **options: Any) -> Twins:
    """Return caches whose budget is full, with a graph."""
    twins = Twins(method, budget, **options)
    twins.read(twins.next(LENGTH))
    twins.step(BEFORE + 1)
    assert twins.captured
    return twins


# -- what comes between two tokens ------------------------------------------------------------------------


def saved(twins: Twins, folder: Path) -> None:
    for name, one in zip(("with", "without"), twins.both, strict=True):
        length = one.get_seq_length()
        save_session(folder / name, Session(one, [[5] * length]))
    twins.with_graphs, twins.without = (load_session(folder / name, twins.model).cache for name in ("with", "without"))


def forked(twins: Twins, folder: Path) -> None:
    """The first cache goes on, too."""
    first, twins.with_graphs = twins.with_graphs, twins.with_graphs.fork()
    for token in 7, 8:
        assert isinstance(forward_one(twins.model, Read(first, [token])), Tensor)


BETWEEN: dict[str, Callable[[Twins, Path], object]] = {
    "a prompt": lambda twins, folder: twins.read(twins.next(20)),
    "two tokens": lambda twins, folder: twins.read(twins.next(2)),
    "a crop": lambda twins, folder: twins.each(lambda cache: cache.crop(-3)),
    "a crop of all": lambda twins, folder: twins.each(lambda cache: cache.crop(-cache.get_seq_length())),
    "another row": lambda twins, folder: twins.each(lambda cache: cache.reorder_cache(torch.tensor([0], device=GPU))),
    "reset": lambda twins, folder: (twins.each(KeepCache.reset), twins.read(twins.next(30))),
    "a fork": forked,
    "a saved session": saved,
    "a pass of the model": lambda twins, folder: twins.each(
        lambda cache: twins.model(torch.tensor([[9]]).to(GPU), cache=cache)
    ),
}
