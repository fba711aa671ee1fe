"""``same-tokens``: compares greedy tokens of all exact ways of decoding with the stock cache's (KV-Direct's
Table 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

import torch
from pydantic import Field
from torch import Tensor
from transformers import DynamicCache

from kvkeep.cache import KeepCache
from kvkeep.errors import UnsupportedModelError
from kvkeep_lab.figures import COLOURS, FilePath, dress, panels
from kvkeep_lab.prompts import built_in
from kvkeep_lab.reading import greedy
from kvkeep_lab.shapes import CheckpointKind
from kvkeep_lab.studies.base import Flag, Kind, Study, Trial
from kvkeep_lab.tables import Table, number, times
from kvkeep_lab.tasks.base import Metric

NO_CACHE = "no cache"
PAPER = {"stock cache": "0.11 s", NO_CACHE: "30/30, 0.19 s, 1.7 ×"}
"""KV-Direct's Table 3 for SmolLM2-135M."""


@dataclass(frozen=True)
class Tokens:
    """One way of decoding."""

    way: str
    matching: int
    """Number of tokens that equal the stock cache's."""
    of: int
    """Number of compared tokens."""
    seconds: float
    ratio: float
    """Seconds relative to the stock cache's, including the prompt."""
    differs_at: int | None = None
    """Index of the first differing token."""
    gap: float | None = None
    """Difference of the stock cache's logits of both tokens there. A gap of about the dtype's rounding is a tie, which
    the order of sums decides."""

    @property
    def holds(self) -> bool:
        """Whether all tokens are the same."""
        return self.matching == self.of


@dataclass(frozen=True)
class Ways:
    """All ways; the stock cache is first."""

    rows: list[Tokens]
    refused: dict[str, str]
    """Checkpoint kinds that the family does not support, with the reasons."""


class SameTokens(Study):
    """KV-Direct's Table 3, and ``kv-direct`` with every kind of checkpoint."""

    name = "same-tokens"
    about = "compare greedy tokens with the stock cache, without a cache, and with kv-direct"
    protocol = (
        "The first tokens of the built-in text are continued greedily: with transformers' own cache, without a "
        "cache (every token computes the whole text again), and with kv-direct for every kind of checkpoint and "
        "budget. Where a token differs, the gap is the difference between the two logits with the stock cache."
    )
    found = Ways
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("recomputed", "tokens that are the same without a cache"),
        Metric("direct", "tokens that are the same with kv-direct, the least"),
        Metric("ratio", "seconds without a cache, by those with one", "lower", "number"),
    )
    certain = ("recomputed", "direct")

    prompt: Annotated[int, Flag("--limit")] = Field(96, ge=2, description="number of tokens to read from the text")
    new: Annotated[int, Flag("--max-tokens", "-n")] = Field(30, ge=2, description="number of tokens to generate")
    budgets: list[int] = Field([0, 64], description="budgets of kv-direct, in entries per layer")
    kinds: list[Kind] | None = Field(None, description="kinds of checkpoints; by default all that the model supports")

    @torch.no_grad()
    def measure(self, trial: Trial) -> Ways:
        """Decode in every way. Raises UnsupportedModelError if kv-direct does not support the model."""
        model = trial.model
        kinds, refused = checkpoint_kinds(model)
        if self.kinds is not None:
            kinds = tuple(kind for kind in kinds if kind in self.kinds)
        ids = built_in(trial.tokenizer, self.prompt).to(model.device)

        def stock() -> DynamicCache:
            return DynamicCache(config=model.config)

        greedy(model, ids, 2, cache=stock())  # warms up
        expected, stock_s = greedy(model, ids, self.new, cache=stock())
        rows = [Tokens("stock cache", self.new, self.new, stock_s, 1.0)]
        settings = [(budget, kind) for budget in self.budgets for kind in kinds]
        for way in (None, *settings):
            label = NO_CACHE if way is None else f"kv-direct B={way[0]}, {way[1]}"
            trial.progress(label, len(rows), len(settings) + 2)
            options: dict[str, Any] = {"use_cache": False}
            if way is not None:
                cache = KeepCache(model, "kv-direct", way[0], checkpoint=way[1], where="device")
                options = {"cache": cache}
            got, seconds = greedy(model, ids, self.new, **options)
            rows.append(_compared(model, ids, label, got, expected, seconds, stock_s))
        return Ways(rows, refused)

    def scores(self, found: Ways) -> dict[str, float]:
        bare = next(row for row in found.rows if row.way == NO_CACHE)
        direct = [row.matching / row.of for row in found.rows[2:]]
        scores = {"recomputed": bare.matching / bare.of, "ratio": bare.ratio}
        return scores | ({"direct": min(direct)} if direct else {})

    def tables(self, found: Ways) -> list[Table]:
        """Return an extended Table 3."""
        table = Table("Greedy tokens", ["", "same", "seconds", "by stock's", "differs at", "gap", "the paper's"])
        for row in found.rows:
            where = "-" if row.differs_at is None else f"{row.differs_at}"
            cells = [f"{row.matching}/{row.of}", f"{row.seconds:.2f}", times(row.ratio), where, number(row.gap)]
            table.rows.append([row.way, *cells, PAPER.get(row.way, "")])
        table.notes = [f"Checkpoint kind {kind} is refused: {reason}" for kind, reason in found.refused.items()]
        return [table]

    def draw(self, found: Ways, path: FilePath, *, title: str) -> None:
        """Draw bars of seconds, labelled with the number of same tokens."""
        seconds = [row.seconds for row in found.rows]
        with panels(path, title, height=1.2 + 0.3 * len(found.rows)) as (axes,):
            bars = axes.barh(range(len(seconds)), seconds, color=COLOURS[0], height=0.65)
            axes.bar_label(bars, [f"{row.matching}/{row.of}, {times(row.ratio)}" for row in found.rows], padding=3)
            axes.set_yticks(range(len(seconds)), [row.way for row in found.rows])
            axes.invert_yaxis()
            axes.set_xlim(right=1.25 * max(seconds))
            dress(axes, f"seconds for {self.new} tokens after {self.prompt}", grid="x")


def checkpoint_kinds(model: Any) -> tuple[tuple[CheckpointKind, ...], dict[str, str]]:
    """Return the checkpoint kinds that the model's family supports, and the sentences of refused kinds. Raises
    UnsupportedModelError if it supports none."""
    kinds: list[CheckpointKind] = []
    refused: dict[str, str] = {}
    for kind in reversed(get_args(CheckpointKind)):
        try:
            KeepCache(model, "kv-direct", 0, checkpoint=kind, where="device")
        except UnsupportedModelError as error:
            refused[kind] = str(error)
        else:
            kinds.append(kind)
    if not kinds:
        raise UnsupportedModelError(next(iter(refused.values())))
    return tuple(kinds), refused


def _compared(
    model: Any, ids: Tensor, way: str, got: list[int], expected: list[int], seconds: float, stock_s: float
) -> Tokens:
    same = [a == b for a, b in zip(got, expected, strict=True)]
    differs_at, gap = None, None
    if not all(same):
        differs_at = same.index(False)
        sequence = torch.cat([ids, ids.new_tensor([expected[:differs_at]])], dim=1)
        logits = model(sequence, cache=DynamicCache(config=model.config), logits_to_keep=1).logits[0, -1]
        gap = float(logits[expected[differs_at]] - logits[got[differs_at]])
    return Tokens(way, sum(same), len(same), seconds, seconds / stock_s, differs_at, gap)
