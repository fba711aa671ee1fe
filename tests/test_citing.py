"""What is cited: kvkeep itself, alike wherever it says so, and the papers of its methods."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

import kvkeep
from kvkeep.policies.methods import methods, parts
from kvkeep.policies.papers import PAPERS, papers_of

ROOT = Path(__file__).parents[1]
Run = Callable[..., tuple[int, str, str]]


def fields(entry: str) -> dict[str, str]:
    """The fields of one entry, without the braces that keep its capitals."""
    return {name: value.strip("{}") for name, value in re.findall(r"^  (\w+) = \{(.*)\},$", entry, re.MULTILINE)}


def test_the_readme_cites_as_the_citation_file_says() -> None:
    blocks = re.findall(r"```bibtex\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    said: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert fields(blocks[0]) == {
        "title": said["title"],
        "author": " and ".join(author["name"] for author in said["authors"]),
        "version": str(said["version"]),
        "license": said["license"],
    }
    assert str(said["version"]) == kvkeep.__version__


def test_every_paper_that_a_source_names_has_an_entry() -> None:
    every = [*methods().values(), *(made for kind in parts().values() for made in kind.values())]
    sources = " ".join(str(getattr(one, "source", "")) for one in every)
    assert all(re.search(rf"\b{re.escape(paper.named)}\b", sources) for paper in PAPERS)  # none is of no use
    assert len({paper.key for paper in PAPERS}) == len({paper.named for paper in PAPERS}) == len(PAPERS)
    for method in methods().values():
        found = papers_of([method])
        numbers = {number for number in re.findall(r"\d{4}\.\d{5}", method.source)}
        assert numbers <= {paper.named for paper in found}, method.name
        for paper in found:
            entry = paper.bibtex()
            assert entry.count("{") == entry.count("}") and entry.rstrip().endswith("}")
            assert bool(paper.title) == bool(paper.author) and (paper.title or paper.eprint)
            assert not paper.eprint or paper.named == paper.eprint
    unknown: Any = SimpleNamespace(source="of others, arXiv:2601.00001", selector=None, fate=None, recall=None)
    (paper,) = papers_of([unknown])
    assert fields(paper.bibtex())["eprint"] == "2601.00001" and "not known here" in paper.bibtex()


def test_methods_print_the_papers_of_all_their_parts(run: Run) -> None:
    code, out, _ = run("methods", "--bibtex", "snapkv:window=16,kernel=5+quantize:4,h2o,window")
    keys = re.findall(r"^@\w+\{(.*),$", out, re.MULTILINE)
    assert code == 0 and keys == ["li2024snapkv", "liu2024kivi", "zhang2023h2o"]
    assert out.splitlines()[-1].startswith("% window: ")
    code, out, err = run("methods", "--bibtex", "h3o")
    assert code == 2 and not out and "did you mean h2o" in err
