"""A report as files: the page, the Markdown, and pictures that are pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvkeep_lab.report import groups, write
from results import EXPERIMENT, filled

from kvkeep.errors import StoreError

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    ("changes", "drawn"),
    [
        ({}, ["frontier-memory", "frontier-speed", "quality", "map"]),
        (
            {"task": {"name": "match", "length": [60], "samples": 2}, "paper": None},
            ["frontier-memory", "frontier-speed", "quality"],
        ),
        (
            {"budgets": ["25%"], "task": {"name": "needle", "length": [*range(64, 69)], "depth": [0], "samples": 2}},
            ["frontier-memory", "frontier-speed", "quality", "map"],
        ),
    ],
)
def test_files_are_a_page_its_source_and_pictures(tmp_path: Path, changes: dict[str, Any], drawn: list[str]) -> None:
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
