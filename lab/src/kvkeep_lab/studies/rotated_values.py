"""``rotated-values``: answers with codes of rotated values, against answers with codes of the values themselves.

:mod:`~kvkeep_lab.studies.rotation` measures the errors of attention; this study measures what they do to the model's
predictions. No kernel is changed: W_v is multiplied by a rotation of each head, and W_o by its inverse. All values that
a cache receives are then rotated, exact and coded ones, and the output of attention is rotated back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from kvkeep.errors import UnsupportedModelError
from kvkeep.models.binding import bind
from kvkeep.models.packed import PackedLinear, quantised
from kvkeep_lab.reading import Readings, cache_for, read, read_text
from kvkeep_lab.reference import ReferenceCase, judge
from kvkeep_lab.statistics import estimate, where
from kvkeep_lab.studies.base import Count, Study, Trial
from kvkeep_lab.studies.rotation import hadamard
from kvkeep_lab.subject import Subject
from kvkeep_lab.tables import Table, number, percent, spread
from kvkeep_lab.tasks.base import Metric
from kvkeep_lab.tasks.match import Match
from kvkeep_lab.tasks.needles import KINDS, Needles
from kvkeep_lab.tasks.texts import text_files

FULL = ReferenceCase("full")
CASES = {
    "quantize-8": ReferenceCase("h2o:halflife=256+quantize:8,exact=8+oneshot", "65%"),
    "quantize-4": ReferenceCase("h2o:halflife=256+quantize:4,exact=8+oneshot", "40%"),
    "quantize-2": ReferenceCase("h2o:halflife=256+quantize:2,exact=8+oneshot", "30%"),
    "tiers": ReferenceCase("h2o+tiers+oneshot", "25%"),
    "revive": ReferenceCase("revive+oneshot", "25%"),
    "revive-10": ReferenceCase("revive+oneshot", "10%"),
}
"""The quantised caches. They read a text at once, so that all of them share one pass over it. The budgets of
``quantize`` hold all entries of the default sizes."""


@dataclass(frozen=True)
class RotatedRow:
    """One cache, with values rotated or not."""

    case: str
    """``full`` or a name of :data:`CASES`."""
    rotated: bool
    kl: list[float]
    """Mean KL to the full cache, teacher-forced, in nats, for each passage."""
    loglik: list[float]
    """Mean ln p of a token of the right answer, for each needle."""
    match: list[float]
    """String match, for each needle."""


@dataclass(frozen=True)
class RotatedAnswers:
    """All caches."""

    rows: list[RotatedRow]

    def pair(self, case: str) -> tuple[RotatedRow, RotatedRow]:
        """Return the rows of a case: with values as they are, and rotated."""
        plain, rotated = where(self.rows, case=case)
        return plain, rotated

    def factors(self, case: str) -> list[float]:
        """Return ln of the factor by which rotated values change the KL of each passage."""
        pairs = zip(*(row.kl for row in self.pair(case)), strict=True)
        return [math.log(rotated / plain) for plain, rotated in pairs if plain and rotated]


class RotatedValues(Study):
    """KL and needles with codes of values and of rotated values."""

    name = "rotated-values"
    about = "KL and needles of quantised caches, with and without a rotation (Hadamard) of values"
    protocol = (
        "The full cache continues passages greedily. The other caches are given the same tokens one by one, and their "
        "KL is that to the full cache with the same weights. Needles are those of the task 'needles' (essays, unseen). "
        "All is measured twice, with the same texts, tokens, budgets and bits: with the model, and with values that "
        "are rotated by a Hadamard matrix as wide as a head (W_v) and outputs that are rotated back (W_o)."
    )
    found = RotatedAnswers
    metrics: ClassVar[tuple[Metric, ...]] = tuple(
        Metric(case, f"ln of the factor by which rotated values change the KL, {case}", "lower", "number")
        for case in CASES
    )
    text = "needed"

    tokens: Count = Field(512, description="tokens of a passage")
    new: int = Field(24, ge=2, description="tokens that continue a passage")
    passages: Count = Field(3, description="number of passages")
    length: int = Field(512, ge=64, description="tokens of the text with needles, answer included")
    questions: int = Field(2, ge=1, le=KINDS["essays"].keys, description="number of needles that are asked for")

    def sources(self, data: Path | None) -> list[Path]:
        return text_files(data)

    def measure(self, trial: Trial) -> RotatedAnswers:
        given, seed = (trial.tokenizer, trial.sources), trial.seed or 0
        match = Match.model_validate({"length": [self.tokens], "new": self.new, "samples": self.passages})
        passages = list(enumerate(match.prepare(*given, {"length": self.tokens}, seed)))
        needles = Needles.model_validate({"length": [self.length], "samples": 1})
        prepared = needles.prepare(*given, {"length": self.length, "kind": "essays", "question": "unseen"}, seed)
        questions = prepared[:: len(prepared) // self.questions][: self.questions]
        rows: list[RotatedRow] = []
        texts: list[list[int]] = []  # the full cache's continuations
        for rotated in (False, True):
            with rotated_values(trial.model) if rotated else nullcontext():
                readings: Readings = {}
                logits = partial(self._logits, trial.model, readings)
                full = [logits(FULL, one.ids, texts[place] if texts else None) for place, one in passages]
                texts = texts or [[int(one.argmax()) for one in continued] for continued in full]
                for name, case in {FULL.method: FULL, **CASES}.items():
                    trial.progress(f"{case.label}{', rotated' if rotated else ''}", len(rows), 2 * (1 + len(CASES)))
                    found = full if case is FULL else [logits(case, one.ids, texts[place]) for place, one in passages]
                    kl = [_divergence(*one) for one in zip(full, found, texts, strict=True)]
                    subject = Subject(trial.loaded, case.method, case.budget, readings=readings)
                    scores = [needles.measure(subject, sample).scores for sample in questions]
                    answers = ([one[score] for one in scores] for score in ("loglik", "match"))
                    rows.append(RotatedRow(name, rotated, kl, *answers))
        return RotatedAnswers(rows)

    def _logits(
        self, model: Any, readings: Readings, case: ReferenceCase, ids: Sequence[int], text: Sequence[int] | None
    ) -> list[Tensor]:
        """Return the logits of :attr:`new` positions after a passage that is continued by ``text``, or greedily."""
        cache = cache_for(model, case.method, case.budget, len(ids) + self.new)
        prompt = torch.tensor([list(ids)], device=model.device)
        first = read_text(model, prompt, cache, readings)
        return [logits for logits, _ in read(model, prompt, first.cache, self.new, text, first)]

    def scores(self, found: RotatedAnswers) -> dict[str, float]:
        return {case: fmean(logs) for case in CASES if (logs := found.factors(case))}

    def joined(self, found: Sequence[RotatedAnswers]) -> RotatedAnswers:
        groups = zip(*(one.rows for one in found), strict=True)
        return RotatedAnswers([reduce(_with, rows) for rows in groups])

    def tables(self, found: RotatedAnswers) -> list[Table]:
        first = found.rows[0]
        table = Table(
            f"{len(first.kl)} passages of {self.tokens:,} tokens, {len(first.match)} needles in {self.length:,}",
            ["cache", "KL", "rotated", "factor", "ln p of needles", "more", "found", "rotated"],
            notes=[
                "KL in nats. Rotated: with rotated values. Factor: the geometric mean over passages of the KL with "
                "rotated values by that without. In brackets: 95 % bootstrap intervals over passages, or needles."
            ],
        )
        for name, case in {FULL.method: FULL, **CASES}.items():
            pair = found.pair(name)
            kl, logs, matches = ([fmean(getattr(row, part)) for row in pair] for part in ("kl", "loglik", "match"))
            factors = found.factors(name)
            factor = spread(estimate(factors) if factors else None, lambda value: f"{math.exp(value):.2f}")
            more = [b - a for a, b in zip(*(row.loglik for row in pair), strict=True)]
            shown = [*map(number, kl), factor, number(logs[0]), spread(estimate(more), lambda value: f"{value:+.2g}")]
            table.rows.append([f"`{case.label}`", *shown, *(percent(value, 0) for value in matches)])
        return [table]


def _with(one: RotatedRow, other: RotatedRow) -> RotatedRow:
    """Return a row of the passages and needles of both."""
    kl, loglik, match = one.kl + other.kl, one.loglik + other.loglik, one.match + other.match
    return replace(one, kl=kl, loglik=loglik, match=match)


def _divergence(expected: Sequence[Tensor], found: Sequence[Tensor], text: Sequence[int]) -> float:
    return fmean(judge(*one).kl for one in zip(expected, found, text, strict=True))


@contextmanager
def rotated_values(model: Any) -> Iterator[None]:
    """Within the block the weights of ``model`` rotate the values of each head by a Hadamard matrix, and the outputs of
    attention back, so that its predictions stay the same, up to rounding. Raises UnsupportedModelError for attention
    without projections of its values and outputs, and for weights in other formats than float32 and bfloat16."""
    adapter, before = bind(model), list[tuple[Tensor, Tensor]]()
    with torch.no_grad():
        try:
            for layer in adapter.layers:
                attention: Any = getattr(layer, "self_attn", None)
                for name in ("v_proj", "o_proj"):
                    if (module := getattr(attention, name, None)) is None:
                        raise UnsupportedModelError(f"'{adapter.family}' has no {name} of its own to rotate values.")
                    before += ((tensor, tensor.clone()) for tensor in _tensors(module))
                    _rotate(module, hadamard(attention.head_dim), name)
            yield
        finally:
            for tensor, stored in before:
                tensor.copy_(stored)


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return the weight of a linear layer, as it is stored, and its bias if it has one."""
    if not (type(module) is nn.Linear or (isinstance(module, PackedLinear) and module.kind == "BF16")):
        raise UnsupportedModelError("Only weights in float32 and bfloat16 can rotate values; use --weights bfloat16.")
    weight = module.data if isinstance(module, PackedLinear) else module.weight
    return [weight] if module.bias is None else [weight, module.bias]


def _rotate(module: Any, turn: Tensor, name: str) -> None:
    """Rotate the heads that a ``v_proj`` returns or an ``o_proj`` takes, in place: fused layers share the storage."""
    packed, dim = isinstance(module, PackedLinear), len(turn)
    weight = module.dense() if packed else module.weight
    turn = turn.to(weight)
    if name == "o_proj":
        weight = (weight.unflatten(1, (-1, dim)) @ turn).flatten(1)
    else:
        weight = (turn @ weight.unflatten(0, (-1, dim))).flatten(0, 1)
        if module.bias is not None:
            module.bias.copy_((module.bias.to(turn).unflatten(0, (-1, dim)) @ turn).flatten())
    if packed:
        module.data.copy_(PackedLinear(quantised(weight, 16)).data)
    else:
        module.weight.copy_(weight)
