"""The families by RULER's own names, in its order and with its settings (scripts/synthetic.yaml, constants.py)."""

from __future__ import annotations

from functools import partial

from kvkeep_lab.tasks.ruler import qa
from kvkeep_lab.tasks.ruler.aggregation import COMMON, common_words, frequent_words
from kvkeep_lab.tasks.ruler.family import ESSAYS, Family
from kvkeep_lab.tasks.ruler.niah import Niah, words
from kvkeep_lab.tasks.ruler.tracking import track
from kvkeep_lab.tasks.ruler.vocabulary import WORDS

_niah = partial(Family, new=128)
_in_essays = partial(_niah, least=20, reads=ESSAYS, load=words)
_qa = partial(Family, qa.ask, new=32, most=lambda loaded: len(loaded.texts), some=True)

FAMILIES: dict[str, Family] = {
    "niah_single_1": _niah(Niah("noise")),
    "niah_single_2": _in_essays(Niah("essays")),
    "niah_single_3": _in_essays(Niah("essays", values="uuids")),
    "niah_multikey_1": _in_essays(Niah("essays", needles=4)),
    "niah_multikey_2": _niah(Niah("needles")),
    "niah_multikey_3": _niah(Niah("needles", keys="uuids", values="uuids")),
    "niah_multivalue": _in_essays(Niah("essays", each=4)),
    "niah_multiquery": _in_essays(Niah("essays", needles=4, asked=4)),
    "vt": Family(track, new=30),
    "cwe": Family(common_words, new=120, least=COMMON + 1, most=lambda loaded: len(WORDS)),
    "fwe": Family(frequent_words, new=50, least=60),
    "qa_1": _qa(reads="squad.json", load=qa.squad),
    "qa_2": _qa(reads="hotpotqa.json", load=qa.hotpotqa),
}
GENERATED = [name for name, family in FAMILIES.items() if family.reads in ("", ESSAYS)]
"""Those that need no data set."""
