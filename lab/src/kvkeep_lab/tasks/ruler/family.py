"""What a family of RULER's is: how one question is made, and from what."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ESSAYS = "haystack"
"""What stands for the essays among the files that families read."""


@dataclass(frozen=True)
class Asked:
    """One question. text: what the user says. lead: how the answer is begun for the model. answers: what has to stand
    in the answer. right: the right answer as it would go on after ``lead``, without the space before it."""

    text: str
    lead: str
    answers: list[str]
    right: str


@dataclass(frozen=True)
class Family:
    """One of RULER's tasks.

    ask: makes a question of what was loaded, draws, a size (in the family's own units: words, lines, documents), and
    the length wanted in tokens, which sets how hard it is. The same draws make the same question. new: tokens that
    RULER lets a model write. least, most: sizes, None being no end. reads: the file, :data:`ESSAYS`, or "" for none;
    load: makes of the files what ``ask`` takes. some: one of the answers is enough.
    """

    ask: Callable[[Any, random.Random, int, int], Asked]
    new: int
    least: int = 1
    most: Callable[[Any], int | None] = lambda loaded: None
    reads: str = ""
    load: Callable[[Sequence[Path]], Any] = lambda paths: None
    some: bool = False
