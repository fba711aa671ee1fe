"""``conversation-bytes``: what KV-Direct says of a conversation with a model of 12B (arXiv:2603.19664, section 5.5), by
arithmetic from published shapes: 978 MB after 20 turns, or 150 MB and turns of 4 seconds instead of 13.

The paper names neither the model nor the tokens of a turn. Its source [49] has Gemma 3 12B, and of the same benchmark
with Gemma 3 4B the paper gives 103 MB, from which tokens follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from kvkeep.geometry import ModelGeometry
from kvkeep_lab.shapes import Shape, config_of, weights_of
from kvkeep_lab.studies.base import Count, Study, Trial
from kvkeep_lab.tables import Table, fixed, number, times
from kvkeep_lab.tasks.base import Metric


@dataclass(frozen=True)
class ConversationReading:
    """The claim, read in one way: what a megabyte is, how many bytes an element has, and whether sliding layers keep
    their windows alone (``windowed``) or every token.

    token_bytes: keys and values of a token in every layer, or in the full layers where the others keep windows. tokens:
    so many have the bytes that are claimed; beside_tokens: so many have those of the smaller model. same_mb: of the
    larger one, after as many tokens as the smaller model's conversation has. resident: entries of every layer within
    the budget, a residual for each of the other ``tokens`` beside them (Eq. 28); negative where residuals alone take
    more. most: tokens that the budget holds if there is a residual for each layer and nothing else.
    """

    name: str
    megabyte: int
    itemsize: int
    windowed: bool
    token_bytes: int
    tokens: float
    beside_tokens: float
    same_mb: float
    resident: float
    most: float


@dataclass(frozen=True)
class Readings:
    """All of them. step: bytes that one step reads without a budget by those with it: the layers' weights, and keys and
    values."""

    rows: list[ConversationReading]
    turns: int
    step: float


_WAYS = (
    ("every layer keeps every token", 10**6, 2, False),
    ("the same, MB of 1,024² bytes", 2**20, 2, False),
    ("the same, 4 bytes an element", 10**6, 4, False),
    ("sliding layers keep their windows", 10**6, 2, True),
)
"""The first is what the paper's Table 1 has for its 4B model."""


class ConversationBytes(Study):
    """KV-Direct's sentence on 12B parameters, section 5.5: no weights, and no conversation."""

    name = "conversation-bytes"
    about = "tokens and bytes that a claim about a conversation amounts to, from published shapes"
    protocol = (
        "From configs alone. The bytes claimed of the larger model are divided by those of a token, in every way that "
        "they can be read; so are the bytes claimed of the smaller model, for the tokens of its conversation. Then "
        "what a budget holds by Eq. 28, and with a residual for each layer, which is what one matrix product a layer "
        "rebuilds from (Eq. 26)."
    )
    found = Readings
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("turn", "tokens a turn that the bytes amount to", "lower", "number"),
        Metric("same", "MB after the smaller model's conversation", "lower", "number"),
        Metric("one", "share of the tokens within the budget, one residual for each (Eq. 28)"),
        Metric("each", "share of the tokens within the budget, a residual for each layer"),
        Metric("step", "bytes read by a step without a budget, by those with it", "higher", "number"),
    )
    certain = ("turn", "same", "one", "each", "step")

    shape: Shape = Field("gemma3-12b", description="the larger model")
    megabytes: float = Field(978, gt=0, description="of its cache at the end")
    beside: Shape = Field("gemma3-4b", description="the smaller model, whose conversation has as many turns")
    beside_megabytes: float = Field(103, gt=0, description="of its cache at the end")
    budget: float = Field(150, gt=0, description="megabytes")
    turns: Count = Field(20, description="of both")
    weight_bits: float = Field(4, gt=0, description="of a weight, for the bytes that a step reads")

    def measure(self, trial: Trial) -> Readings:
        rows = [self._read(*way) for way in _WAYS]
        weights = weights_of(self.shape) * self.weight_bits / 8
        step = (weights + self.megabytes * 1e6) / (weights + self.budget * 1e6)
        return Readings(rows, self.turns, step)

    def _read(self, name: str, megabyte: int, itemsize: int, windowed: bool) -> ConversationReading:
        large, small = (ModelGeometry.from_config(config_of(shape), itemsize) for shape in (self.shape, self.beside))
        tokens = tokens_of(large, self.megabytes * megabyte, windowed)
        beside = tokens_of(small, self.beside_megabytes * megabyte, windowed)
        entry, residual, budget = large.kv_bytes_per_token, large.residual_bytes_per_token, self.budget * megabyte
        size_before = large.full_bytes_per_token if windowed else entry
        return ConversationReading(
            name,
            megabyte,
            itemsize,
            windowed,
            size_before,
            tokens,
            beside,
            same_mb=bytes_of(large, beside, windowed) / megabyte,
            resident=(budget - tokens * residual) / (entry - residual),
            most=budget / (len(large.layers) * residual),
        )

    def scores(self, found: Readings) -> dict[str, float]:
        """Return those of the first reading."""
        first = found.rows[0]
        shares = {"one": float(first.resident >= 0), "each": min(1.0, first.most / first.tokens)}
        return {"turn": first.tokens / found.turns, "same": first.same_mb, **shares, "step": found.step}

    def tables(self, found: Readings) -> list[Table]:
        table = Table(
            f"{self.megabytes:g} MB of {self.shape} after {found.turns} turns, read in {len(found.rows)} ways",
            [
                "reading", "KB a token", "tokens", "a turn", f"of {self.beside}, a turn",
                f"MB after the conversation of {self.beside}", "resident within the budget, one residual a token",
                "tokens within it, one residual a layer",
            ],
            notes=[
                f"{self.beside} has {self.beside_megabytes:g} MB at the end; the budget is {self.budget:g} MB. A step "
                f"reads {times(found.step)} the bytes without it, weights of {self.weight_bits:g} bits included; the "
                "paper's turns take 13 s and 4 s."
            ],
        )  # fmt: skip
        for row in found.rows:
            turn, beside = row.tokens / found.turns, row.beside_tokens / found.turns
            sizes = [number(row.token_bytes / 1024), f"{row.tokens:,.0f}", fixed(turn, 0), fixed(beside, 1)]
            table.rows.append([row.name, *sizes, fixed(row.same_mb, 0), f"{row.resident:,.0f}", f"{row.most:,.0f}"])
        return [table]


def bytes_of(geometry: ModelGeometry, tokens: float, windowed: bool) -> float:
    """Return the bytes of keys and values of ``tokens`` tokens; of no more than its window in a sliding layer that is
    ``windowed``."""
    bounds = [layer.window if windowed and layer.kind == "sliding" else None for layer in geometry.layers]
    return geometry.dtype_bytes * sum(
        layer.entry_elements * (tokens if bound is None else min(tokens, bound))
        for layer, bound in zip(geometry.layers, bounds, strict=True)
    )


def tokens_of(geometry: ModelGeometry, size: float, windowed: bool) -> float:
    """Return how many tokens have keys and values of ``size`` bytes: the inverse of :func:`bytes_of`, which rises, and
    is straight between one window's length and the next."""
    before = 0.0
    windows = {layer.window for layer in geometry.sliding_layers if layer.window} if windowed else set()
    for window in sorted(windows):
        if bytes_of(geometry, window, windowed) >= size:
            break
        before = float(window)
    size_before = bytes_of(geometry, before, windowed)
    return before + (size - size_before) / (bytes_of(geometry, before + 1, windowed) - size_before)
