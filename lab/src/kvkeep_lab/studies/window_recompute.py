"""``window-recompute``: HellaSwag and perplexity with a recompute that ignores sliding windows (KV-Direct's section
5.4, arXiv:2603.19664: Gemma 3 4B falls from 49.2 to 25.0 %), and with recomputes that omit another step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import layers_of
from kvkeep.models.binding import bind
from kvkeep_lab.studies.base import Count, Study, Trial
from kvkeep_lab.studies.patching import replacing
from kvkeep_lab.studies.windows import text_length, without_windows
from kvkeep_lab.subject import Subject
from kvkeep_lab.tables import Table, number, percent
from kvkeep_lab.tasks.base import Metric
from kvkeep_lab.tasks.rows import drawn, rows, source

FULL, DIRECT, BLIND, TURNED, UNSCALED = (
    "full cache", "kv-direct, residuals", "without windows", "rotated as full layers are", "embeddings unscaled",
)  # fmt: skip
ROWS = "hellaswag_val_first500.jsonl"
"""File in the data folder: objects with ctx, endings and label. A command accepts any such file."""

SCORED = 256
"""Number of last tokens of a long text for the perplexity. All of them are beyond the window."""


@dataclass(frozen=True)
class WindowAccuracy:
    """One way."""

    way: str
    right: float
    """Share of rows whose most likely ending is the right one."""
    same: float
    """Share of rows whose most likely ending is that of the full cache."""
    perplexity: float | None
    """Perplexity of a text's last tokens; None if no text is longer than the windows."""


@dataclass(frozen=True)
class Recomputes:
    """All ways."""

    rows: list[WindowAccuracy]
    count: int
    longest: int
    """Tokens of the longest row with its ending."""
    window: int
    text_tokens: int
    """Tokens of the long text; 0 without a text."""

    def of(self, way: str) -> WindowAccuracy:
        """Return the measurements of one way."""
        return next(row for row in self.rows if row.way == way)


class WindowRecompute(Study):
    """The limit in KV-Direct's section 5.4: the loss of accuracy on a model with sliding windows, and its reason."""

    name = "window-recompute"
    about = "HellaSwag and perplexity of recomputes that leave out windows, or another part of a Gemma"
    protocol = (
        "The ending with the greatest sum of ln p, in one pass without a cache (kv-direct: a context within its least "
        "budget, from residuals). Without windows every layer attends to all; rotated as full layers are: sliding "
        "layers with the full layers' angles; unscaled: embeddings without the model's factor, as a loop over layers "
        "has them that leaves it out. Perplexity: of the last tokens of the rows put together, beyond the window."
    )
    found = Recomputes
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("full", "right with the full cache"),
        Metric("blind", "right without windows"),
        Metric("same", "rows with the full cache's answer, without windows"),
        Metric("direct", "rows with the full cache's answer, kv-direct from residuals"),
        Metric("unscaled", "right with unscaled embeddings"),
        Metric("worse", "perplexity beyond the window without windows, by the full cache's", "lower", "number"),
    )
    text = "needed"

    samples: Count = Field(100, description="number of rows; a seed above 0 draws other rows")
    budget: str = Field("16", description="cache budget of kv-direct")
    scored: Count = Field(SCORED, description="number of last tokens that perplexity is measured on")

    def sources(self, data: Path | None) -> list[Path]:
        return [source(data, ROWS)]

    @torch.no_grad()
    def measure(self, trial: Trial) -> Recomputes:
        model, tokenizer = trial.model, trial.tokenizer
        geometry, found = ModelGeometry.from_config(model.config), rows(trial.sources[0], "ctx", "endings", "label")
        taken = drawn(found, self.samples, trial.seed or 0, f"'{trial.sources[0].name}' has {len(found)} rows")
        window = max((layer.window or 0 for layer in geometry.sliding_layers), default=0)
        likely: dict[str, list[int]] = {way: [] for way in (*_WAYS, DIRECT)}
        longest, direct = 0, Subject(trial.loaded, "window+checkpoint:residual", self.budget)
        for done, row in enumerate(taken):
            trial.progress("rows", done, len(taken) + 1)
            context = list(tokenizer(row["ctx"]).input_ids)
            endings = [list(tokenizer(f"{row['ctx']} {ending}").input_ids) for ending in row["endings"]]
            longest = max(longest, *map(len, endings))
            for way, within in _WAYS.items():
                sums = [_log_likelihood(model, ids, len(ids) - len(context), within) for ids in endings]
                likely[way].append(_best(sums))
            weighed, _ = direct.weigh(context, [ids[len(context) :] for ids in endings])
            likely[DIRECT].append(_best([sum(one.logs) for one in weighed]))
        text = " ".join(f"{row['ctx']} {row['endings'][row['label']]}" for row in found)
        length = text_length(geometry)
        ids = list(tokenizer(text, verbose=False).input_ids)[:length]
        scored = min(self.scored, len(ids) - window) if len(ids) > window else 0
        labels = [row["label"] for row in taken]
        measured = []
        for way, answers in likely.items():
            perplexity = None
            if scored and way in _WAYS:
                perplexity = math.exp(-_log_likelihood(model, ids, scored, _WAYS[way]) / scored)
            measured.append(
                WindowAccuracy(way, _agreement(answers, labels), _agreement(answers, likely[FULL]), perplexity)
            )
        return Recomputes(measured, len(taken), longest, window, len(ids) if scored else 0)

    def scores(self, found: Recomputes) -> dict[str, float]:
        full, blind = found.of(FULL), found.of(BLIND)
        scores = {"full": full.right, "blind": blind.right, "same": blind.same}
        scores |= {"direct": found.of(DIRECT).same, "unscaled": found.of(UNSCALED).right}
        if full.perplexity and blind.perplexity:
            scores["worse"] = blind.perplexity / full.perplexity
        return scores

    def tables(self, found: Recomputes) -> list[Table]:
        beyond = f" of {found.text_tokens:,} tokens" if found.text_tokens else ""
        table = Table(
            f"{found.count} rows of at most {found.longest} tokens, windows of {found.window:,}",
            ["way", "right", "the full cache's answer", f"perplexity of the last {self.scored}{beyond}"],
            notes=["The paper's recompute, Gemma 3 4B: 49.2 to 25.0 %, perplexity worse by orders of magnitude."],
        )
        for row in found.rows:
            perplexity = "-" if row.perplexity is None else number(row.perplexity)
            table.rows.append([row.way, percent(row.right), percent(row.same), perplexity])
        return [table]


def _best(sums: list[float]) -> int:
    return max(range(len(sums)), key=sums.__getitem__)


def _agreement(answers: list[int], others: list[int]) -> float:
    return fmean(a == b for a, b in zip(answers, others, strict=True))


def _log_likelihood(
    model: Any, ids: list[int], count: int, within: Callable[[Any, int], AbstractContextManager[None]]
) -> float:
    """Return the sum of ln p of the last ``count`` of ``ids``, in one pass within the block ``within``."""
    given = torch.tensor([ids], device=model.device)
    with within(model, len(ids)):
        logits = model(given, use_cache=False, logits_to_keep=count + 1).logits[0, :-1]
    return -float(F.cross_entropy(logits.double(), given[0, -count:], reduction="sum"))


@contextmanager
def _rotated_alike(model: Any, length: int) -> Iterator[None]:
    """Rotate in sliding layers by the angles of full layers, in a family with separate angles."""
    decoder, geometry = bind(model).decoder, ModelGeometry.from_config(model.config)
    kinds = getattr(decoder.config, "layer_types", None)
    with ExitStack() as stack:
        if geometry.sliding_layers and geometry.full_layers and kinds and len(set(kinds)) == 2:
            positions = torch.arange(length, device=model.device).unsqueeze(0)
            like = next(decoder.parameters()).new_zeros(1, length, 1)
            angles = decoder.rotary_emb(like, positions, kinds[geometry.full_layers[0].index])
            for layer in geometry.sliding_layers:
                stack.enter_context(replacing(layers_of(decoder)[layer.index], position_embeddings=angles))
        yield


@contextmanager
def _unscaled(model: Any, length: int) -> Iterator[None]:
    """Omit the factor of Gemma's embeddings."""
    handle = model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: F.embedding(args[0], module.weight)
    )
    try:
        yield
    finally:
        handle.remove()


_WAYS: dict[str, Callable[[Any, int], AbstractContextManager[None]]] = {
    FULL: lambda model, length: nullcontext(),
    BLIND: lambda model, length: without_windows(model),
    TURNED: _rotated_alike,
    UNSCALED: _unscaled,
}
