"""The papers of methods as BibTeX. The ``source`` of each part names its paper."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

from kvkeep.policies.registry import Method

_ARXIV = re.compile(r"\d{4}\.\d{5}")


@dataclass(frozen=True)
class Paper:
    """One paper. An unknown field is empty; its BibTeX entry leaves it out."""

    key: str
    """The key of the BibTeX entry."""
    named: str
    """How the ``source`` of a part names it: an arXiv id, or a word."""
    title: str = ""
    author: str = ""
    """The authors, in the form of BibTeX."""
    year: str = ""
    where: str = ""
    """The proceedings or journal."""
    eprint: str = ""
    """The arXiv id."""

    def bibtex(self) -> str:
        """Return the entry: an article in proceedings where those are known, else a preprint."""
        fields = {"title": f"{{{self.title}}}" if self.title else "", "author": self.author, "year": self.year}
        fields |= {"booktitle": self.where}
        if self.eprint:
            fields |= {"eprint": self.eprint, "archivePrefix": "arXiv", "url": f"https://arxiv.org/abs/{self.eprint}"}
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
        bare = [] if self.title else [f"% arXiv:{self.eprint}: its title and authors are not known here"]
        return "\n".join([*bare, f"@{'inproceedings' if self.where else 'misc'}{{{self.key},", *lines, "}"])


PAPERS = tuple(
    Paper(**entry) for entry in tomllib.loads(files(__package__).joinpath("papers.toml").read_text("utf-8"))["paper"]
)
"""Papers with more than an arXiv id."""


def papers_of(methods: Iterable[Method]) -> list[Paper]:
    """Return the papers that the sources of methods and of their parts name, each once. They come from :data:`PAPERS`
    and from the ``papers`` of a package's parts. For any other arXiv id the paper has that id only."""
    found: dict[str, Paper] = {}
    for method in methods:
        parts = (method, method.selector, method.fate, method.recall)
        listed = [*PAPERS, *(paper for part in parts for paper in getattr(part, "papers", ()))]
        for source in (str(getattr(part, "source", "")) for part in parts):
            known = [paper for paper in listed if re.search(rf"\b{re.escape(paper.named)}\b", source)]
            bare = [number for number in _ARXIV.findall(source) if all(paper.named != number for paper in known)]
            known += [Paper(f"arxiv{number}", number, year=f"20{number[:2]}", eprint=number) for number in bare]
            found |= {paper.key: paper for paper in known}
    return list(found.values())
