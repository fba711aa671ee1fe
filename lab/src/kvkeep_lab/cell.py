"""Cells: the units of work of an experiment."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvkeep_lab.tasks.base import Point, named


@dataclass(frozen=True)
class Cell:
    """One unit of work, measured in one go and kept as one record.

    Cells of the same ``setting`` can be compared; ``key`` is the cell's own. Both are hashes, of everything that
    changes numbers and of nothing else. method: of a study, the study's name.
    """

    key: str
    setting: str
    model: str
    seed: int
    method: str
    budget: str | None = None
    point: Point = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The cell as a person reads it."""
        place = ", ".join(f"{name} {named(value)}" for name, value in self.point.items())
        return " ".join(part for part in (self.method, self.budget, f"({place})" if place else "") if part)
