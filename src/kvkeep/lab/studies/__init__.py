"""Measurements of a model or a machine that have tables and figures of their own: one file each."""

from __future__ import annotations

from kvkeep.lab.studies.base import Study
from kvkeep.lab.studies.rebuilt import Rebuilt
from kvkeep.lab.studies.spectra import Spectra
from kvkeep.lab.studies.token_bytes import TokenBytes

STUDIES: dict[str, type[Study]] = {study.name: study for study in (TokenBytes, Rebuilt, Spectra)}
"""The studies by name."""
