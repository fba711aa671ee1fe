"""Decoding with a store and without one, side by side in one process (docs/bench.md, Decoding with a store).

python tools/store_pace.py RECORDS SECONDS METHOD [BUDGET] [--together]

Every engine continues the same conversation: each turn adds some tokens and generates others, so all engines compute
the same. The engines take their steps in turn, in a changing order, so that what else the machine does meets all of
them. Two of them have no store; their ratio shows the noise. RECORDS: a file of JSON with the seconds of each turn, to
which this run is added.

``--together``: each engine takes a whole turn of four conversations, whose answers end one after another, so that texts
are stored while others are being generated.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import kvkeep
from kvkeep.blocks.store import Store
from kvkeep.engine.answer import Ask
from kvkeep.engine.pieces import TextPiece
from kvkeep.serve.engine import Engine

BEGIN, ADDED, WRITTEN = 1024, 8, 64
"""Tokens of the first prompt, of each further message, and of each answer."""
PLAIN, CONTROL = "no store", "no store again"
WORDS = range(5, 40_000)
"""The token ids that prompts consist of."""
MEMORY = 500 * 10**6
Seconds = dict[str, dict[str, Any]]


class Arm:
    """An engine, and the conversations that it continues. named: whether clients name them. parked: whether they leave
    memory before each turn, and so are taken from the store."""

    def __init__(self, loaded: Any, options: dict[str, Any], folder: str | None, named: bool, parked: bool) -> None:
        self.engine = Engine(loaded, MEMORY, store=None if folder is None else Store(folder), **options)
        self.engine.ends = []
        self.named, self.parked = named, parked
        self.ends: list[Any] = []

    def begin(self, prompts: Sequence[Sequence[int]], written: Sequence[int]) -> None:
        """Request answers to all prompts."""
        if self.parked:
            for one in self.engine.sessions.idle():
                self.engine.sessions.park(one)
        self.ends = []
        for number, (prompt, tokens) in enumerate(zip(prompts, written, strict=True)):
            name = ("local", f"talk{number}") if self.named else None
            self.engine.submit(Ask(prompt, tokens), self._hear, name=name)

    def _hear(self, event: Any) -> None:
        if not isinstance(event, TextPiece):
            self.ends.append(event)

    def run(self, done: Callable[[], bool]) -> float:
        """Take steps until ``done``; return the seconds."""
        began = time.perf_counter()
        while not done():
            self.engine.step()
        return time.perf_counter() - began

    @property
    def writing(self) -> bool:
        """Whether a token of the only answer is there."""
        return bool(self.engine.running) and self.engine.running[0].writes

    @property
    def stored(self) -> bool:
        """Whether nothing is left to be stored."""
        return not (self.engine.sessions.storing or self.engine.sessions.storage.busy)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval, by ranks."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low, high = int(len(ordered) / 2 - half), math.ceil(len(ordered) / 2 + half)
    return median(ordered), ordered[max(0, low)], ordered[min(len(ordered) - 1, high)]


def turn(arms: Mapping[str, Arm], order: list[str], texts: list[list[int]], draw: random.Random) -> Seconds:
    """Take a turn of one conversation in all arms, step by step; return the seconds by arm."""
    found: Seconds = {}
    for name in order:
        arm = arms[name]
        began = time.perf_counter()
        arm.begin(texts, [WRITTEN])
        arm.run(lambda arm=arm: arm.writing)  # type: ignore[misc]
        found[name] = {"first_s": time.perf_counter() - began, "steps_s": []}
    for _ in range(WRITTEN - 2):  # the first token came with the prompt, and the last one ends the turn
        draw.shuffle(order)
        for name in order:
            began = time.perf_counter()
            arms[name].engine.step()
            found[name]["steps_s"].append(time.perf_counter() - began)
    for name in order:
        arm = arms[name]
        found[name]["end_s"] = arm.run(lambda arm=arm: bool(arm.ends))  # type: ignore[misc]
        found[name]["stored_s"] = arm.run(lambda arm=arm: arm.stored)  # type: ignore[misc]
    return found


def whole_turn(arms: Mapping[str, Arm], order: list[str], texts: list[list[int]]) -> Seconds:
    """Take a turn of all conversations at once in one arm after another; return the seconds by arm."""
    found: Seconds = {}
    for name in order:
        arm = arms[name]
        arm.begin(texts, [WRITTEN - 16 * number for number in range(len(texts))])
        seconds = arm.run(lambda arm=arm: len(arm.ends) == len(texts))  # type: ignore[misc]
        found[name] = {"turn_s": seconds, "stored_s": arm.run(lambda arm=arm: arm.stored)}  # type: ignore[misc]
    return found


def measure(loaded: Any, options: dict[str, Any], limit_s: float, together: bool, home: str) -> dict[str, list[Any]]:
    """Take turns for ``limit_s`` seconds, two at least; return the seconds of each but the first by arm."""
    kinds = {
        PLAIN: (None, False, False),
        CONTROL: (None, False, False),
        "store": (f"{home}/unnamed", False, False),
        "store, named": (f"{home}/named", True, False),
        "store, restored": (f"{home}/restored", False, True),
    }
    arms = {name: Arm(loaded, options, *kind) for name, kind in kinds.items()}
    draw = random.Random(0)
    texts = [draw.choices(WORDS, k=BEGIN) for _ in range(4 if together else 1)]
    found: dict[str, list[Any]] = {name: [] for name in arms}
    end = time.perf_counter() + limit_s
    for number in itertools.count():
        if number > 1 and time.perf_counter() > end:
            break
        texts = [[*text, *draw.choices(WORDS, k=ADDED)] for text in texts]
        order = [*arms]
        draw.shuffle(order)
        seconds = whole_turn(arms, order, texts) if together else turn(arms, order, texts, draw)
        if number:  # the first turn reads the whole text
            for name, one in seconds.items():
                found[name].append(one)
        answers = [sorted(end.tokens for end in arm.ends) for arm in arms.values()]
        assert all(one == answers[0] for one in answers)
        texts = [[*text, *end.tokens] for text, end in zip(texts, by_length(arms[PLAIN].ends), strict=True)]
    for arm in arms.values():
        arm.engine.close()
    return found


def by_length(ends: list[Any]) -> list[Any]:
    """Return the ends of answers in the order of their conversations."""
    return sorted(ends, key=lambda end: -end.written)


def table(found: dict[str, list[Any]]) -> str:
    """Return medians of all turns, and of their ratios to the same turn without a store."""
    together = "turn_s" in found[PLAIN][0]
    lines = ["| | ms | ÷ no store | " + ("" if together else "first token, ms | end, ms | ") + "then stored, ms |"]
    lines.append("| --- |" + " ---: |" * (3 if together else 5))
    for name, turns in found.items():
        if together:
            ratios = [one["turn_s"] / plain["turn_s"] for one, plain in zip(turns, found[PLAIN], strict=True)]
            milliseconds = [1e3 * one["turn_s"] for one in turns]
        else:
            pairs = zip(turns, found[PLAIN], strict=True)
            ratios = [median(a / b for a, b in zip(*(one["steps_s"] for one in pair), strict=True)) for pair in pairs]
            milliseconds = [1e3 * second for one in turns for second in one["steps_s"]]
        middle, low, high = interval(ratios)
        cells = [f"{median(milliseconds):.2f}", f"{middle:.3f} [{low:.3f}, {high:.3f}]"]
        for part in ("first_s", "end_s", "stored_s")[2 * together :]:
            cells.append(f"{1e3 * median(one[part] for one in turns):.0f}")
        lines.append(f"| {name}, {len(turns)} turns | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and add the run to the records."""
    given = [word for word in sys.argv[1:] if word != "--together"]
    together, place, limit_s, method = "--together" in sys.argv, Path(given[0]), float(given[1]), given[2]
    options: dict[str, Any] = {"method": method} | ({"budget": int(given[3])} if given[3:] else {})
    with tempfile.TemporaryDirectory() as home:
        found = measure(kvkeep.load("smollm2"), options, limit_s, together, home)
    records = json.loads(place.read_text()) if place.exists() else {}
    run = records.setdefault(f"{method}{', together' if together else ''}", {name: [] for name in found})
    for name, turns in found.items():
        run[name] += turns
    place.write_text(json.dumps(records) + "\n")
    print(f"{torch.get_num_threads()} threads, {method}\n{table(run)}")


if __name__ == "__main__":
    main()
