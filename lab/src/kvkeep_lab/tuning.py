"""Tuning: parameters of methods are chosen on other passages than those that the methods are judged on.

Every candidate of a method is measured at every budget on passages of files that are kept for this; the one with the
least mean KL (teacher-forced, task ``match``) is the method's at that budget. The search is an experiment of its own,
in the same store.
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
"""By model and budget: what each tuned method is there."""


class Tuning(BaseModel):
    """What methods may be, and the passages that choose.

    candidates: by method of the experiment, what else it may be; the method as it is named is always tried. length,
    new, samples: tokens read and written, and passages, as of task ``match``. files: how many of the text files, the
    last by name, passages are cut from; the experiment's own prompts are not.
    """

    model_config = STRICT

    candidates: dict[MethodName, tuple[MethodName, ...]]
    length: Annotated[int, Field(ge=1)] = 512
    new: Annotated[int, Field(ge=2)] = 24
    samples: Annotated[int, Field(ge=1)] = 2
    files: Annotated[int, Field(ge=1)] = 8

    @model_validator(mode="after")
    def _bounded(self) -> Tuning:
        for method in (one for name, others in self.candidates.items() for one in (name, *others)):
            if "budget" not in takes(method):
                raise UsageError(f"'{method}' takes no budget, so there is nothing to tune")
        return self

    def tried(self, methods: Iterable[str]) -> list[str]:
        """Return everything that the tuned ones among ``methods`` may be, each once."""
        tuned = (method for method in methods if method in self.candidates)
        return list(dict.fromkeys(one for method in tuned for one in (method, *self.candidates[method])))

    def passages(self, data: Path | None) -> tuple[Path, ...]:
        """Return the files that are kept for tuning; raises UsageError where no other would be left."""
        found = text_files(data)
        if len(found) <= self.files:
            raise UsageError(
                f"Tuning sets {self.files} text files aside, and there are only {len(found)}; add text files, or "
                "lower 'files' in [tune]."
            )
        return tuple(found[-self.files :])

    def chosen(self, records: Sequence[TaskRecord], methods: Sequence[str]) -> Chosen:
        """Return the best of each of ``methods`` that the newest of ``records``, which are of the search, know of."""
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
