"""The figure of a long conversation: memory and latency of every turn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kvkeep.errors import UsageError
from kvkeep_lab.figures import COLOURS, DPI, MARKERS, WIDTH_PX, plain, save
from kvkeep_lab.longchat import Turn


def draw_longchat(rows: Sequence[Turn], path: str | os.PathLike[str], *, title: str) -> None:
    """Draw resident bytes (lines), checkpoints (dashed) and seconds of each turn, by method.

    Raises UsageError if there is no turn to draw, StoreError if the file cannot be written.
    """
    if not rows:
        raise UsageError("There is nothing to draw: no turn was finished.")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(WIDTH_PX / DPI, 4.6), dpi=DPI, layout="constrained")
    grid: Any = figure.subplots(1, 2)
    memory, latency = grid
    for number, name in enumerate(dict.fromkeys(row.method for row in rows)):
        mine = [row for row in rows if row.method == name]
        turns = [row.turn for row in mine]
        style: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 4,
            "markevery": max(1, len(turns) // 20),
        }
        held = [(row.memory.resident_bytes + row.memory.compressed_bytes) / 1e6 for row in mine]
        memory.plot(turns, held, label=name, **style)
        kept = [sum(row.memory.checkpoint_bytes.values()) / 1e6 for row in mine]
        if any(kept):
            places = [place for place, size in mine[-1].memory.checkpoint_bytes.items() if size]
            label = f"{name}, checkpoints on {' and '.join(places)}"
            memory.plot(turns, kept, label=label, color=style["color"], linestyle=":", linewidth=1.5)
        latency.plot(turns, [row.seconds for row in mine], label=name, **style)
    memory.set_title("Keys and values held after each turn (MB)", loc="left", fontsize=10)
    latency.set_title("Time of each turn (s)", loc="left", fontsize=10)
    for axes in (memory, latency):
        axes.set_xlabel("turn")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=9)
        plain(axes, "y")
    figure.suptitle(title, fontsize=11)
    save(figure, path)
