"""Cells: the units of work of an experiment."""

from __future__ import annotations

from dataclasses import dataclass, field

Point = dict[str, int | float | str]
"""One value for each of a task's axes: a size, or a name."""


def named(value: float | str) -> str:
    """Return a value of an axis as text."""
    return value if isinstance(value, str) else f"{value:g}"


@dataclass(frozen=True)
class Cell:
    """One unit of work, measured in one piece and stored as one record."""

    key: str
    """Hash of everything that changes the numbers of the cell."""
    setting: str
    """Hash shared by all cells that can be compared."""
    model: str
    seed: int
    method: str
    """A method; in a study, the name of the study."""
    budget: str | None = None
    point: Point = field(default_factory=dict)

    @property
    def place(self) -> dict[str, str]:
        """Its values of the task's axes, and its seed, as text."""
        return {axis: named(value) for axis, value in self.point.items()} | {"seed": str(self.seed)}

    @property
    def label(self) -> str:
        """The cell as text for people."""
        place = ", ".join(f"{name} {named(value)}" for name, value in self.point.items())
        return " ".join(part for part in (self.method, self.budget, f"({place})" if place else "") if part)
