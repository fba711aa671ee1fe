"""The report as Markdown; differences from the papers come first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvkeep_lab.report.chapter import Chapter, Outcome, Picture, Verdict
from kvkeep_lab.report.formatting import escaped, listed

TITLE = "Results of the lab"

_JUDGED = {
    Outcome.DIFFERS: ("Where ours differ from the papers", "Nothing here differs for certain from what a paper says."),
    Outcome.HOLDS: ("Where ours agree", "No claim of a paper is confirmed here."),
    Outcome.OPEN: ("What cannot be told yet", "No claim is left open by its samples."),
    Outcome.MEASURED: ("Measured, without a verdict", "Every claim that was measured has a verdict."),
    Outcome.UNMEASURED: ("Claims that were not measured", "Every claim that numbers can decide was measured."),
}
"""A section for each outcome, and what stands there if there is none."""

_MISSING = "What was not run"

FRONT = (*(title for title, _ in _JUDGED.values()), _MISSING)
"""The sections that come before the chapters."""

_INTERVALS = (
    "There is a verdict only by a limit that the paper itself names, and only where ours is measured as the paper's "
    "is: on its model where the sentence is of a model, and on no machine but its own where it is of one. A verdict "
    "goes by Student's interval, in brackets, of 95 % for all cases of a claim together. It is wider than the "
    "bootstrap interval of the tables, which of few samples is too narrow. N is the number of samples."
)


def markdown(chapters: Sequence[Chapter], *, pictures: str | None = None) -> str:
    """Return the report. pictures: the suffix of the picture files beside it, such as ".png"; None leaves them out."""
    whole = [chapter for chapter in chapters if chapter.blocks]
    bodies = [list(_part(chapter, pictures)) for chapter in whole]
    front = _headings(_front(chapters, {}))
    made = iter(
        anchors([TITLE, *front, *(heading for body in bodies for heading in _headings(body))])[1 + len(front) :]
    )
    links = {}
    for chapter, body in zip(whole, bodies, strict=True):
        links[id(chapter)], *_ = [next(made) for _ in _headings(body)]
    parts = [f"# {TITLE}", *_front(chapters, links), *(part for body in bodies for part in body)]
    return "\n\n".join(parts) + "\n"


def _headings(parts: Iterable[str]) -> list[str]:
    return [line.lstrip("# ") for part in parts for line in part.splitlines() if re.match("#+ ", line)]


def anchors(titles: Sequence[str]) -> list[str]:
    """Return the anchors that headings, one after another, have on GitHub and on the page; a repeated one gets a
    number."""
    seen: Counter[str] = Counter()
    made = []
    for title in titles:
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        made.append(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return made


def _front(chapters: Sequence[Chapter], links: Mapping[int, str]) -> Iterator[str]:
    """Yield what comes before the chapters; ``links``: the anchors of those that come, by identity."""
    counted = Counter(verdict.outcome for chapter in chapters for verdict in chapter.verdicts)
    if counted:
        counts = listed(f"{outcome}: {counted[outcome]}" for outcome in Outcome)
        yield f"Claims of the papers that numbers here are about: {counted.total()}. {counts.capitalize()}."
        yield _INTERVALS
        for outcome, (heading, none) in _JUDGED.items():
            yield f"## {heading}"
            yield from list(_judged(chapters, outcome, links)) or [none]
    yield f"## {_MISSING}"
    lists = [
        f"{_title(chapter, links)}:\n\n" + "\n".join(f"* {sentence}" for sentence in chapter.missing)
        for chapter in chapters
        if chapter.missing and chapter.blocks
    ]
    bare = [chapter for chapter in chapters if not chapter.blocks]
    items = (f"* {_beside(chapter, links)} {' '.join(chapter.missing)}" for chapter in bare)
    lists += ["Of these nothing is in the results:\n\n" + "\n".join(items)] if bare else []
    yield from lists or ["Everything was run."]


def _judged(chapters: Sequence[Chapter], outcome: Outcome, links: Mapping[int, str]) -> Iterator[str]:
    for chapter in chapters:
        if found := [verdict for verdict in chapter.verdicts if verdict.outcome is outcome]:
            heading = _beside(chapter, links)
            if outcome is Outcome.DIFFERS:
                heading += f" Theirs: {escaped(chapter.theirs)}. Ours: {escaped(chapter.ours)}."
            yield heading
            yield "\n".join(line for verdict in found for line in _claim(verdict))


def _beside(chapter: Chapter, links: Mapping[int, str]) -> str:
    paper = f", beside {escaped(chapter.beside)}" if chapter.beside else ""
    return f"{_title(chapter, links)}{paper}."


def _title(chapter: Chapter, links: Mapping[int, str]) -> str:
    name = escaped(chapter.title)
    return f"**[{name}](#{links[id(chapter)]})**" if id(chapter) in links else f"**{name}**"


def _claim(verdict: Verdict) -> Iterator[str]:
    finding = "" if verdict.outcome is Outcome.UNMEASURED else f" **{_sentence(verdict.finding)}.**"
    yield f'* "{escaped(verdict.says)}"{finding}'
    yield from (f"  * {sentence}" for sentence in verdict.ours if verdict.outcome is not Outcome.UNMEASURED)
    if verdict.reading:
        yield f"  * Read as: {verdict.reading}."


def _sentence(words: str) -> str:
    return escaped(words[:1].upper() + words[1:])


def _part(chapter: Chapter, pictures: str | None) -> Iterator[str]:
    yield f"## {escaped(chapter.title)}"
    theirs = f"Beside {escaped(chapter.beside)}. Theirs: {escaped(chapter.theirs)}. " if chapter.beside else ""
    yield f"{theirs}Ours: {escaped(chapter.ours)}."
    for block in chapter.blocks:
        if not isinstance(block, Picture):
            yield block
        elif pictures is not None:
            yield f"![{escaped(block.title)}]({block.name}{pictures})"
