"""The style of figures. matplotlib is imported only to draw one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvkeep.errors import StoreError, UsageError, reason_of

FORMATS = (".png", ".svg", ".pdf")
WIDTH_PX, DPI = 1600, 160

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, distinguishable with any colour vision; markers differ as well."""

MARKERS = "osD^vPX*<>hp"

FilePath = str | os.PathLike[str]


def check_figure(path: FilePath) -> None:
    """Raise UsageError or StoreError if a figure cannot be written to ``path``. It is called before a measurement."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise UsageError(f"The figure '{target}' has to end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
    if find_spec("matplotlib") is None:
        raise UsageError("Figures are drawn with matplotlib, which is missing: pip install ./lab in a clone of kvkeep.")
    if not target.parent.is_dir():
        raise StoreError(f"The figure '{target}' cannot be written: there is no folder '{target.parent}'.")
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        raise StoreError(f"The figure '{target}' cannot be written there.")


def blank(height: float) -> Any:
    """Return an empty figure of the common width, ``height`` inches high."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_PX / DPI, height), dpi=DPI, layout="constrained")


@contextmanager
def panels(path: FilePath, title: str, count: int = 1, height: float = 4.4, **layout: Any) -> Iterator[list[Any]]:
    """Yield ``count`` axes side by side, for drawing and :func:`dress`. The figure is written to ``path`` at the end of
    the block. layout: options of ``Figure.subplots``. Raises StoreError if the file cannot be written."""
    figure = blank(height)
    yield list(figure.subplots(1, count, squeeze=False, **layout)[0])
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def dress(
    axes: Any, title: str, across: str = "", *, x: Any = None, y: Any = None, legend: bool = False, grid: str = "both"
) -> None:
    """Set the title of axes, the name of the horizontal axis, scales, a grid and a legend.

    x, y: a scale's name ("log", "log2"); None for a linear scale. y may also be a number: the lower limit.
    """
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(across)
    for scale, setting in ((x, axes.set_xscale), (y, axes.set_yscale)):
        if isinstance(scale, str):
            setting("log", **({"base": 2} if scale == "log2" else {}))
    if isinstance(y, int | float):
        axes.set_ylim(bottom=y)
    if legend:
        axes.legend(frameon=False, fontsize=8)
    plain(axes, grid)


def styled(number: int, label: str | None = None, size: float | None = 4) -> dict[str, Any]:
    """Return the colour and marker of a figure's line by its number. size: marker size; None for matplotlib's."""
    style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
    return style | ({"label": label} if label else {}) | ({"markersize": size} if size else {})


def save(figure: Any, path: FilePath) -> None:
    """Write ``figure`` to ``path``. Raises StoreError if the file cannot be written."""
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise StoreError(f"The figure '{path}' cannot be written: {reason_of(error)}.") from error


def plain(axes: Any, grid: Any) -> None:
    """Remove the top and right of the frame, and draw a light grid along ``grid`` ("x", "y" or "both")."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.9")
    axes.set_axisbelow(True)
