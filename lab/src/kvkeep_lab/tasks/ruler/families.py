"""RULER's families by its own names, in its order and with its settings (scripts/synthetic.yaml, constants.py)."""

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
    """One of RULER's tasks.

    ask: makes a question of what was loaded, draws, a size (in the family's own units: words, lines, documents), and
    the length wanted in tokens, which sets how hard it is. The same draws make the same question. new: tokens that
    RULER lets a model write. least, greatest: sizes, None being no end. reads: the file, :data:`ESSAYS`, or "" for
    none; load: makes of the files what ``ask`` takes. some: one of the answers is enough.
    """

    ask: Callable[[Any, random.Random, int, int], RulerQuestion]
    new: int
    least: int = 1
    greatest: Callable[[Any], int | None] = lambda loaded: None
    reads: str = ""
    load: Callable[[Sequence[Path]], Any] = lambda paths: None
    some: bool = False


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
