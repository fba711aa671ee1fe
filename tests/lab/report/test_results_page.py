"""docs/results/README.md has the numbers of its stores: ``tools/results_page.py`` has nothing to change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from measuring import tool

PAGE = (Path(__file__).parents[3] / "docs" / "results" / "README.md").read_text("utf-8")
TOOL = tool("results_page")


def test_the_page_has_the_numbers_of_the_stores() -> None:
    assert TOOL.remade(PAGE) == PAGE
    assert len(TOOL.COUNTS.findall(PAGE)) > 20 and len(TOOL.TABLE.findall(PAGE)) >= 2


@pytest.mark.parametrize(
    ("says", "instead"),
    [("| **all ", "| **all 9"), ("| `h2o` | 0.2 ·", "| `h2o` | 0.1 ·"), ("| **0.12** · 27 %", "| 0.12 · 28 %")],
)
def test_the_tool_corrects_a_wrong_number(says: str, instead: str) -> None:
    assert says in PAGE and TOOL.remade(PAGE.replace(says, instead)) == PAGE


def test_every_judged_store_has_its_row() -> None:
    """Also a store that the page does not mention yet."""
    row = re.search(r"^\| \[`patching`\].*\n", PAGE, re.M)
    assert row is not None
    assert re.search(
        r"^\| \[`patching`\]\(lab-patching\.jsonl\), smollm2 ", TOOL.remade(PAGE.replace(row[0], "")), re.M
    )


def test_every_file_of_the_results_is_linked() -> None:
    linked = set(re.findall(r"\]\(([\w.-]+)\)", PAGE))
    pages = [page.read_text("utf-8") for page in TOOL.RESULTS.parent.glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"\]\(results/([\w.-]+)\)", page)}
    assert {path.name for path in TOOL.RESULTS.iterdir()} == linked | shown | {"README.md"}  # nothing that no page uses
