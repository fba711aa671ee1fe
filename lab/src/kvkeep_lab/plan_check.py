"""Compares predictions with measurements: plans caches, and runs the same caches in the bench."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.budget import Budget
from kvkeep.errors import KvkeepError
from kvkeep.plan.candidates import Candidate, candidates
from kvkeep.plan.costs import cost
from kvkeep.plan.machine import Machine
from kvkeep.plan.planner import ACCEPTANCE
from kvkeep.plan.shape import Shape
from kvkeep.plan.sizes import sizes
from kvkeep_lab.partial import Interruption
from kvkeep_lab.timing import TimingCase, run

GOOD = 0.25
"""Largest relative error of a correct prediction."""


@dataclass(frozen=True)
class Checked:
    """One cache, predicted and measured. Errors are relative to the measurement and positive if the prediction is too
    large; None without a measurement."""

    label: str
    context: int
    budget: int | None
    predicted_bytes: int
    """Sum of resident, compressed and checkpoint bytes."""
    measured_bytes: int
    """Sum of resident, compressed and checkpoint bytes."""
    predicted_step_s: float
    measured_step_s: float | None
    predicted_prefill_s: float
    measured_prefill_s: float | None
    error: str = ""

    @property
    def step_error(self) -> float | None:
        """Relative error of the step."""
        return self.predicted_step_s / self.measured_step_s - 1 if self.measured_step_s else None

    @property
    def prefill_error(self) -> float | None:
        """Relative error of the prompt."""
        return self.predicted_prefill_s / self.measured_prefill_s - 1 if self.measured_prefill_s else None

    @property
    def good(self) -> bool:
        """Whether both errors are at most a quarter."""
        errors = (self.step_error, self.prefill_error)
        return all(error is not None and abs(error) <= GOOD for error in errors)


def check(
    model: Any,
    shape: Shape,
    machine: Machine,
    contexts: Sequence[int],
    budget: str,
    *,
    wanted: Callable[[str], bool] = lambda label: True,
    rounds: int = 1,
    steps: int = 8,
    progress: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> list[Checked]:
    """Predict and measure every candidate whose label is ``wanted``, with ``budget``, at each context."""
    planned: list[tuple[Candidate, int, int | None]] = []
    for context in contexts:
        share = Budget.parse(budget).entries(shape.geometry, context=context)
        for candidate in candidates(shape.geometry):
            # The bench reads random tokens, which cannot be drafted; kvkeep prove measures rounds.
            if not candidate.method.recall.drafts and wanted(str(candidate)):
                planned.append((candidate, context, None if candidate.keeps_all else share))
    cases = []
    for candidate, context, entries in planned:
        options = {name: value for name, value in candidate.options(entries).items() if value is not None}
        cases.append(TimingCase(str(candidate), context, candidate.spec, options))
    try:
        rows = run(model, cases, rounds=rounds, steps=steps, progress=progress)
    except Interruption as stop:
        rows = stop.found
    checked = []
    for (candidate, context, entries), row in zip(planned, rows, strict=True):
        try:
            # The bench counts bytes after its steps. Its timed steps have on average half of them before.
            holding = sizes(shape.geometry, candidate, context, entries, shared=machine.shared)
            after = sizes(shape.geometry, candidate, context, entries, shared=machine.shared, steps=steps)
            costs = cost(shape, candidate, holding, machine, ACCEPTANCE)
        except KvkeepError as error:
            checked.append(Checked(row.label, context, entries, 0, 0, 0.0, None, 0.0, None, row.error or str(error)))
            continue
        predicted = after.total
        measured = row.held_bytes + sum(row.memory["checkpoint_bytes"].values())
        steps_s = costs.step, None if row.step_ms is None else row.step_ms / 1e3
        found = predicted, measured, *steps_s, costs.prefill, row.prefill_s, row.error
        checked.append(Checked(row.label, context, entries, *found))
    return checked
