"""``rebuilt``: keys and values rebuilt from residuals, against the cached ones (KV-Direct's Table 2, and what its
section 5.4 finds beyond sliding windows)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import DynamicCache

from kvkeep.geometry import ModelGeometry
from kvkeep.models.adapter import Adapter
from kvkeep.models.binding import bind
from kvkeep_lab.figures import FilePath, dress, panels, styled
from kvkeep_lab.prompts import built_in
from kvkeep_lab.statistics import each, where
from kvkeep_lab.studies.base import Study, Trial
from kvkeep_lab.studies.windows import Difference, Windows, beyond_the_window, difference, observed, text_length
from kvkeep_lab.tables import Table
from kvkeep_lab.tasks.base import Metric

SINGLE_ROWS = 16
"""Tokens, spread evenly over the text, that are also rebuilt one by one."""


@dataclass(frozen=True)
class LayerDifference:
    """One layer's. same: all rows at once, the shapes of the forward pass. pages: a third of the rows at a time.
    rows: single tokens. Sums may run in another order where the shapes are others."""

    layer: int
    same: Difference
    pages: Difference
    rows: Difference


@dataclass(frozen=True)
class Reconstruction:
    """The largest of all layers of one ``kind`` ("full", "sliding"), in one dtype and at one length."""

    dtype: str
    length: int
    kind: str
    same: Difference
    pages: Difference
    rows: Difference
    layers: tuple[LayerDifference, ...]

    @property
    def holds(self) -> bool:
        """With the same shapes, not a bit differs; other shapes are reported, nothing is claimed of them."""
        return self.same.none


_PARTS = {"same": "same shapes", "pages": "by pages", "rows": "by single rows"}


@dataclass(frozen=True)
class Differences:
    """By dtype, length and kind of layer, and beyond sliding windows where there are."""

    rows: list[Reconstruction]
    windows: Windows | None


class Rebuilt(Study):
    """KV-Direct's Table 2, and what its section 5.4 finds beyond sliding windows."""

    name = "rebuilt"
    about = "keys and values rebuilt from residuals against the cached ones, by length and dtype"
    protocol = (
        "One forward pass; then every layer's keys and values are projected again from the residuals that entered it, "
        "by the layer's own modules: with the same shapes, by pages of a third, and by single rows (other shapes may "
        "add up in another order). Largest absolute difference of all layers of a kind."
    )
    found = Differences
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("keys", "max |ΔK|, same shapes", "lower", "number"),
        Metric("values", "max |ΔV|, same shapes", "lower", "number"),
        Metric("window", "max |ΔK| in what a window holds", "lower", "number"),
    )
    certain = ("keys", "values", "window")

    lengths: list[int] = Field([16, 32, 64, 128, 256], min_length=1, description="tokens")
    dtypes: list[Literal["float32", "bfloat16", "float16"]] = Field(
        ["float32", "bfloat16", "float16"], min_length=1, description="the model is cast to"
    )

    def measure(self, trial: Trial) -> Differences:
        model, tokenizer = trial.model, trial.tokenizer
        beyond = text_length(ModelGeometry.from_config(model.config), new=6)
        steps = len(self.dtypes) * len(self.lengths) + bool(beyond)
        ids = built_in(tokenizer, max(self.lengths))
        rows: list[Reconstruction] = []
        for place, name in enumerate(self.dtypes):
            for row in reconstruction(model, ids, self.lengths, name):
                rows.append(row)
                done = place * len(self.lengths) + self.lengths.index(row.length) + 1
                trial.progress(f"{row.length} tokens in {name}", done, steps)
        windows = None
        if beyond:
            trial.progress("sliding windows", steps - 1, steps)
            windows = beyond_the_window(model, built_in(tokenizer, beyond), new=6)
        return Differences(rows, windows)

    def plain(self, found: Differences) -> Any:
        return super().plain(replace(found, rows=[replace(row, layers=()) for row in found.rows]))

    def scores(self, found: Differences) -> dict[str, float]:
        """Return the largest differences."""
        scores = {name: max(getattr(row.same, name) for row in found.rows) for name in ("keys", "values")}
        return scores if found.windows is None else scores | {"window": found.windows.held.keys}

    def tables(self, found: Differences) -> list[Table]:
        """Return Table 2, and another of what lies beyond windows."""
        table = Table(
            "Rebuilt against cached: max |ΔK|, max |ΔV|",
            ["dtype, layers", "tokens", *_PARTS.values()],
            notes=["The paper: 0, 0 for full layers at 16 to 256 tokens in four dtypes; > 0, 0 for sliding ones."],
        )
        for row in found.rows:
            sizes = [str(getattr(row, part)) for part in _PARTS]
            table.rows.append([f"{row.dtype}, {row.kind}", f"{row.length}", *sizes])
        return [table] if found.windows is None else [table, found.windows.table()]

    def draw(self, found: Differences, path: FilePath, *, title: str) -> None:
        """Draw the largest difference by length, dtype and shapes; 0 lies on the axis."""
        title = f"{title}: largest difference of keys and values"
        lines = each(found.rows, "dtype", "kind")
        with panels(path, title, 3, 4.2, sharey=True) as grid:
            for axes, (part, words) in zip(grid, _PARTS.items(), strict=True):
                for place, (dtype, kind) in enumerate(lines):
                    mine = where(found.rows, dtype=dtype, kind=kind)
                    lengths, parts = [row.length for row in mine], [getattr(row, part) for row in mine]
                    style = styled(place, f"{dtype}, {kind} layers", None)
                    axes.plot(lengths, [max(one.keys, one.values) for one in parts], clip_on=False, **style)
                dress(axes, words, "tokens", x="log2", legend=axes is grid[0])
                axes.set_yscale("symlog", linthresh=1e-8)
                axes.set_ylim(bottom=0)


@torch.no_grad()
def reconstruction(model: Any, ids: Tensor, lengths: Sequence[int], name: str) -> Iterator[Reconstruction]:
    """Rebuild keys and values from the residuals of a forward pass in the dtype called ``name``, for each length.

    In another dtype than the model's a copy is cast, and dropped afterwards. Keys of sliding layers are compared at
    all positions, the windowed cache's own in :mod:`kvkeep_lab.studies.windows`.
    """
    bind(model)
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    cast = model if next(model.parameters()).dtype == dtype else copy.deepcopy(model).to(dtype)
    adapter = Adapter(cast)
    geometry = ModelGeometry.from_config(model.config)
    for length in lengths:
        # A cache without a config keeps what sliding layers would drop, so that all of it can be compared.
        entering, cache = observed(adapter.decoder, ids[:, :length], DynamicCache())
        for kind in ("full", "sliding"):
            layers = tuple(
                _layer(adapter, layer.index, entering[layer.index], cache.layers[layer.index])
                for layer in geometry.layers
                if layer.kind == kind
            )
            if layers:
                same, pages, rows = (reduce(or_, (getattr(layer, part) for layer in layers)) for part in _PARTS)
                yield Reconstruction(name, length, kind, same, pages, rows, layers)


def _layer(adapter: Adapter, index: int, hidden: Tensor, held: Any) -> LayerDifference:
    length = hidden.shape[1]
    positions = torch.arange(length, device=hidden.device).unsqueeze(0)

    def span(low: int, high: int) -> Difference:
        rebuilt = adapter.project(index, hidden[:, low:high], positions[:, low:high])
        return difference(rebuilt, (held.keys[..., low:high, :], held.values[..., low:high, :]))

    page = max(1, length // 3)
    singles = sorted({number * length // SINGLE_ROWS for number in range(SINGLE_ROWS)} | {length - 1})
    return LayerDifference(
        index,
        span(0, length),
        reduce(or_, (span(low, min(low + page, length)) for low in range(0, length, page))),
        reduce(or_, (span(at, at + 1) for at in singles)),
    )
