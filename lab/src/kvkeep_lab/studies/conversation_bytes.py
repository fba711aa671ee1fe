"""``conversation-bytes``: KV-Direct's claim about a conversation with a 12B model (arXiv:2603.19664, section 5.5),
checked by arithmetic from published shapes: 978 MB after 20 turns, or 150 MB and turns of 4 seconds instead of 13.

The paper does not name the model or the tokens of a turn. Its source [49] has Gemma 3 12B. For the same benchmark with
Gemma 3 4B the paper gives 103 MB, which determines the number of tokens."""

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
    """One interpretation of the claim."""

    name: str
    megabyte: int
    """Bytes of a megabyte."""
    itemsize: int
    """Bytes of an element."""
    windowed: bool
    """Whether sliding layers store only their window, instead of every token."""
    token_bytes: int
    """Bytes of a token's keys and values: in every layer, or in the full layers if the others are windowed."""
    tokens: float
    """Number of tokens whose entries have the claimed bytes."""
    beside_tokens: float
    """The same number for the smaller model."""
    same_mb: float
    """Megabytes of the larger model after the tokens of the smaller model's conversation."""
    resident: float
    """Entries per layer within the budget, with a residual for each of the other ``tokens`` (Eq. 28); negative if the
    residuals exceed the budget."""
    most: float
    """Maximum tokens within the budget with one residual per layer and without entries."""


@dataclass(frozen=True)
class Readings:
    """All interpretations."""

    rows: list[ConversationReading]
    turns: int
    step: float
    """Bytes that a step reads (weights of the layers, keys and values): ratio of those without and with a budget."""


_WAYS = (
    ("every layer keeps every token", 10**6, 2, False),
    ("the same, MB of 1,024² bytes", 2**20, 2, False),
    ("the same, 4 bytes an element", 10**6, 4, False),
    ("sliding layers keep their windows", 10**6, 2, True),
)
"""The first interpretation is that of the paper's Table 1 for its 4B model."""


class ConversationBytes(Study):
    """KV-Direct's claim about 12B parameters (section 5.5), computed without weights and without a conversation."""

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
    """Return the bytes of keys and values of ``tokens`` tokens. If ``windowed``, a sliding layer stores at most its
    window."""
    bounds = [layer.window if windowed and layer.kind == "sliding" else None for layer in geometry.layers]
    return geometry.dtype_bytes * sum(
        layer.entry_elements * (tokens if bound is None else min(tokens, bound))
        for layer, bound in zip(geometry.layers, bounds, strict=True)
    )


def tokens_of(geometry: ModelGeometry, size: float, windowed: bool) -> float:
    """Return the number of tokens whose keys and values have ``size`` bytes: the inverse of :func:`bytes_of`. That
    function rises and is linear between one window's length and the next."""
    before = 0.0
    windows = {layer.window for layer in geometry.sliding_layers if layer.window} if windowed else set()
    for window in sorted(windows):
        if bytes_of(geometry, window, windowed) >= size:
            break
        before = float(window)
    size_before = bytes_of(geometry, before, windowed)
    return before + (size - size_before) / (bytes_of(geometry, before + 1, windowed) - size_before)
