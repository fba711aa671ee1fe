"""A report as files: the Markdown, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvkeep.errors import StoreError
from kvkeep.lab.figures import check_figure
from kvkeep.lab.report.chapter import Chapter
from kvkeep.lab.report.markdown import markdown


def write(chapters: Sequence[Chapter], folder: Path) -> list[Path]:
    """Write ``report.md`` and the figures, each as PNG and SVG, into ``folder``, and return the files.

    Raises UsageError where matplotlib is missing, StoreError where they cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"The folder '{folder}' cannot be made: {(error.strerror or str(error)).lower()}.") from error
    check_figure(folder / "report.png")
    files: list[Path] = []
    for picture in (picture for chapter in chapters for picture in chapter.pictures):
        for suffix in (".png", ".svg"):
            files.append(folder / f"{picture.name}{suffix}")
            picture.draw(files[-1])
    page = folder / "report.md"
    try:
        page.write_text(markdown(chapters, pictures=".png"), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"The report '{page}' cannot be written: {(error.strerror or str(error)).lower()}.") from error
    return [page, *files]
