"""Labels of a figure: each is there, within it, and over nothing else where there is room."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from kvkeep_lab.report.labels import Label, place

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("seed", range(4))
def test_labels_lie_over_nothing(seed: int) -> None:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figure = Figure(figsize=(10, 5.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    draw = random.Random(seed)
    points = [(10 ** draw.random(), draw.random()) for _ in range(15)]
    axes.set_xscale("log")
    axes.plot(*zip(*points, strict=True), "o")
    axes.axhline(0.5)
    place(axes, [Label(f"method-{n}", point) for n, point in enumerate(points)], points, [((1, 0.5), (10, 0.5))])
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    boxes = [Text.get_window_extent(text, renderer) for text in axes.texts]
    dots = axes.transData.transform(points)
    level = axes.transData.transform((1, 0.5))[1]
    assert len(boxes) == len(points)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert not any(box.contains(*dot) for box in boxes for dot in dots)
    assert not any(box.y0 < level < box.y1 for box in boxes)
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
