"""Write the numbers of docs/results/README.md anew from the stores beside it: verdicts counted, tables of KL and match.

Which methods and budgets a table has is the page's; what was measured of them is the stores'. Words are left alone.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from kvkeep_lab.report import groups
from kvkeep_lab.report.chapter import VerdictOutcome
from kvkeep_lab.report.tasks import TaskGroup
from kvkeep_lab.store import ResultFile

RESULTS = Path(__file__).parents[1] / "docs" / "results"
COUNTS = re.compile(r"^\| \[`([\w-]+)`\]\(lab-\1\.jsonl\), (\S+) \| (.*?) \|(?: \d+ \|){5}\n", re.M)
TOTAL = re.compile(r"^\| \*\*all \d+\*\* \| \|(?: \*\*\d+\*\* \|){5}$", re.M)
TABLE = re.compile(r"(\]\((\S+\.jsonl)\)[^|\]]*?\n\n\| (smollm2|gemma3-270m) \|(.*)\n\| -.*\n)((?:\|.*\n)+)")


def main() -> None:
    """Rewrite the page."""
    page = RESULTS / "README.md"
    page.write_text(remade(page.read_text("utf-8")), "utf-8")


def remade(page: str) -> str:
    """Return the page with the stores' numbers."""
    return TABLE.sub(_table, _verdicts(page))


@cache
def _groups(file: str) -> list:
    store = ResultFile(RESULTS / file)
    store.refresh()
    if not store.records or store.torn:
        raise SystemExit(f"{file} has no results, or a line that is cut off.")
    return groups([store])


def _verdicts(page: str) -> str:
    beside = {(name, model): words for name, model, words in COUNTS.findall(page)}
    judged = {}  # of the latest setting of each experiment, which comes first
    for store in sorted(RESULTS.glob("lab-*.jsonl")):
        for group in _groups(store.name):
            if counts := Counter(verdict.outcome for verdict in group.judged()):
                judged.setdefault((group.experiment.name, group.model), [counts[outcome] for outcome in VerdictOutcome])
                paper = group.experiment.paper
                beside.setdefault(
                    (group.experiment.name, group.model), f"{re.split('[:(]', paper.title)[0].strip()}, {paper.where}"
                )
    rows = [
        f"| [`{name}`](lab-{name}.jsonl), {model} | {words} | {' | '.join(map(str, judged[name, model]))} |\n"
        for (name, model), words in beside.items()
        if (name, model) in judged
    ]
    sums = [sum(counts) for counts in zip(*judged.values(), strict=True)]
    whole = f"| **all {sum(sums)}** | | {' | '.join(f'**{count}**' for count in sums)} |"
    start = COUNTS.search(page).start()
    stop = TOTAL.search(page)
    return page[:start] + "".join(rows) + whole + page[stop.end() :]


def _table(found: re.Match[str]) -> str:
    head, file, model, budgets, rows = found.groups()
    (group,) = (one for one in _groups(file) if one.model == model and "-tuning" not in one.experiment.name)
    assert isinstance(group, TaskGroup)
    results = {(result.method, result.budget): result for result in group.results}
    best: dict[str | None, float] = {}
    for one in group.measured:
        best[one.budget] = min(one.scores["kl"].mean, best.get(one.budget, 99.0))
    lines = []
    for row in rows.splitlines():
        method, cells = row.strip("|").split("|")[0].strip().strip("`"), []
        for budget in (cell.strip().replace(" ", "") for cell in budgets.strip("|").split("|")):
            chosen = group.experiment.chosen.get(model, {}).get(budget, {})
            result = results.get((chosen.get(method, method), budget))
            if result is None or not result.scores:
                cells.append("refused" if result is not None and "no room" in result.error else "-")
                continue
            kl, match = result.scores["kl"].mean, result.scores["match"].mean
            number = f"{kl:.2g}"
            cells.append(f"{f'**{number}**' if kl == best[budget] else number} · {100 * match:.0f} %")
        lines.append(f"| `{method}` | {' | '.join(cells)} |\n")
    return head + "".join(lines)


if __name__ == "__main__":
    main()
