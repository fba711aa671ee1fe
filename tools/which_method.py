"""Make what 'kvkeep methods --for' prints, and two figures of docs/results, from docs/results/lab-which-method.jsonl.

Methods are compared on the same texts: in each kind of needles and for each way of asking, those of the seeds that all
methods of a budget have. A method with at most half of the others' texts is left out,
and so is a budget whose texts do not have facts at all depths.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from kvkeep_lab.report import groups
from kvkeep_lab.report.figures import draw_depths, draw_quality
from kvkeep_lab.report.tasks import TaskGroup
from kvkeep_lab.statistics import estimate, student
from kvkeep_lab.store import ResultFile, TaskRecord

ROOT = Path(__file__).parents[1]
STORE = ROOT / "docs" / "results" / "lab-which-method.jsonl"
TABLE = ROOT / "src" / "kvkeep" / "policies" / "measured.json"
NEEDS = {"unseen": "needles", "seen": "known-question"}


def main() -> None:
    """Write the table and the figures."""
    store = ResultFile(STORE)
    store.refresh()
    (group,) = groups([store])
    assert isinstance(group, TaskGroup)
    records = [record for record in group.records if record.status == "done"]
    rows, common = [], []
    for asked, need in NEEDS.items():
        for budget in group.experiment.budgets:
            found = _common([r for r in records if r.point["question"] == asked and r.budget in (None, budget)])
            if not any(record.budget for mine in found.values() for record in mine):
                continue  # the full cache alone
            if _places(record for mine in found.values() for record in mine) < _places(records):
                continue  # a text has few of the depths, and methods differ by depth
            rows += [{"need": need, "budget": budget, "method": one, **_numbers(mine)} for one, mine in found.items()]
            common += [record for mine in found.values() for record in mine if record not in common]
    group = replace(group, records=common)
    commits = sorted({record.versions.get("commit", "?") for record in records})
    about = {
        "model": group.model,
        "tokens": max(record.point["length"] for record in records),
        "processor": sorted({f"{record.machine['processor']}, {record.machine['path']}" for record in records}),
        "commits": commits,
        "store": STORE.relative_to(ROOT).as_posix(),
        "rows": rows,
    }
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    TABLE.write_text(json.dumps(about | {"rows": []}, indent=1).replace("[]", f"[\n  {lines}\n ]") + "\n", "utf-8")
    draw_depths(group, STORE.parent / "which-method-depths.png")
    unseen = [record for record in common if record.point["question"] == "unseen"]
    texts = {row["budget"]: row["texts"] for row in rows if row["need"] == NEEDS["unseen"]}
    counts = ", ".join(f"{budget}: {count} text{'s' if count > 1 else ''}" for budget, count in texts.items())
    titled = group.experiment.with_(title=f"Which method? Needles whose question is unseen ({counts})")
    drawn = replace(group, records=unseen, experiment=titled)
    draw_quality(drawn, STORE.parent / "which-method-quality.png", "match")
    print(f"{len(records)} cells, {len(rows)} rows: {TABLE.relative_to(ROOT)}, two figures")


def _places(records: Iterable[TaskRecord]) -> int:
    """Return the number of tenths of a text in which something is asked for."""
    return len({int(depth // 10) for record in records for depth in record.depths})


def _common(records: list[TaskRecord]) -> dict[str, list[TaskRecord]]:
    """Return the records of each method at the places that all of them have; without methods that have at most half
    of the places of others. The full cache, which has no budget, may have more."""
    ways: dict[str, dict[tuple, TaskRecord]] = {}
    for record in records:
        ways.setdefault(record.method, {})[record.point["kind"], record.seed] = record
    most = max((len(cells) for cells in ways.values() if any(one.budget for one in cells.values())), default=0)
    ways = {method: cells for method, cells in ways.items() if 2 * len(cells) > most}
    places = sorted(set.intersection(*map(set, ways.values()))) if ways else []
    return {method: [cells[place] for place in places] for method, cells in ways.items() if places}


def _numbers(records: list[TaskRecord]) -> dict:
    matches, logs = ([value for record in records for value in record.scores[name]] for name in ("match", "loglik"))
    match, loglik = student(matches, scale=(0.0, 1.0)), estimate(logs)
    shares = [(record.held_bytes + record.bookkeeping_bytes) / record.whole_bytes for record in records]
    return {
        "match": [round(value, 3) for value in (match.mean, match.low, match.high)],
        "loglik": [round(value, 3) for value in (loglik.mean, loglik.low, loglik.high)],
        "bytes": round(fmean(shares), 4),
        "n": match.n,
        "texts": len(records),
    }


if __name__ == "__main__":
    main()
