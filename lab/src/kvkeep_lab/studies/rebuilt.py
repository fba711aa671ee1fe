"""``rebuilt``: keys and values rebuilt from residuals, against the cached ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from kvkeep.geometry import ModelGeometry
from kvkeep.models.loading import DTYPES, Loaded
from kvkeep_lab.figures import COLOURS, DPI, MARKERS, WIDTH_PX, plain, save
from kvkeep_lab.reconstruction import Difference, Reconstruction, reconstruction
from kvkeep_lab.studies.base import Progress, Study
from kvkeep_lab.tables import Table, number
from kvkeep_lab.tasks.base import Metric
from kvkeep_lab.verify import text_ids
from kvkeep_lab.windows import Windows, beyond_the_window, text_length


@dataclass(frozen=True)
class Differences:
    """By dtype, length and kind of layer (single layers are left out), and beyond sliding windows where there are."""

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

    def measure(self, loaded: Loaded, sources: Sequence[Path], seed: int, progress: Progress) -> Differences:
        """Rebuild and compare."""
        model, tokenizer = loaded.model, loaded.tokenizer
        geometry = ModelGeometry.from_config(model.config)
        beyond = text_length(geometry, new=6)
        steps = len(self.dtypes) * len(self.lengths) + bool(beyond)
        ids = text_ids(tokenizer, max(self.lengths))
        rows: list[Reconstruction] = []
        for place, name in enumerate(self.dtypes):
            progress(name, place * len(self.lengths), steps)
            kind = DTYPES[name]
            assert isinstance(kind, torch.dtype)
            rows += [replace(row, layers=()) for row in reconstruction(model, ids, self.lengths, kind)]
        windows = None
        if beyond:
            progress("sliding windows", steps - 1, steps)
            windows = beyond_the_window(model, text_ids(tokenizer, beyond), new=6)
        return Differences(rows, windows)

    def scores(self, found: Differences) -> dict[str, float]:
        """Return the largest differences."""
        scores = {
            "keys": max(row.same.keys for row in found.rows),
            "values": max(row.same.values for row in found.rows),
        }
        return scores if found.windows is None else scores | {"window": found.windows.held.keys}

    def tables(self, found: Differences) -> list[Table]:
        """Return Table 2, and another of what lies beyond windows."""
        table = Table(
            "Rebuilt against cached: max |ΔK|, max |ΔV|",
            ["dtype, layers", "tokens", "same shapes", "by pages", "by single rows"],
            notes=["The paper: 0, 0 for full layers at 16 to 256 tokens in four dtypes; > 0, 0 for sliding ones."],
        )
        for row in found.rows:
            sizes = [_pair(part) for part in (row.same, row.pages, row.rows)]
            table.rows.append([f"{row.dtype}, {row.kind}", f"{row.length}", *sizes])
        return [table] if found.windows is None else [table, _beyond(found.windows)]

    def draw(self, found: Differences, path: str | os.PathLike[str], *, title: str) -> None:
        """Draw the largest difference by length, dtype and shapes, in units of nothing: 0 lies on the axis."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH_PX / DPI, 4.2), dpi=DPI, layout="constrained")
        grid: Any = figure.subplots(1, 3, sharey=True)
        lines = list(dict.fromkeys((row.dtype, row.kind) for row in found.rows))
        parts = (("same", "same shapes"), ("pages", "by pages"), ("rows", "by single rows"))
        for axes, (part, words) in zip(grid, parts, strict=True):
            for place, (dtype, kind) in enumerate(lines):
                mine = [row for row in found.rows if (row.dtype, row.kind) == (dtype, kind)]
                sizes = [max(getattr(row, part).keys, getattr(row, part).values) for row in mine]
                style = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
                axes.plot([row.length for row in mine], sizes, label=f"{dtype}, {kind} layers", clip_on=False, **style)
            axes.set_xscale("log", base=2)
            axes.set_yscale("symlog", linthresh=1e-8)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("tokens")
            axes.set_title(words, loc="left", fontsize=10)
            plain(axes, "both")
        grid[0].legend(frameon=False, fontsize=8)
        figure.suptitle(f"{title}: largest difference of keys and values", fontsize=11)
        save(figure, path)


def _beyond(windows: Windows) -> Table:
    table = Table(
        f"Beyond the window ({windows.text_tokens:,} tokens, window {windows.window:,})",
        ["", "max |ΔK|, max |ΔV|", "tokens that are the stock cache's"],
        notes=["The paper's recompute knows no windows: HellaSwag falls from 49.2 to 25.0 % (section 5.4)."],
    )
    table.rows.append(["rebuilt at absolute positions, in the window", _pair(windows.held), ""])
    for kind, matching in windows.matching.items():
        table.rows.append([f"`kv-direct`, {kind}", "", f"{matching}/{windows.of}"])
    blind = f"{windows.blind_matching}/{windows.of}"
    table.rows.append(["recomputed without windows, as in the paper", _pair(windows.blind), blind])
    return table


def _pair(found: Difference) -> str:
    return f"{number(found.keys)}, {number(found.values)}"
