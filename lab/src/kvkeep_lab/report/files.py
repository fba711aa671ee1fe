"""A report as files: the page, the Markdown that it is made of, and the figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvkeep.errors import StoreError
from kvkeep_lab.figures import check_figure
from kvkeep_lab.page import write_page
from kvkeep_lab.report.chapter import Chapter
from kvkeep_lab.report.html import check_page, page
from kvkeep_lab.report.markdown import markdown

SUFFIXES = (".png", ".svg")


def write(chapters: Sequence[Chapter], folder: Path) -> list[Path]:
    """Write ``report.html``, ``report.md`` and the figures, each as PNG and SVG, into ``folder``, and return the files.
    The page needs no other file; the Markdown shows the PNG files.

    Raises UsageError where matplotlib or markdown-it-py is missing, StoreError where files cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"The folder '{folder}' cannot be made: {(error.strerror or str(error)).lower()}.") from error
    check_figure(folder / "report.png")
    check_page()
    files: list[Path] = []
    for picture in (picture for chapter in chapters for picture in chapter.pictures):
        for suffix in SUFFIXES:
            files.append(folder / f"{picture.name}{suffix}")
            picture.draw(files[-1])
    text = markdown(chapters, pictures=SUFFIXES[0])
    drawn = {file.with_suffix(SUFFIXES[0]).name: file for file in files if file.suffix == ".svg"}
    pages = {"report.html": page(text, drawn), "report.md": text}
    for name, content in pages.items():
        write_page(folder / name, content)
    return [*(folder / name for name in pages), *files]
