"""Labels beside the points of a figure, without overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_ROUND = [
    (distance * across, distance * up)
    for distance in (6, 13, 22, 34, 48, 64)
    for across, up in ((1, 0), (1, 1), (1, -1), (0, 1.2), (0, -1.2), (-1, 1), (-1, -1), (-1, 0))
]
"""Possible offsets of a label from its point, in points, in order of preference."""
_LINED = 12
"""Minimum distance in points at which a line connects label and point."""


@dataclass(frozen=True)
class Label:
    """A text beside a point, in the units of the axes."""

    text: str
    point: tuple[float, float]
    style: dict[str, Any] = field(default_factory=dict)


def place(
    axes: Any,
    labels: Sequence[Label],
    points: Sequence[tuple[float, float]],
    lines: Sequence[tuple[tuple[float, float], tuple[float, float]]] = (),
) -> None:
    """Draw labels at the positions with the fewest overlaps with other labels, points, lines and the edge of the axes.
    Earlier labels choose first. ``lines``: the ends of horizontal and vertical lines. This fixes the figure's layout.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    figure = axes.figure
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    renderer, dot = figure.canvas.get_renderer(), 3.5 * figure.dpi / 72  # pixels
    corners = [(point, point) for point in points] + list(lines)
    taken = [
        Bbox.from_extents(*ends.min(axis=0), *ends.max(axis=0)).padded(dot if first == second else 2)
        for first, second in corners
        for ends in (axes.transData.transform([first, second]),)
    ]
    frame = axes.get_window_extent(renderer)
    area = Bbox.from_extents(frame.x0, frame.y0, figure.bbox.x1 - 4, frame.y1 + 12)
    for label in labels:
        text = axes.annotate(
            label.text,
            label.point,
            (0, 0),
            textcoords="offset points",
            arrowprops={"arrowstyle": "-", "color": "0.3", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3},
            annotation_clip=False,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
            **label.style,
        )
        tried = []
        for number, where in enumerate(_ROUND):
            box = _put(text, where, renderer)
            beyond = box.x0 < area.x0 or box.x1 > area.x1 or box.y0 < area.y0 or box.y1 > area.y1
            tried.append((sum(box.overlaps(other) for other in taken) + len(taken) * beyond, number))
            if not tried[-1][0]:
                break
        taken.append(_put(text, _ROUND[min(tried)[1]], renderer))


def _put(annotation: Any, where: tuple[float, float], renderer: Any) -> Any:
    """Move an annotation and return the bounding box of its text."""
    from matplotlib.text import Text

    across, up = where
    annotation.xyann = where
    annotation.set(
        ha="left" if across > 0 else "right" if across < 0 else "center",
        va="bottom" if up > 0 else "top" if up < 0 else "center_baseline",
    )
    annotation.arrow_patch.set_visible(max(abs(across), abs(up)) > _LINED)
    annotation.update_positions(renderer)
    return Text.get_window_extent(annotation, renderer).padded(1.5)
