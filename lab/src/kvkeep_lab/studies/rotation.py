"""``rotation``: the errors of codes in attention, with and without an orthogonal rotation before entries are quantised.

llama.cpp (pull request 21038) and ik_llama.cpp (1033) multiply queries, keys and values by a Hadamard matrix, which
spreads large channels over all others: their codes have one scale for 32 channels of an entry. The products of queries
and keys stay the same, and the output is rotated back. kvkeep's keys have a scale for each channel instead (KIVI,
arXiv:2402.02750), so a large channel costs the others nothing. The study measures both kinds of entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.models.binding import bind
from kvkeep.stores.evicted.coded import CodedKeys, CodedValues, NormalisedValues, encode, encode_keys, encode_values
from kvkeep.stores.evicted.groups import GROUP
from kvkeep_lab.attention_inputs import Attended, grouped, watching
from kvkeep_lab.statistics import each, where
from kvkeep_lab.studies.base import Count, Flag, TextStudy, Trial, unique
from kvkeep_lab.tables import Table, number

ROTATED = ("neither", "keys", "values", "both")
"""What is rotated."""


class CodingErrors(NamedTuple):
    """Errors of one layer's attention, or their means over layers."""

    keys: float
    """The root of the mean square error of keys, relative to that of the keys."""
    values: float
    """The same of values."""
    kl: float
    """KL of attention weights, in nats: the mean over heads and queries."""
    output: float
    """The root of the mean square error of outputs, relative to that of the outputs."""


@dataclass(frozen=True)
class RotationRow:
    """One form of codes."""

    form: str
    """``quantize`` or ``tiers``: the fate with these codes."""
    bits: int
    rotated: str
    """One of :data:`ROTATED`."""
    errors: CodingErrors


@dataclass(frozen=True)
class RotationErrors:
    """All forms of codes."""

    tokens: int
    queries: int
    rows: list[RotationRow]


class RotationStudy(TextStudy):
    """Codes of rotated keys and values against codes of the entries themselves."""

    name = "rotation"
    about = "the errors of quantised keys and values in attention, with and without a rotation (Hadamard) before it"
    protocol = (
        "All keys and values of a passage are quantised, in groups of 32 entries as the fates 'quantize' and 'tiers' "
        "do it, and queries of the second half attend to them. Rotated are the keys (and queries), the values (and "
        "outputs, back), or both, by a Hadamard matrix as wide as a head. Means over layers."
    )
    found = RotationErrors

    tokens: Annotated[int, Flag("--limit")] = Field(
        1024, ge=GROUP, description="number of tokens to read from the text"
    )
    bits: Annotated[list[int], unique] = Field([8, 4, 2], min_length=1, description="bits of a code: 8, 4 or 2")
    queries: Count = Field(32, description="queries, over the second half")

    def check(self, files: Sequence[Path]) -> None:
        if wrong := {*self.bits} - {2, 4, 8}:
            raise UsageError(f"Entries are quantised to 8, 4 or 2 bits, not {min(wrong)}.")

    @torch.no_grad()
    def measure(self, trial: Trial) -> RotationErrors:
        bind(trial.model)
        seen: list[Attended] = []
        ids = self.passage(trial)
        ids = ids[:, : ids.shape[1] // GROUP * GROUP]
        with watching(seen.append):
            trial.model(ids, use_cache=False, logits_to_keep=1)
        tokens = ids.shape[1]
        at = torch.linspace(tokens // 2, tokens - 1, self.queries).round().long().unique()
        forms = [(form, bits, what) for form in ("quantize", "tiers") for bits in self.bits for what in ROTATED]
        rows: list[RotationRow] = []
        for form, bits, what in forms:
            trial.progress(f"{form}, {bits} bits, {what}", len(rows), len(forms))
            parts = [coding_errors(layer, at.to(layer.key.device), form, bits, what) for layer in seen]
            rows.append(RotationRow(form, bits, what, CodingErrors(*map(fmean, zip(*parts, strict=True)))))
        return RotationErrors(tokens, len(at), rows)

    def tables(self, found: RotationErrors) -> list[Table]:
        table = Table(
            f"{found.tokens:,} tokens, {found.queries} queries a head",
            ["codes", "rotated", "keys", "values", "KL of weights", "output", "output, by 'neither'"],
            notes=["Keys, values, output: root mean square errors, relative to the root mean square. KL in nats."],
        )
        for form in each(found.rows, "form"):
            for bits in each(where(found.rows, form=form), "bits"):
                plain, *_ = rows = where(found.rows, form=form, bits=bits)
                for row in rows:
                    ratio = row.errors.output / plain.errors.output
                    errors = (number(error, 3) for error in row.errors)
                    table.rows.append([f"{form}:{bits}", row.rotated, *errors, f"{ratio:.3f}"])
        return [table]


def hadamard(dim: int) -> Tensor:
    """Return a symmetric orthogonal matrix (dim, dim) whose blocks have elements of one size: Hadamard matrices of the
    largest power of two that divides ``dim``."""
    block = torch.ones(1, 1)
    while dim % (2 * len(block)) == 0:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / math.sqrt(len(block))] * (dim // len(block)))


def coding_errors(layer: Attended, at: Tensor, form: str, bits: int, rotated: str) -> CodingErrors:
    """Return the errors of the attention of one layer's queries ``at`` (positions) to codes. rotated: one of
    :data:`ROTATED`."""
    keys, values = layer.key[0].float(), layer.value[0].float()  # (kv_heads, n, dim)
    turns = [
        hadamard(part.shape[-1]).to(part) if rotated in (name, "both") else torch.eye(part.shape[-1]).to(part)
        for name, part in (("keys", keys), ("values", values))
    ]
    decoded = _decoded(keys @ turns[0], values @ turns[1], form, bits)
    new_keys, new_values = (part @ turn for part, turn in zip(decoded, turns, strict=True))
    heads = layer.query.shape[1]
    query, seen = layer.query[0, :, at].float(), layer.visible(at)[0]
    logs = [
        (query @ grouped(part[None], heads)[0].transpose(1, 2) * layer.scaling)
        .masked_fill(~seen, -math.inf)
        .log_softmax(-1)
        for part in (keys, new_keys)
    ]
    exact, noisy = (log.exp() for log in logs)
    differences = (logs[0] - logs[1]).masked_fill(~seen, 0)
    output = exact @ grouped(values[None], heads)[0]
    error = noisy @ grouped(new_values[None], heads)[0] - output
    return CodingErrors(
        _relative(new_keys - keys, keys),
        _relative(new_values - values, values),
        float((exact * differences).sum(-1).mean()),
        _relative(error, output),
    )


def _relative(error: Tensor, of: Tensor) -> float:
    return float(error.norm() / of.norm())


def _decoded(keys: Tensor, values: Tensor, form: str, bits: int) -> Sequence[Tensor]:
    """Return keys and values (lanes, n, dim) after coding, in groups of :data:`GROUP`."""
    groups = [part.unflatten(1, (-1, GROUP)).flatten(0, 1) for part in (keys, values)]
    lanes = len(keys)
    coded_keys = [part.unflatten(0, (lanes, -1)) for part in encode_keys(groups[0], bits)]
    found = CodedKeys(*coded_keys, bits).dense(torch.float32)  # type: ignore[call-arg]
    if form == "quantize":
        parts = [part.unflatten(0, (lanes, -1)) for part in encode_values(groups[1], bits)]
        return found, CodedValues(*parts, bits).dense(torch.float32)  # type: ignore[call-arg]
    mean, deviation = values.mean(1, keepdim=True), values.std(1, keepdim=True).clamp(min=1e-3)
    parts = [*encode((values - mean) / deviation, bits)]
    return found, NormalisedValues(*parts, bits, mean, deviation).dense(torch.float32)  # type: ignore[call-arg]
