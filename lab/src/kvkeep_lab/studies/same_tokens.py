"""``same-tokens``: greedy tokens of every exact way to decode, against the stock cache's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from kvkeep.models.loading import Loaded
from kvkeep_lab.figures import COLOURS, DPI, WIDTH_PX, plain, save
from kvkeep_lab.generation import Tokens, same_tokens
from kvkeep_lab.studies.base import Progress, Study
from kvkeep_lab.tables import Table, number, times
from kvkeep_lab.tasks.base import Metric
from kvkeep_lab.verify import checkpoint_kinds, text_ids

NO_CACHE = "no cache"
PAPER = {"stock cache": "0.11 s", NO_CACHE: "30/30, 0.19 s, 1.7 ×"}
"""KV-Direct's Table 3, SmolLM2-135M."""


@dataclass(frozen=True)
class Ways:
    """All ways, the stock cache first. refused: checkpoint kinds that the family cannot have, and why."""

    rows: list[Tokens]
    refused: dict[str, str]


class SameTokens(Study):
    """KV-Direct's Table 3, and ``kv-direct`` with every kind of checkpoint beside it."""

    name = "same-tokens"
    about = "greedy tokens with the stock cache, without any, and with kv-direct"
    protocol = (
        "The built-in text's first tokens are continued greedily: with transformers' own cache, with none (everything "
        "is computed again for every token), and with kv-direct in every kind of checkpoint and budget. Where a token "
        "differs, its gap is by how many logits the stock cache preferred its own."
    )
    found = Ways
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("recomputed", "tokens that are the same without a cache"),
        Metric("direct", "tokens that are the same with kv-direct, the least"),
        Metric("ratio", "seconds without a cache, by those with one", "lower", "number"),
    )
    certain = ("recomputed", "direct")

    prompt: int = Field(96, ge=2, description="tokens read")
    new: int = Field(30, ge=2, description="tokens written")
    budgets: list[int] = Field([0, 64], description="entries, of kv-direct")

    def measure(self, loaded: Loaded, sources: Sequence[Path], seed: int, progress: Progress) -> Ways:
        """Decode every way."""
        kinds, refused = checkpoint_kinds(loaded.model)
        ids, total = text_ids(loaded.tokenizer, self.prompt), 2 + len(kinds) * len(self.budgets)
        rows = []
        for way in same_tokens(loaded.model, ids, kinds=kinds, new=self.new, budgets=self.budgets):
            rows.append(way)
            progress(way.way, len(rows), total)
        return Ways(rows, dict(refused))

    def scores(self, found: Ways) -> dict[str, float]:
        """Return the shares that are the same, and how much slower no cache is."""
        bare = next(row for row in found.rows if row.way == NO_CACHE)
        direct = [row.matching / row.of for row in found.rows[2:]]
        scores = {"recomputed": bare.matching / bare.of, "ratio": bare.ratio}
        return scores | ({"direct": min(direct)} if direct else {})

    def tables(self, found: Ways) -> list[Table]:
        """Return Table 3, longer."""
        table = Table("Greedy tokens", ["", "same", "seconds", "by stock's", "differs at", "gap", "the paper's"])
        for row in found.rows:
            where = "-" if row.differs_at is None else f"{row.differs_at}"
            told = [f"{row.matching}/{row.of}", f"{row.seconds:.2f}", times(row.ratio), where, number(row.gap)]
            table.rows.append([row.way, *told, PAPER.get(row.way, "")])
        table.notes = [f"Checkpoint kind {kind} is refused: {reason}" for kind, reason in found.refused.items()]
        return [table]

    def draw(self, found: Ways, path: str | os.PathLike[str], *, title: str) -> None:
        """Draw bars of seconds, the same tokens written beside them."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH_PX / DPI, 1.2 + 0.3 * len(found.rows)), dpi=DPI, layout="constrained")
        axes: Any = figure.subplots()
        places = range(len(found.rows))
        bars = axes.barh(places, [row.seconds for row in found.rows], color=COLOURS[0], height=0.65)
        axes.bar_label(bars, [f"{row.matching}/{row.of}, {times(row.ratio)}" for row in found.rows], padding=3)
        axes.set_yticks(places, [row.way for row in found.rows])
        axes.invert_yaxis()
        axes.set_xlim(right=1.25 * max(row.seconds for row in found.rows))
        axes.set_title(f"seconds for {self.new} tokens after {self.prompt}", loc="left", fontsize=10)
        plain(axes, "x")
        figure.suptitle(title, fontsize=11)
        save(figure, path)
