"""A client of an engine that is stepped by hand."""

from __future__ import annotations

from typing import Any

from helpers import prompt

from kvkeep.serve.answer import Ask, Piece
from kvkeep.serve.engine import Engine
from kvkeep.serve.job import Ended, Job

NEW = 8


class Client:
    """Asks, and keeps what it is told."""

    def __init__(self, engine: Engine, ids: list[int], most: int = NEW, **options: Any) -> None:
        ask = {name: options.pop(name) for name in ("sampling", "stops", "likeliest") if name in options}
        self.events: list[Any] = []
        self.job: Job = engine.submit(Ask(ids, most, **ask), self.events.append, **options)

    @property
    def ended(self) -> Ended:
        assert isinstance(self.events[-1], Ended), self.events
        return self.events[-1]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Piece))


def run(engine: Engine, steps: int = 1000) -> None:
    engine._stopping = True
    for _ in range(steps):
        if not engine.step():
            engine._stopping = False
            return
    raise AssertionError("it does not end")


def text(length: int, seed: int) -> list[int]:
    return prompt(1, length, seed)[0].tolist()
