"""Answers of an engine that is stepped by hand, and what each would be alone."""

from __future__ import annotations

import random
from typing import Any

from cases import CASES, taken
from conftest import tokenizer
from families import tiny
from helpers import prompt

import kvkeep
from kvkeep import KeepCache
from kvkeep.decode.cached_text import CachedText
from kvkeep.engine.answer import Ask
from kvkeep.engine.pieces import TextPiece
from kvkeep.engine.sampling import Sampling
from kvkeep.models.loading import Loaded
from kvkeep.serve.engine import Engine
from kvkeep.serve.session import Finished, Job

NEW = 8
ROUNDING = ("knorm", "miss", "kvreviver", "sketch")
"""What hangs on the last bit in float32, where products depend on rows: keys that are normed are alike in norm, a
threshold is passed or not, a cell is the median or not. tests/serve/test_batch.py has all methods, by their logits."""


def small(family: str = "llama", positions: int | None = None) -> Loaded:
    """A tiny model of a family, with its tokenizer."""
    model = tiny(family) if positions is None else tiny(family, positions=positions)
    return Loaded(model, tokenizer(), "tiny", "tiny")


class Client:
    """A client of an engine, which keeps the events that it receives."""

    def __init__(self, engine: Engine, ids: list[int], most: int = NEW, **options: Any) -> None:
        ask = {name: options.pop(name) for name in ("sampling", "stops", "top_logprobs") if name in options}
        self.events: list[Any] = []
        self.job: Job = engine.submit(Ask(ids, most, **ask), self.events.append, **options)

    @property
    def done(self) -> bool:
        return bool(self.events) and not isinstance(self.events[-1], TextPiece)

    @property
    def ended(self) -> Finished:
        assert isinstance(self.events[-1], Finished), self.events
        return self.events[-1]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextPiece))


def run(engine: Engine, steps: int = 1000) -> None:
    engine.stopping = True
    for _ in range(steps):
        if not engine.step():
            engine.stopping = False
            return
    raise AssertionError("it does not end")


def text(length: int, seed: int) -> list[int]:
    return prompt(1, length, seed)[0].tolist()


class Alone:
    """A conversation that has a cache to itself. text: of the last answer."""

    def __init__(self, loaded: Loaded, **cache: Any) -> None:
        self.text = ""
        self.loaded, self.past = loaded, CachedText(KeepCache(loaded.model, **cache))

    def answer(self, ids: list[int], new: int) -> list[int]:
        """The answer to all that was said."""
        self.past.align(ids)
        loaded, cache = self.loaded, self.past.cache
        result = kvkeep.generate(loaded.model, loaded.tokenizer, ids, cache, max_new_tokens=new)
        self.past.settle(result.sequence)
        self.text = result.text
        return result.tokens


def alone(family: str, ids: list[int], new: int = NEW, sampling: Sampling | None = None, **cache: Any) -> list[int]:
    """The tokens of one answer by ``generate``."""
    given: dict[str, Any] = {} if sampling is None else {"temperature": sampling.temperature, "seed": sampling.seed}
    own = KeepCache(tiny(family), **cache)
    return kvkeep.generate(tiny(family), tokenizer(), ids, own, max_new_tokens=new, **given).tokens


def mixed(family: str, dice: random.Random, count: int) -> list[tuple[str, list[int], int, dict[str, Any]]]:
    """So many cases of methods that a family takes: name, prompt, length of the answer, and cache."""
    names = [name for name in CASES if taken(name, family) and not any(part in name for part in ROUNDING)]
    names = dice.sample(names, min(count, len(names)))
    return [
        (name, text(CASES[name].length - number % 10, number), dice.randint(2, 8), kind(name))
        for number, name in enumerate(names)
    ]


def kind(name: str) -> dict[str, Any]:
    """The cache of a case."""
    case = CASES[name]
    own = {"method": case.spec, "budget": case.budget, **case.options}
    return own if case.chunk is None else {"chunk": case.chunk, **own}
