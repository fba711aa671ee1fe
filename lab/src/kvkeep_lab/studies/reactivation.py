"""``reactivation``: tokens that were no heavy hitters and are needed after all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from kvkeep.models.loading import Loaded
from kvkeep_lab.analyses.figures import draw_reactivation
from kvkeep_lab.analyses.reactivation import RATIOS, RULES, THRESHOLD, Reactivation, reactivation
from kvkeep_lab.studies.base import Progress, TextStudy, counted
from kvkeep_lab.tables import Table, number, percent
from kvkeep_lab.tasks.base import Metric

Share = Annotated[float, Field(gt=0, lt=1)]


class Reactivated(TextStudy):
    """KVReviver's Fig. 2; see :mod:`kvkeep_lab.analyses.reactivation` for the rules."""

    name = "reactivation"
    about = "how often tokens that are no heavy hitters become active later, by rule, ratio, layer and distance"
    protocol = (
        "The first half of a passage is a prompt after which each KV head has its heavy hitters; the second half's "
        "queries read with the whole cache. A token is active for a query that pays it more than the threshold of its "
        "attention. Foresight: heavy hitters of the queries to come, which no rule can know. Means over full layers "
        "and KV heads."
    )
    found = Reactivation
    metrics: ClassVar[tuple[Metric, ...]] = tuple(
        Metric(f"{rule}_{ratio:g}", f"others that become active, {rule} at {ratio:g}", "lower")
        for rule in RULES
        for ratio in RATIOS
    )

    tokens: int = Field(1024, ge=16, description="tokens of the passage, half of them the prompt")
    threshold: Share = Field(THRESHOLD, description="the share of its attention beyond which a query makes one active")
    ratios: list[Share] = Field(list(RATIOS), min_length=1, description="shares of the prompt that are heavy hitters")

    def measure(self, loaded: Loaded, sources: Sequence[Path], seed: int, progress: Progress) -> Reactivation:
        """Look at every full layer."""
        return reactivation(
            loaded.model,
            self.passage(loaded, sources, seed),
            threshold=self.threshold,
            ratios=self.ratios,
            progress=counted(progress, "layers"),
        )

    def scores(self, found: Reactivation) -> dict[str, float]:
        """Return how many others become active, at the paper's ratios."""
        return {
            f"{rule}_{ratio:g}": found.mean(rule, ratio, "reactivated")
            for rule in RULES
            for ratio in found.ratios
            if ratio in RATIOS
        }

    def tables(self, found: Reactivation) -> list[Table]:
        """Return all measures by rule and ratio, and rates by distance."""
        rules = list(dict.fromkeys((row.rule, row.ratio) for row in found.rows))
        table = Table(
            "Tokens that are no heavy hitters",
            ["heavy hitters", "become active", "queries each is active for", "of all activations", "of the attention"],
            notes=[
                f"An even share of the prompt's {found.prompt:,} tokens is {percent(1 / found.prompt, 2)}, the "
                f"threshold {percent(found.threshold, 2)}. The paper prints a figure without numbers."
            ],
        )  # fmt: skip
        for rule, ratio in rules:
            shares = [percent(found.mean(rule, ratio, name)) for name in ("reactivated", "missed", "mass")]
            each = number(found.mean(rule, ratio, "activations"))
            table.rows.append([f"{rule}, {ratio:g}", shares[0], each, *shares[1:]])
        distances = Table("Active, of pairs of a query and another token, by distance", ["tokens back", *_told(rules)])
        columns = [found.at_distance(*rule) for rule in rules]
        for (low, high), *cells in zip(found.distances, *columns, strict=True):
            distances.rows.append([f"{low:,}-{high:,}", *(percent(cell, 2) for cell in cells)])
        return [table, distances]

    def draw(self, found: Reactivation, path: str | os.PathLike[str], *, title: str) -> None:
        """Draw shares by ratio, layer and distance."""
        draw_reactivation(found, path, title=f"{title}, {found.tokens:,} tokens")


def _told(rules: Sequence[tuple[str, float]]) -> list[str]:
    return [f"{rule}, {ratio:g}" for rule, ratio in rules]
