"""A report as files: the page, the Markdown, and pictures that are pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from results import EXPERIMENT, filled

from kvkeep.errors import StoreError
from kvkeep.lab.report import chapters, sections, write

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
    found = sections([filled(tmp_path / "r.jsonl", EXPERIMENT.with_(**changes))])
    page, source, *pictures = write(chapters(found), tmp_path / "out" / "report")
    assert (page.name, source.name) == ("report.html", "report.md")
    name = found[0].name
    assert [path.name for path in pictures] == [f"{name}-{kind}{end}" for kind in drawn for end in (".png", ".svg")]
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
