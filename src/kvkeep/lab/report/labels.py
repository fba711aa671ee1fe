"""Labels beside points of a figure, none over another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_ROUND = [
    (distance * across, distance * up)
    for distance in (6, 13, 22, 34)
    for across, up in ((1, 0), (1, 1), (1, -1), (0, 1.2), (0, -1.2), (-1, 1), (-1, -1), (-1, 0))
]
"""Where a label may be put, in points from what it names, the nearest first."""
_LINED = 20
"""Points from which on a line leads to the label."""


@dataclass(frozen=True)
class Label:
    """A text beside a point, in the axes' own units. needed: it is drawn even where it lies over something."""

    text: str
    x: float
    y: float
    needed: bool = False
    style: tuple[tuple[str, Any], ...] = ()


def place(
    axes: Any,
    labels: Sequence[Label],
    points: Sequence[tuple[float, float]],
    lines: Sequence[tuple[tuple[float, float], tuple[float, float]]] = (),
) -> int:
    """Draw labels, the first with the first choice, where they lie over no other, no point, no line (upright or level,
    from one end to the other) and not beyond the axes; return how many found no such place and are left out. The
    figure's layout is settled by this."""
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
    room = Bbox.from_extents(frame.x0, frame.y0, figure.bbox.x1 - 4, frame.y1 + 12)
    halo = [withStroke(linewidth=2.5, foreground="white")]
    left_out = 0
    for label in labels:
        best = None
        for across, up in _ROUND:
            text = axes.annotate(
                label.text,
                (label.x, label.y),
                (across, up),
                textcoords="offset points",
                ha="left" if across > 0 else "right" if across < 0 else "center",
                va="center_baseline" if up == 0 else "bottom" if up > 0 else "top",
                arrowprops=dict(arrowstyle="-", color="0.6", linewidth=0.6, shrinkA=0, shrinkB=3)
                if max(abs(across), abs(up)) > _LINED
                else None,
                annotation_clip=False,
                path_effects=halo,
                **dict(label.style),
            )
            box = _words(text, renderer)
            within = room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1
            over = sum(box.overlaps(other) for other in taken) + 100 * (not within)
            if best is None or over < best[0]:
                if best is not None:
                    best[1].remove()
                best = (over, text, box)
            else:
                text.remove()
            if not over:
                break
        assert best is not None
        over, text, box = best
        if over and not label.needed:
            text.remove()
            left_out += 1
        else:
            taken.append(box)
    return left_out


def _words(annotation: Any, renderer: Any) -> Any:
    """Return the box of an annotation's words, without its line."""
    from matplotlib.text import Text

    annotation.update_positions(renderer)
    return Text.get_window_extent(annotation, renderer).padded(1.5)
