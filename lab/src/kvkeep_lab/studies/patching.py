"""``patching``: another prompt's residuals at one layer, and what the rest of the model makes of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvkeep.models.loading import Loaded
from kvkeep_lab.figures import COLOURS, DPI, WIDTH_PX, plain, save
from kvkeep_lab.patching import DONOR, RECIPIENT, Patching, patching
from kvkeep_lab.studies.base import Progress, Study
from kvkeep_lab.tables import Table, number
from kvkeep_lab.tasks.base import Metric


@dataclass(frozen=True)
class Patches:
    """By layer."""

    rows: list[Patching]


class Patched(Study):
    """KV-Direct's Fig. 8."""

    name = "patching"
    about = "residual patching: a donor's residuals in a recipient's pass, layer by layer"
    protocol = (
        f"The donor asks '{DONOR}', the recipient '{RECIPIENT}'. At each layer in turn all of the recipient's "
        "residuals are replaced by the donor's; KL (patched || donor) of the next token's distributions, in nats."
    )
    found = Patches
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("kl", "largest KL of all layers whose input is all that is handed on (nats)", "lower", "number"),
        Metric("layers", "layers at which it is exactly 0"),
    )
    certain = ("kl", "layers")

    def measure(self, loaded: Loaded, sources: Sequence[Path], seed: int, progress: Progress) -> Patches:
        """Patch every layer."""
        rows: list[Patching] = []
        total = loaded.model.config.get_text_config(decoder=True).num_hidden_layers
        for row in patching(loaded.model, loaded.tokenizer):
            rows.append(row)
            progress("layers", len(rows), total)
        return Patches(rows)

    def scores(self, found: Patches) -> dict[str, float]:
        """Return the largest KL, and the share of layers without any."""
        claimed = [row for row in found.rows if not row.also_reads]
        if not claimed:
            return {}
        zero = sum(row.kl == 0 for row in claimed) / len(claimed)
        return {"kl": max((row.kl for row in claimed), key=abs), "layers": zero}

    def tables(self, found: Patches) -> list[Table]:
        """Return a line for layers whose residuals are all there is, and one for each other reason."""
        table = Table(
            "KL by layers",
            ["what later layers read", "layers", "with KL = 0", "largest KL", "the paper's"],
            notes=["The paper: 0 at all 30 layers of SmolLM2-135M and all 24 of Qwen2.5-0.5B."],
        )
        for reads in dict.fromkeys(row.also_reads for row in found.rows):
            mine = [row for row in found.rows if row.also_reads == reads]
            worst = max((row.kl for row in mine), key=abs)
            told = f"the residual, and {reads}" if reads else "the residual alone"
            counts = [f"{len(mine)}", f"{sum(row.kl == 0 for row in mine)}"]
            table.rows.append([told, *counts, number(worst), "" if reads else "0"])
        return [table]

    def draw(self, found: Patches, path: str | os.PathLike[str], *, title: str) -> None:
        """Draw the KL at each layer; what is 0 lies on the axis."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH_PX / DPI, 3), dpi=DPI, layout="constrained")
        axes: Any = figure.subplots()
        for place, (alone, words) in enumerate(((True, "nothing else is read"), (False, "something else is, too"))):
            mine = [row for row in found.rows if (not row.also_reads) == alone]
            if mine:
                layers, sizes = [row.layer for row in mine], [abs(row.kl) for row in mine]
                axes.plot(layers, sizes, "o", color=COLOURS[place], label=words, clip_on=False)
        axes.set_yscale("symlog", linthresh=1e-12)
        axes.set_ylim(0, 100)
        axes.set_xlabel("layer whose input is replaced")
        axes.set_title("|KL (patched || donor)|, nats", loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=8)
        plain(axes, "both")
        figure.suptitle(title, fontsize=11)
        save(figure, path)
