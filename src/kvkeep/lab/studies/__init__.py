"""Measurements of a model or a machine that have tables and figures of their own: one file each."""

from __future__ import annotations

from kvkeep.lab.studies.alignment import Aligned
from kvkeep.lab.studies.base import Study
from kvkeep.lab.studies.decoding import Decoding
from kvkeep.lab.studies.effective_rank import EffectiveRank
from kvkeep.lab.studies.long_chat import LongChat
from kvkeep.lab.studies.merging_cost import MergingCost
from kvkeep.lab.studies.patching import Patched
from kvkeep.lab.studies.reactivation import Reactivated
from kvkeep.lab.studies.rebuilt import Rebuilt
from kvkeep.lab.studies.recompute import Recompute
from kvkeep.lab.studies.same_tokens import SameTokens
from kvkeep.lab.studies.sketch_error import SketchError
from kvkeep.lab.studies.spectra import Spectra
from kvkeep.lab.studies.throughput import Throughput
from kvkeep.lab.studies.token_bytes import TokenBytes

_LISTED: tuple[type[Study], ...] = (
    *(TokenBytes, Rebuilt, SameTokens, Patched, LongChat, EffectiveRank, Recompute),
    *(Decoding, Reactivated, Throughput, SketchError, Spectra, Aligned, MergingCost),
)

STUDIES: dict[str, type[Study]] = {study.name: study for study in _LISTED}
"""The studies by name, by the papers they are of."""
