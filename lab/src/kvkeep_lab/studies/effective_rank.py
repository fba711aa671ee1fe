"""``effective-rank``: the rank of what scores attention, and what truncation to a rank does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, ClassVar

from pydantic import Field

from kvkeep.decode.prompt import encode, question
from kvkeep.models.loading import Loaded
from kvkeep_lab.analyses.figures import draw_rank
from kvkeep_lab.analyses.rank import EVERY, LEFT, PAPER, Ranks, ranks, truncations
from kvkeep_lab.studies.base import Progress, Study
from kvkeep_lab.tables import Table, number, percent
from kvkeep_lab.tasks.base import Metric


class EffectiveRank(Study):
    """KV-Direct's Fig. 5 and 6; see :mod:`kvkeep_lab.analyses.rank` for the formulas."""

    name = "effective-rank"
    about = "the effective rank of W_q W_k^T at 90 % of its energy, and tokens and KL after truncation"
    protocol = (
        "From the weights: the least rank with 90 % of the energy of M = W_q W_k^T, by query head. Then a prompt is "
        "continued greedily with keys and values truncated to a rank: of every entry, of keys or values alone, of all "
        "but the first token, or of those that are not among the newest (lowrank). KL is of the full cache's text."
    )
    found = Ranks
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("rank", "effective rank, mean over heads", "lower", "number"),
        Metric("share", "effective rank by the width of a head", "lower"),
        Metric("half_energy", "energy that half of the width holds"),
        Metric("half_match", "tokens that are the same at half of the width"),
        Metric("half_kl", "KL at half of the width (nats)", "lower", "number"),
        Metric("whole_match", "tokens that are the same at all of the width"),
    )
    certain = ("rank", "share", "half_energy", "half_match", "half_kl", "whole_match")

    shares: list[Annotated[float, Field(gt=0, le=1)]] = Field(
        [0.125, 0.25, 0.5, 0.75, 0.9375, 1.0], description="of a head's width, ranks that are truncated to"
    )
    prompt: str = Field("Explain why the sky is blue in simple terms.", min_length=1, description="what is continued")
    new: int = Field(30, ge=2, description="tokens written")

    def measure(self, loaded: Loaded, sources: Sequence[Path], seed: int, progress: Progress) -> Ranks:
        """Take ranks, and truncate to some."""
        found = Ranks(ranks(loaded.model))
        dim = found.layers[0].dim
        listed = sorted({max(1, round(share * dim)) for share in self.shares})
        ids = encode(loaded.tokenizer, question(None, self.prompt))

        def tell(text: str, done: float, total: float | None) -> None:
            begun = text != "truncated weights"  # the first of two halves
            progress(text, begun + (done / total if total else 0), 2)

        rows = truncations(loaded.model, ids, listed, new=self.new, progress=tell)
        return replace(found, prompt_tokens=len(ids), new_tokens=self.new, truncations=tuple(rows))

    def scores(self, found: Ranks) -> dict[str, float]:
        """Return the mean rank, and what half of the width holds and does."""
        dim = found.layers[0].dim
        scores = {
            "rank": found.mean(),
            "share": fmean(rank / layer.dim for layer in found.layers for rank in layer.heads),
            "half_energy": found.energy(dim // 2),
        }
        every = next(iter(EVERY))
        for row in (row for row in found.truncations if row.way == every):
            if row.match is not None and row.kl is not None:
                scores |= {"half_match": row.match, "half_kl": row.kl} if row.rank == dim // 2 else {}
                scores |= {"whole_match": row.match} if row.rank == dim else {}
        return scores

    def tables(self, found: Ranks) -> list[Table]:
        """Return the ranks, and what truncation does."""
        dim = found.layers[0].dim
        shape = Table(
            "Effective rank at 90 % of the energy",
            ["of", "mean", "of d_head", "least", "most", f"energy of rank {dim // 2}"],
            notes=[
                "Stacked: M of all query heads of a KV head. Turned: rotation stands between the two. The paper's "
                "means: 21.2 of 64 (SmolLM2-135M), 20.0 of 64 (Qwen2.5-0.5B), 70.2 of 256 (Gemma 3 4B); its rank 32 "
                "of 64 holds more than 95 %."
            ],
        )
        energies = {"heads": found.energy(dim // 2), "fourth": found.energy(dim // 2, "fourth_energy")}
        for of, words in (("heads", "query heads"), ("groups", "KV heads, stacked"), ("fourth", "fourth powers")):
            values = [rank for layer in found.layers for rank in getattr(layer, of)]
            sizes = [number(fmean(values)), percent(fmean(values) / dim, 0), number(min(values)), number(max(values))]
            shape.rows.append([words, *sizes, percent(energies.get(of))])
        for distance in found.layers[0].turned or {}:
            mean = fmean((layer.turned or {})[distance] for layer in found.layers)
            shape.rows.append([f"turned by {distance}", number(mean), percent(mean / dim, 0), "", "", ""])
        return [shape, self._truncated(found)]

    def _truncated(self, found: Ranks) -> Table:
        ways, dim = [*EVERY, LEFT], found.layers[0].dim
        table = Table(
            f"Truncated: match and KL (nats), {found.prompt_tokens} tokens read, {found.new_tokens} written",
            ["rank", "energy of M", *ways, "the paper's"],
            notes=sorted({row.error for row in found.truncations if row.error}),
        )
        by_rank = {(row.way, row.rank): row for row in found.truncations}
        for rank in dict.fromkeys(row.rank for row in found.truncations):
            rows = [by_rank[way, rank] for way in ways]
            cells = [f"{percent(row.match, 0)}, {number(row.kl, 2)}" for row in rows]
            paper = "{} %, {}".format(*PAPER[rank / dim]) if rank / dim in PAPER else ""
            table.rows.append([f"{rank}", percent(found.energy(rank)), *cells, paper])
        return table

    def draw(self, found: Ranks, path: str | os.PathLike[str], *, title: str) -> None:
        """Draw Fig. 5 and 6."""
        draw_rank(found, path, title=title)
