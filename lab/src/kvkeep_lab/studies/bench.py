"""``bench``: how fast and how large every cache is, against transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from kvkeep.budget import Budget
from kvkeep.contracts import Exactness
from kvkeep.geometry import ModelGeometry
from kvkeep.plan.candidates import specs
from kvkeep.policies.methods import resolve
from kvkeep.stock import STOCK
from kvkeep_lab.partial import Interruption
from kvkeep_lab.studies.base import BudgetText, Count, Flag, Study, Trial
from kvkeep_lab.tables import Table, fixed, megabytes, refusals
from kvkeep_lab.timing import HELD, NAIVE, Case, Timed, run

COMBINED = ("h2o+quantize:4", "h2o+merge", "kvreviver:estimate=shrunk,by=mean")
"""Combinations without a name of their own that are timed beside the lossy methods that lists name."""


@dataclass(frozen=True)
class Benched:
    """All cases, by context."""

    rows: list[Timed]


class Bench(Study):
    """Prefill and decoding of every cache in one run, and their memory."""

    name = "bench"
    about = "prefill and decoding of every cache timed in one run, and their memory"
    protocol = (
        "Random ids are read, then single tokens decoded, by each cache in turn; medians over all rounds, interleaved. "
        "Ratios are to transformers' own cache (stock) at the same context, and to one that holds the budget's entries "
        "only (held)."
    )
    found = Benched

    contexts: list[Count] = Field([512, 2048, 4096], min_length=1, description="tokens of prompts")
    budget: Annotated[BudgetText, Flag("--budget", "-b")] = Field("12.5%", description="of whatever has one")
    rounds: int = Field(3, ge=1, description="how often everything is measured")
    steps: int = Field(16, ge=2, description="tokens decoded a round")
    only: list[str] | None = Field(None, description="cases whose name contains one of these; stock is always measured")
    slow: bool = Field(True, description="also what recomputes everything: naive, strides, tokens")
    clock: Literal["wall", "processor"] = Field(
        "wall", description="what is timed by: wall, or processor, for a machine that others use, too"
    )

    def measure(self, trial: Trial) -> Benched:
        listed = cases(trial.model, self.contexts, self.budget, self.steps, slow=self.slow)
        if self.only is not None:
            listed = [one for one in listed if one.method == STOCK or any(part in one.label for part in self.only)]
        options: dict[str, Any] = {"rounds": self.rounds, "steps": self.steps, "clock": self.clock}
        try:
            return Benched(run(trial.model, listed, progress=trial.progress, **options))
        except Interruption as stop:
            raise Interruption(Benched(stop.found)) from None

    def conditions(self) -> dict[str, Any]:
        return {"clock": self.clock}

    def tables(self, found: Benched) -> list[Table]:
        merging = any(row.merging_ms for row in found.rows)
        on_gpu = any("device_peak_bytes" in row.memory for row in found.rows)
        table = Table(
            f"Budget {self.budget}, {self.clock} clock",
            [
                *("context", "cache", "prefill s", "×", "step ms", "×", "× held", "slowest ms"),
                *(("mean ms", "of it merging") if merging else ()),
                *("resident", "kept smaller or elsewhere", "workspace peak", *(("GPU peak",) if on_gpu else ())),
            ],
            notes=[
                "×: time relative to stock at the same context; × held: to a stock cache of the budget's entries only.",
                *refusals((row.label, f"{row.context:,}", row.error) for row in found.rows),
            ],
            named=2,
        )
        for row in (row for row in found.rows if not row.error):
            kept = sum(row.memory["checkpoint_bytes"].values()) + row.memory["compressed_bytes"]
            prefill = [fixed(row.prefill_s), fixed(row.prefill_ratio)]
            steps = [fixed(row.step_ms, 1), fixed(row.step_ratio), fixed(row.held_ratio), fixed(row.slowest_ms, 1)]
            steps += [fixed(row.mean_ms, 1), fixed(row.merging_ms, 1)] if merging else []
            sizes = [row.memory["resident_bytes"], kept or None, row.memory["peak_workspace_bytes"] or None]
            sizes += [row.memory.get("device_peak_bytes")] if on_gpu else []
            table.rows.append([f"{row.context:,}", f"`{row.label}`", *prefill, *steps, *map(megabytes, sizes)])
        return [table]


def cases(model: Any, contexts: Sequence[int], budget: str, steps: int, *, slow: bool = True) -> list[Case]:
    """Return the cases of a whole run: no cache, the stock cache, the exact caches, kv-direct in each kind and place,
    kv-direct with a budget of the whole context, where nothing is recalled: its own overhead; every method that drops
    or shrinks, and beside them a stock cache that holds the budget's entries only."""
    geometry = ModelGeometry.from_config(model.config, next(model.parameters()).dtype.itemsize)
    lossy = [*(spec for spec in specs() if resolve(spec).exactness is Exactness.LOSSY), *COMBINED]
    listed = []
    for length in contexts:

        def direct(kind: str, where: str, length: int = length) -> Case:
            options = {"budget": budget, "checkpoint": kind, "where": where, "context": length}
            return Case(f"kv-direct {kind}@{where}", length, "kv-direct", options)

        listed += [
            Case(STOCK, length, STOCK),
            Case("full", length, "full"),
            Case("static", length, "static", {"budget": length + steps + 1}),
            Case("paged", length, "paged"),
            Case("kv-direct, no recall", length, "kv-direct", {"budget": length + steps + 1}),
            *(direct(kind, where) for kind in ("kv", "residual") for where in ("device", "host", "disk")),
            *(Case(name, length, name, {"budget": budget, "context": length}) for name in lossy),
        ]
        if entries := Budget.parse(budget).entries(geometry, context=length):
            listed.append(Case(HELD, length, STOCK, reads=entries))
        if slow:
            listed += [Case(NAIVE, length, NAIVE), direct("residual:4", "host"), direct("tokens", "device")]
    return listed
