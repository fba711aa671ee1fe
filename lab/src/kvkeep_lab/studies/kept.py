"""``kept``: the entries that methods keep of the same text, and the agreement of their choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from kvkeep.cache import KeepCache
from kvkeep.errors import UsageError
from kvkeep_lab.figures import FilePath, dress, panels, styled
from kvkeep_lab.inspection import STATES, entry_states
from kvkeep_lab.reading import takes
from kvkeep_lab.studies.base import BudgetText, Flag, OwnMethod, TextStudy, Trial, unique
from kvkeep_lab.tables import Table, percent

RESIDENT = STATES.index("resident")


@dataclass(frozen=True)
class Agreement:
    """The agreement of two methods."""

    method: str
    other: str
    layers: list[float]
    """Share of kept entries that both keep, by layer: the mean over the layer's KV heads."""
    least: float
    """Minimum share over all heads."""
    differing: int
    """Entries over all heads that only one of the methods keeps."""
    of: int
    """Kept entries over all heads."""

    @property
    def mean(self) -> float:
        """Mean share over layers."""
        return fmean(self.layers)


@dataclass(frozen=True)
class Agreements:
    """All pairs."""

    tokens: int
    rows: list[Agreement]


class KeptSlots(TextStudy):
    """The choices of methods by layer and head, after the same text within the same budget."""

    name = "kept"
    about = "compare which entries methods keep of the same text"
    protocol = (
        "Each method's cache reads the same passage within the budget. For two methods, each layer and each KV "
        "head, the study gives the share of the kept entries that both methods keep. If the methods keep "
        "different numbers, the share is of the larger number."
    )
    found = Agreements

    methods: Annotated[list[OwnMethod], unique, Flag("--methods", "-x")] = Field(
        ["snapkv", "h2o", "tova"],
        min_length=2,
        description="cache methods, compared in pairs; the figure shows the first against the others",
    )
    budget: Annotated[BudgetText, Flag("--budget", "-b")] = Field(
        "25%", description="cache budget of each method: a share of the text"
    )
    chunk: int | None = Field(None, ge=1, description="tokens processed in one pass")

    def measure(self, trial: Trial) -> Agreements:
        """Read the passage with each method. Raises UsageError for a method that takes no budget."""
        ids = self.passage(trial)
        kept: dict[str, list[Tensor]] = {}
        for method in self.methods:
            trial.progress(method, len(kept), len(self.methods))
            kept[method] = self._resident(trial.model, ids, method)
        pairs = [(one, other) for place, one in enumerate(self.methods) for other in self.methods[place + 1 :]]
        return Agreements(ids.shape[1], [agreement(one, other, kept[one], kept[other]) for one, other in pairs])

    @torch.no_grad()
    def _resident(self, model: Any, ids: Tensor, method: str) -> list[Tensor]:
        """Return for each entry whether it is resident, (kv_heads, tokens) bool, by layer."""
        if "budget" not in takes(method):
            raise UsageError(f"Method '{method}' takes no budget: it keeps every entry; leave it out.")
        options: dict[str, Any] = {"budget": self.budget, "context": ids.shape[1]}
        if self.chunk is not None and "chunk" in takes(method):
            options["chunk"] = self.chunk
        cache = KeepCache(model, method, **options)
        model(ids, cache=cache, logits_to_keep=1)
        return [states == RESIDENT for states in entry_states(cache)]

    def tables(self, found: Agreements) -> list[Table]:
        table = Table(
            f"Entries kept of {found.tokens:,} tokens, budget {self.budget}",
            ["methods", "both keep, mean", "least of all heads", "differing", "kept"],
        )
        for row in found.rows:
            shares = [percent(row.mean, 2), percent(row.least, 2)]
            table.rows.append([f"`{row.method}`, `{row.other}`", *shares, f"{row.differing:,}", f"{row.of:,}"])
        return [table]

    def draw(self, found: Agreements, path: FilePath, *, title: str) -> None:
        first = found.rows[0].method
        with panels(path, f"{title}, {found.tokens:,} tokens, budget {self.budget}") as (axes,):
            for place, row in enumerate(row for row in found.rows if row.method == first):
                shares = [100 * share for share in row.layers]
                axes.plot(range(len(shares)), shares, **styled(place, row.other))
            dress(axes, f"entries that are kept by {first}, too, %", "layer", y=0)
            axes.figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=8)


def agreement(method: str, other: str, one: Sequence[Tensor], two: Sequence[Tensor]) -> Agreement:
    """Compare the kept entries of two methods, (kv_heads, tokens) bool by layer."""
    shares, differing, of = [], 0, 0
    for ours, theirs in zip(one, two, strict=True):
        larger = torch.maximum(ours.sum(1), theirs.sum(1))
        both = (ours & theirs).sum(1)
        shares.append((both / larger.clamp(min=1)).tolist())
        differing += int((larger - both).sum())
        of += int(larger.sum())
    least = min(min(layer) for layer in shares)
    return Agreement(method, other, [fmean(layer) for layer in shares], least, differing, of)
