"""The report as files: Markdown, figures, and one self-contained page with both."""

from __future__ import annotations

import html
import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from kvkeep import __version__
from kvkeep.errors import StoreError, reason_of
from kvkeep_lab.figures import check_figure
from kvkeep_lab.page import filled, write_page
from kvkeep_lab.report.chapter import Chapter
from kvkeep_lab.report.markdown import OVERVIEW, anchors, markdown

_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}
_LONG = 48
"""Minimum characters of a cell whose text is wrapped."""


SUFFIXES = (".png", ".svg")


def write(chapters: Sequence[Chapter], folder: Path) -> list[Path]:
    """Write ``report.html``, ``report.md`` and the figures, each as PNG and SVG, into ``folder``, and return the files.
    The page is self-contained; the Markdown refers to the PNG files.

    Raises StoreError if files cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"The folder '{folder}' cannot be made: {reason_of(error)}.") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreError(f"The report cannot be written: the folder '{folder}' is write-protected.")
    check_figure(folder / "report.png")
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


def page(text: str, pictures: Mapping[str, Path]) -> str:
    """Return the page for ``text`` in Markdown. pictures: files to embed, by their names in the Markdown; other
    pictures are replaced by their titles. Raises StoreError if one cannot be read."""
    reader = _reader(pictures)
    tokens = reader.parse(text)
    found = [
        (token, "".join(part.content for part in tokens[at + 1].children or ()))
        for at, token in enumerate(tokens)
        if token.type == "heading_open"
    ]
    titles = [title for _, title in found]
    contents = []
    for (token, title), anchor in zip(found, anchors(titles), strict=True):
        token.attrSet("id", anchor)
        if title in OVERVIEW:
            token.attrJoin("class", "front")
        if token.tag == "h2":
            contents.append(f'<li><a href="#{html.escape(anchor)}">{html.escape(title)}</a></li>\n')
    values = {
        "TITLE": html.escape(titles[0] if titles else "Report"),
        "VERSION": html.escape(__version__),
        "CONTENTS": f"<ul>\n{''.join(contents)}</ul>",
        "BODY": reader.renderer.render(tokens, reader.options, {}),
    }
    return filled("kvkeep_lab.report", "page.html", values)


def _reader(pictures: Mapping[str, Path]) -> MarkdownIt:
    """Return a Markdown parser with tables and without HTML. It wraps tables and pictures in boxes."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")

    def picture(self: Any, tokens: Any, at: int, options: Any, env: Any) -> str:
        title = html.escape(tokens[at].content)
        if (file := pictures.get(str(tokens[at].attrGet("src")))) is None:
            return title
        return f'<span class="figure" role="group" tabindex="0"><img alt="{title}" src="{_inlined(file)}"></span>'

    def cell(self: Any, tokens: Any, at: int, options: Any, env: Any) -> str:
        if len(tokens[at + 1].content) > _LONG:
            tokens[at].attrJoin("class", "long")
        return str(self.renderToken(tokens, at, options, env))

    reader.add_render_rule("image", picture)
    reader.add_render_rule("td_open", cell)
    box = '<div class="table" role="region" aria-label="Table" tabindex="0">'
    reader.add_render_rule("table_open", lambda *_: f"{box}\n<table>\n")
    reader.add_render_rule("table_close", lambda *_: "</table>\n</div>\n")
    return reader


def _inlined(file: Path) -> str:
    """Return a picture as a data URI."""
    try:
        return f"data:{_TYPES[file.suffix]};base64,{b64encode(file.read_bytes()).decode()}"
    except OSError as error:
        raise StoreError(f"The figure '{file}' cannot be read: {reason_of(error)}.") from error
