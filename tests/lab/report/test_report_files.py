"""A report as files: the page, the Markdown, pictures that are pictures, and labels over nothing else."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from kvkeep_lab.report import groups, write
from kvkeep_lab.report.labels import Label, place
from results import EXPERIMENT, filled

from kvkeep.errors import StoreError

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    ("changes", "maps"),
    [
        ({}, ["map"]),
        ({"task": {"name": "match", "length": [60], "samples": 2}, "paper": None}, []),
        ({"task": {"name": "needle", "length": [*range(64, 69)], "depth": [0], "samples": 2}}, ["map"]),
    ],
)  # fmt: skip
def test_files_are_a_page_its_source_and_pictures(tmp_path: Path, changes: dict[str, Any], maps: list[str]) -> None:
    drawn = ["frontier-memory", "frontier-speed", "quality", *maps]
    (group,) = groups([filled(tmp_path / "r.jsonl", EXPERIMENT.with_(**changes))])
    page, source, *pictures = write([group.chapter()], tmp_path / "out" / "report")
    assert (page.name, source.name) == ("report.html", "report.md")
    assert [path.name for path in pictures] == [
        f"{group.name}-{kind}{end}" for kind in drawn for end in (".png", ".svg")
    ]
    text, html = source.read_text(), page.read_text()
    for path in pictures:
        data = path.read_bytes()
        assert len(data) > 10_000 and (data.startswith(b"\x89PNG") or b"<svg" in data)
        assert (f"]({path.name})" in text) == (path.suffix == ".png")
    assert html.count("data:image/svg+xml;base64,") == len(drawn)


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"The folder '.*file' cannot be made: file exists\."):
        write([], tmp_path / "file")


def test_axes_of_names_have_a_table_of_their_own_and_a_map(tmp_path: Path) -> None:
    """The task is RULER, whose families are an axis."""
    families = {"name": "ruler", "length": [512, 300], "family": ["vt", "niah_single_1"], "samples": 2}
    experiment = EXPERIMENT.with_(task=families, paper=None)
    (group,) = groups([filled(tmp_path / "r.jsonl", experiment)])
    assert group.places("length") == [300, 512] and group.places("family") == ["vt", "niah_single_1"]
    assert experiment.cells("data")[0].label == "full (length 512, family vt)"
    files = write([group.chapter()], tmp_path / "out" / "report")
    text = next(path for path in files if path.suffix == ".md").read_text()
    table = text.split("| string match (%) | budget | `vt` | `niah_single_1` |\n")[1].split("\n\n")[0]
    assert "| `full` | - | 100.0 | 100.0 |" in table and "| `h2o` | 25% | 50.0 | 50.0 |" in table
    assert "`quantized` | 10%" not in table
    assert any("map" in path.name and path.stat().st_size > 10_000 for path in files)


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
