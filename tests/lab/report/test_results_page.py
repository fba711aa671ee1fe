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
        ("README.md", "`kvzip+quantize:4` | 0.025", "`kvzip+quantize:4` | 0.013"),
        ("kvslimmer.md", "| 41.4 [", "| 14.4 ["),
        ("tools.md", "| `kvzip` | 96 | 89 | 0 |", "| `kvzip` | 96 | 98 | 0 |"),
    ],
)
def test_the_tool_corrects_a_wrong_number(name: str, says: str, instead: str) -> None:
    page = PAGES[name]
    assert says in page and TOOL.remade(page.replace(says, instead)) == page


def test_a_table_has_the_samples_of_the_named_points_only() -> None:
    store = "lab-tool-calls-shared.jsonl right full qwen2.5-coder-0.5b"

    def rows(places: str = "") -> dict[str, list[str]]:
        lines = TOOL.remade(f"<!-- scores: {store}{places} -->\n<!-- end -->").splitlines()[1:-1]
        return {name.strip("`"): cells for name, *cells in (line.strip("| ").split(" | ") for line in lines)}

    every, some = rows(), rows(" family=simple_python,live_simple")
    heading = every["right calls (%)"]
    assert heading == sorted(heading, key=lambda column: float(column.split(" %")[0]))  # the smallest budget first
    samples = heading.index("50 %, N")
    assert int(every["full"][samples]) > int(some["full"][samples])
    assert "h2o" in some and "h2o" not in rows(" family=irrelevance")


@pytest.mark.parametrize(("metric", "places"), [("right", "family=elsewhere"), ("valid", "family=irrelevance")])
def test_points_without_samples_are_refused(metric: str, places: str) -> None:
    with pytest.raises(SystemExit, match=metric):
        TOOL.remade(
            f"<!-- scores: lab-tool-calls-shared.jsonl {metric} full qwen2.5-coder-0.5b {places} -->\n<!-- end -->"
        )


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
