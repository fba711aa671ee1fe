"""The report as Markdown. Differences from the papers are first, except in a report of one experiment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvkeep_lab.report.chapter import Chapter, Picture, Verdict, VerdictOutcome
from kvkeep_lab.report.formatting import escaped, listed

TITLE = "Results of the lab"

_JUDGED = {
    VerdictOutcome.DIFFERS: (
        "Where ours differ from the papers",
        "No claim of a paper is contradicted here.",
    ),
    VerdictOutcome.HOLDS: ("Where ours agree", "No claim of a paper is confirmed here."),
    VerdictOutcome.OPEN: ("What is undecided", "Every measured claim has enough samples for a verdict."),
    VerdictOutcome.MEASURED: ("Measured, without a verdict", "Every claim that was measured has a verdict."),
    VerdictOutcome.UNMEASURED: ("Claims that were not measured", "Every claim that numbers can decide was measured."),
}
"""The section of each outcome, and its text if no claim has this outcome."""

_MISSING = "What was not run"

_CLAIMS, _READING = "What the paper claims", "How claims are judged"
"""The titles of the sections with one experiment's claims and with the meaning of verdicts."""

OVERVIEW = (*(title for title, _ in _JUDGED.values()), _READING, _MISSING)
"""The titles of the sections about all chapters."""

_INTERVALS = (
    "A claim gets a verdict only if the paper itself names a limit and this report measures what the paper "
    "measured. A claim about a model needs a measurement of that model, and a claim about a machine needs one on "
    "that machine. The verdict compares the limit with Student's interval (in brackets), which is 95 % for all "
    "cases of the claim together. For few samples it is wider than the bootstrap interval of the tables, which "
    "is too narrow then. N is the number of samples."
)


def markdown(chapters: Sequence[Chapter], *, pictures: str | None = None) -> str:
    """Return the report. pictures: the suffix of the picture files beside it, such as ".png"; None leaves them out.

    A report of several experiments begins with all verdicts and the missing measurements. A report of one experiment
    begins with its claims, tables and figures.
    """
    measured = [chapter for chapter in chapters if chapter.blocks]
    single = len(measured) == 1 or len({chapter.experiment or id(chapter) for chapter in measured}) == 1
    parts = _of_one(measured, chapters, pictures) if single else _of_many(measured, chapters, pictures)
    return "\n\n".join([f"# {TITLE}", *parts]) + "\n"


def _of_one(measured: Sequence[Chapter], chapters: Sequence[Chapter], pictures: str | None) -> Iterator[str]:
    order = list(VerdictOutcome)
    for chapter in measured:
        heading, settings, *blocks = _part(chapter, pictures)
        yield heading
        yield settings
        if chapter.verdicts:
            ranked = sorted(chapter.verdicts, key=lambda verdict: order.index(verdict.outcome))
            yield f"### {_CLAIMS}"
            yield "\n".join(line for verdict in ranked for line in _claim(verdict, single=True))
            if not blocks[0].startswith("#"):
                yield "### What was measured"
        yield from blocks
    if any(chapter.verdicts for chapter in measured):
        yield f"## {_READING}"
        yield _INTERVALS
    yield from _not_run(chapters, {})


def _of_many(measured: Sequence[Chapter], chapters: Sequence[Chapter], pictures: str | None) -> list[str]:
    bodies = [list(_part(chapter, pictures)) for chapter in measured]
    overview = _headings(_overview(chapters, {}))
    made = iter(
        anchors([TITLE, *overview, *(heading for body in bodies for heading in _headings(body))])[1 + len(overview) :]
    )
    links = {}
    for chapter, body in zip(measured, bodies, strict=True):
        links[id(chapter)], *_ = [next(made) for _ in _headings(body)]
    return [*_overview(chapters, links), *(part for body in bodies for part in body)]


def _headings(parts: Iterable[str]) -> list[str]:
    return [line.lstrip("# ") for part in parts for line in part.splitlines() if re.match("#+ ", line)]


def anchors(titles: Sequence[str]) -> list[str]:
    """Return the anchors of consecutive headings on GitHub and on the page. A repeated anchor has a number."""
    seen: Counter[str] = Counter()
    made = []
    for title in titles:
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        made.append(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return made


def _overview(chapters: Sequence[Chapter], links: Mapping[int, str]) -> Iterator[str]:
    """Yield the text before the chapters; ``links``: anchors of the chapters, by identity."""
    counted = Counter(verdict.outcome for chapter in chapters for verdict in chapter.verdicts)
    if counted:
        counts = listed(f"{outcome}: {counted[outcome]}" for outcome in VerdictOutcome)
        yield f"Claims of the papers that these results cover: {counted.total()}. {counts.capitalize()}."
        yield _INTERVALS
        for outcome, (heading, none) in _JUDGED.items():
            yield f"## {heading}"
            yield from list(_judged(chapters, outcome, links)) or [none]
    yield from _not_run(chapters, links)


def _not_run(chapters: Sequence[Chapter], links: Mapping[int, str]) -> Iterator[str]:
    yield f"## {_MISSING}"
    lists = [
        f"{_title(chapter, links)}:\n\n" + "\n".join(f"* {sentence}" for sentence in chapter.missing)
        for chapter in chapters
        if chapter.missing and chapter.blocks
    ]
    bare = [chapter for chapter in chapters if not chapter.blocks]
    items = (f"* {_beside(chapter, links)} {' '.join(chapter.missing)}" for chapter in bare)
    lists += ["The results hold nothing of these:\n\n" + "\n".join(items)] if bare else []
    yield from lists or ["Everything was run."]


def _judged(chapters: Sequence[Chapter], outcome: VerdictOutcome, links: Mapping[int, str]) -> Iterator[str]:
    for chapter in chapters:
        if found := [verdict for verdict in chapter.verdicts if verdict.outcome is outcome]:
            heading = _beside(chapter, links)
            if outcome is VerdictOutcome.DIFFERS:
                heading += f" Theirs: {escaped(chapter.theirs)}. Ours: {escaped(chapter.ours)}."
            yield heading
            yield "\n".join(line for verdict in found for line in _claim(verdict))


def _beside(chapter: Chapter, links: Mapping[int, str]) -> str:
    paper = f", beside {escaped(chapter.beside)}" if chapter.beside else ""
    return f"{_title(chapter, links)}{paper}."


def _title(chapter: Chapter, links: Mapping[int, str]) -> str:
    name = escaped(chapter.title)
    return f"**[{name}](#{links[id(chapter)]})**" if id(chapter) in links else f"**{name}**"


def _claim(verdict: Verdict, single: bool = False) -> Iterator[str]:
    """Yield the lines of a claim. ``single``: the report has no section of unmeasured claims, so that the line states
    it."""
    finding = (
        f" **{_sentence(verdict.finding)}.**" if single or verdict.outcome is not VerdictOutcome.UNMEASURED else ""
    )
    yield f'* "{escaped(verdict.says)}"{finding}'
    yield from (f"  * {sentence}" for sentence in verdict.ours if verdict.outcome is not VerdictOutcome.UNMEASURED)
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
