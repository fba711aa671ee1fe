"""Tuning: chooses parameters of methods on passages that are not used to compare the methods.

Every candidate of a method is measured at every budget on passages of reserved files. The candidate with the smallest
mean KL (teacher-forced, task ``match``) is used at that budget. The search is a separate experiment in the same store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from kvkeep.errors import UsageError
from kvkeep_lab.paper import STRICT
from kvkeep_lab.reading import takes
from kvkeep_lab.store import TaskRecord
from kvkeep_lab.studies.base import MethodName
from kvkeep_lab.tasks.texts import text_files

Chosen = dict[str, dict[str, dict[str, str]]]
"""By model and budget: the chosen candidate of each tuned method."""


class Tuning(BaseModel):
    """The candidates of methods, and the passages for the choice."""

    model_config = STRICT

    candidates: dict[MethodName, tuple[MethodName, ...]]
    """Further candidates by method of the experiment; the named method is always a candidate."""
    length: Annotated[int, Field(ge=1)] = 512
    """Tokens read, as in task ``match``."""
    new: Annotated[int, Field(ge=2)] = 24
    """Tokens generated, as in task ``match``."""
    samples: Annotated[int, Field(ge=1)] = 2
    """Number of passages, as in task ``match``."""
    files: Annotated[int, Field(ge=1)] = 8
    """Number of text files, the last by name, from which passages are cut; the experiment's prompts use the other
    files."""

    @model_validator(mode="after")
    def _bounded(self) -> Tuning:
        for method in (one for name, others in self.candidates.items() for one in (name, *others)):
            if "budget" not in takes(method):
                raise UsageError(f"'{method}' takes no budget, so there is nothing to tune")
        return self

    def tried(self, methods: Iterable[str]) -> list[str]:
        """Return the distinct candidates of the tuned ones among ``methods``."""
        tuned = (method for method in methods if method in self.candidates)
        return list(dict.fromkeys(one for method in tuned for one in (method, *self.candidates[method])))

    def passages(self, data: Path | None) -> tuple[Path, ...]:
        """Return the files reserved for tuning. Raises UsageError if no other file would remain."""
        found = text_files(data)
        if len(found) <= self.files:
            raise UsageError(
                f"Tuning sets {self.files} text files aside, and there are only {len(found)}; add text files, or "
                "lower 'files' in [tune]."
            )
        return tuple(found[-self.files :])

    def chosen(self, records: Sequence[TaskRecord], methods: Sequence[str]) -> Chosen:
        """Return the best candidate of each of ``methods`` by the newest of ``records``, the records of the search."""
        found: dict[tuple[str, str], dict[str, float]] = {}
        for record in records:
            if record.status == "done" and record.budget is not None:
                found.setdefault((record.model, record.budget), {})[record.method] = fmean(record.scores["kl"])
        chosen: Chosen = {}
        for (model, budget), means in found.items():
            best = chosen.setdefault(model, {}).setdefault(budget, {})
            for method in methods:
                if measured := [one for one in self.tried([method]) if one in means]:
                    best[method] = min(measured, key=means.__getitem__)
        return chosen
