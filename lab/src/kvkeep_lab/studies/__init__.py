"""Measurements of a model or a machine that have tables and figures of their own: one file each."""

from __future__ import annotations

from kvkeep_lab.studies.alignment import Aligned
from kvkeep_lab.studies.base import Study
from kvkeep_lab.studies.decoding import Decoding
from kvkeep_lab.studies.effective_rank import EffectiveRank
from kvkeep_lab.studies.long_chat import LongChat
from kvkeep_lab.studies.merging_cost import MergingCost
from kvkeep_lab.studies.patching import Patched
from kvkeep_lab.studies.reactivation import Reactivated
from kvkeep_lab.studies.rebuilt import Rebuilt
from kvkeep_lab.studies.recompute import Recompute
from kvkeep_lab.studies.same_tokens import SameTokens
from kvkeep_lab.studies.sketch_error import SketchError
from kvkeep_lab.studies.spectra import Spectra
from kvkeep_lab.studies.throughput import Throughput
from kvkeep_lab.studies.token_bytes import TokenBytes

_LISTED: tuple[type[Study], ...] = (
    *(TokenBytes, Rebuilt, SameTokens, Patched, LongChat, EffectiveRank, Recompute),
    *(Decoding, Reactivated, Throughput, SketchError, Spectra, Aligned, MergingCost),
)

STUDIES: dict[str, type[Study]] = {study.name: study for study in _LISTED}
"""The studies by name, by the papers they are of."""
