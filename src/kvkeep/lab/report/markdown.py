"""The report as Markdown, the one source of everything it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvkeep.lab.report.chapter import Chapter, Picture


def markdown(chapters: Sequence[Chapter], *, pictures: str | None = None) -> str:
    """Return the report. pictures: the suffix of the picture files beside it, such as ".png"; None leaves them out."""
    parts = ["# Results of the lab"]
    for chapter in chapters:
        parts += list(_part(chapter, pictures))
    return "\n\n".join(parts) + "\n"


def _part(chapter: Chapter, pictures: str | None) -> Iterator[str]:
    yield f"## {chapter.title}"
    for block in chapter.blocks:
        if not isinstance(block, Picture):
            yield block
        elif pictures is not None:
            yield f"![{block.title}]({block.name}{pictures})"
