"""The pages in docs/results have the numbers of their stores: ``tools/results_page.py`` has nothing to change."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from measuring import tool

TOOL = tool("results_page")
PAGES = {path.name: path.read_text("utf-8") for path in TOOL.RESULTS.glob("*.md")}


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_has_the_numbers_of_the_stores(name: str) -> None:
    assert TOOL.remade(PAGES[name]) == PAGES[name]


@pytest.mark.parametrize(
    ("name", "says", "instead"),
    [
        ("kv-direct.md", " undecided, ", " decided, "),
        ("revive.md", "| `h2o` | 0.2 ·", "| `h2o` | 0.1 ·"),
        ("revive.md", "| **0.12** · 27 %", "| 0.12 · 28 %"),
        ("README.md", "`kvzip+tiers` | 0.031", "`kvzip+tiers` | 0.013"),
        ("kvslimmer.md", "| 41.4 [", "| 14.4 ["),
    ],
)
def test_the_tool_corrects_a_wrong_number(name: str, says: str, instead: str) -> None:
    page = PAGES[name]
    assert says in page and TOOL.remade(page.replace(says, instead)) == page


def test_every_claim_is_on_one_page_once() -> None:
    """Also a claim whose experiment was not run."""
    from kvkeep_lab.experiment import load_experiment, packaged

    shown = Counter(
        claim
        for page in PAGES.values()
        for kind, named, _ in TOOL.MADE.findall(page)
        if kind == "claims"
        for claim in TOOL.judged(named)
    )
    papers = {name: paper for name in packaged() if (paper := load_experiment(name).paper) is not None}
    assert shown == Counter((name, number + 1) for name, paper in papers.items() for number in range(len(paper.claims)))


def test_the_first_page_is_short() -> None:
    words = re.findall(r"[\w'.+:-]*[A-Za-z][\w'.+:-]*", re.sub(r"\]\([^)]*\)|<!--.*?-->", "", PAGES["README.md"]))
    assert len(words) <= 600


def test_every_file_of_the_results_is_linked() -> None:
    linked = {name for page in PAGES.values() for name in re.findall(r"\]\(([\w.-]+)\)", page)}
    pages = [page.read_text("utf-8") for page in TOOL.RESULTS.parent.glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"\]\(results/([\w.-]+)\)", page)}
    assert {path.name for path in TOOL.RESULTS.iterdir()} == linked | shown | {"README.md"}  # nothing that no page uses
