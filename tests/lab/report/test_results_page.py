"""docs/results/README.md says what its stores say: the verdicts, and every number of its tables."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from kvkeep_lab.report import groups
from kvkeep_lab.report.chapter import Outcome
from kvkeep_lab.report.studies import StudyGroup
from kvkeep_lab.report.tasks import TaskGroup
from results import stored

RESULTS = Path(__file__).parents[3] / "docs" / "results"
PAGE = (RESULTS / "README.md").read_text("utf-8")
CELL = re.compile(r"([\d.e+-]+) · (\d+) %")
TABLES = re.findall(r"\]\((\S+\.jsonl)\)[^|]*?\n\n\| (smollm2|gemma3-270m) \|(.*)\n\| -.*\n((?:\|.*\n)+)", PAGE)


@cache
def found(file: str) -> list[TaskGroup | StudyGroup]:
    store = stored(RESULTS / file)
    assert store.records and not store.torn
    return groups([store])


def cells(row: str) -> list[str]:
    return [cell.strip().strip("`*") for cell in row.strip("|").split("|")]


def test_the_verdicts_are_those_of_the_stores() -> None:
    counts = r" \| ".join([r"(\d+)"] * len(Outcome))
    rows = re.findall(rf"^\| \[`([\w-]+)`\]\(lab-\1\.jsonl\), (\S+) \| .* \| {counts} \|$", PAGE, re.M)
    told = {(name, model): tuple(map(int, counts)) for name, model, *counts in rows}
    judged = {}
    for store in sorted(RESULTS.glob("lab-*.jsonl")):
        for group in found(store.name):
            judgements = Counter(verdict.outcome for verdict in group.judged())
            if judgements:
                judged[group.experiment.name, group.model] = tuple(judgements[outcome] for outcome in Outcome)
    assert told == judged
    whole = re.search(r"\| \*\*all (\d+)\*\* \| \| " + r" \| ".join([r"\*\*(\d+)\*\*"] * len(Outcome)) + r" \|", PAGE)
    assert whole is not None
    sums = [sum(counts) for counts in zip(*judged.values(), strict=True)]
    assert [int(count) for count in whole.groups()] == [sum(sums), *sums]


@pytest.mark.parametrize(("file", "model", "budgets", "rows"), TABLES, ids=[f"{t[0]}-{t[1]}" for t in TABLES])
def test_the_tables_are_those_of_the_stores(file: str, model: str, budgets: str, rows: str) -> None:
    (group,) = (group for group in found(file) if group.model == model and "-tuning" not in group.experiment.name)
    assert isinstance(group, TaskGroup)
    results = {(result.method, result.budget): result for result in group.results}
    best: dict[str | None, float] = {}
    for one in group.measured:
        best[one.budget] = min(one.scores["kl"].mean, best.get(one.budget, 99.0))
    for row in rows.splitlines():
        method, *values = cells(row)
        for budget, value in zip(cells(budgets), values, strict=True):
            share = budget.replace(" ", "")
            chosen = group.experiment.chosen.get(model, {}).get(share, {})
            result = results[chosen.get(method, method), share]
            if value == "refused":
                assert not result.scores and "no room" in result.error
                continue
            number = CELL.fullmatch(value.replace("*", ""))
            assert number is not None, value
            kl, match = result.scores["kl"].mean, result.scores["match"].mean
            assert float(number[1]) == pytest.approx(kl, rel=0.051)
            assert int(number[2]) == pytest.approx(100 * match, abs=0.501)
            assert ("*" in value) == (kl == best[result.budget])


def test_the_page_has_its_tables_stores_and_pictures() -> None:
    assert len(TABLES) == 5
    linked = set(re.findall(r"\]\(([\w.-]+)\)", PAGE))
    pages = [page.read_text("utf-8") for page in RESULTS.parent.glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"\]\(results/([\w.-]+)\)", page)}
    assert {path.name for path in RESULTS.iterdir()} == linked | shown | {"README.md"}  # nothing that no page uses
