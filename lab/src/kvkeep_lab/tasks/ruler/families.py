"""RULER's families with its names, order and settings (scripts/synthetic.yaml, constants.py)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvkeep_lab.tasks.ruler import qa
from kvkeep_lab.tasks.ruler.generated import (
    COMMON,
    WORDS,
    Niah,
    RulerQuestion,
    common_words,
    frequent_words,
    track,
    words,
)

ESSAYS = "haystack"
"""Name that stands for the essays among the source files of families."""


@dataclass(frozen=True)
class Family:
    """One of RULER's tasks."""

    ask: Callable[[Any, random.Random, int, int], RulerQuestion]
    """Returns a question. It receives the loaded data, a random generator, a size in the family's unit (words, lines,
    documents), and the requested length in tokens, which determines the difficulty. Equal draws give equal questions.
    """
    new: int
    """Maximum tokens of an answer in RULER."""
    least: int = 1
    """Minimum size."""
    greatest: Callable[[Any], int | None] = lambda loaded: None
    """Returns the maximum size; None for no maximum."""
    reads: str = ""
    """File, :data:`ESSAYS`, or "" for none."""
    load: Callable[[Sequence[Path]], Any] = lambda paths: None
    """Converts the files to the data for ``ask``."""
    some: bool = False
    """Whether one of the answers is sufficient."""


_niah = partial(Family, new=128)
_in_essays = partial(_niah, least=20, reads=ESSAYS, load=words)
_qa = partial(Family, qa.ask, new=32, greatest=lambda loaded: len(loaded.texts), some=True)

FAMILIES: dict[str, Family] = {
    "niah_single_1": _niah(Niah("noise")),
    "niah_single_2": _in_essays(Niah("essays")),
    "niah_single_3": _in_essays(Niah("essays", values="uuids")),
    "niah_multikey_1": _in_essays(Niah("essays", needles=4)),
    "niah_multikey_2": _niah(Niah("needles")),
    "niah_multikey_3": _niah(Niah("needles", keys="uuids", values="uuids")),
    "niah_multivalue": _in_essays(Niah("essays", each=4)),
    "niah_multiquery": _in_essays(Niah("essays", needles=4, queried=4)),
    "vt": Family(track, new=30),
    "cwe": Family(common_words, new=120, least=COMMON + 1, greatest=lambda loaded: len(WORDS)),
    "fwe": Family(frequent_words, new=50, least=60),
    "qa_1": _qa(reads="squad.json", load=qa.squad),
    "qa_2": _qa(reads="hotpotqa.json", load=qa.hotpotqa),
}
GENERATED = [name for name, family in FAMILIES.items() if family.reads in ("", ESSAYS)]
"""Names of the families that need no data set."""
