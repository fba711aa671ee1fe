"""Make the numbers and the two figures of the page "Which method?" from docs/results/lab-which-method.jsonl.

Methods and budgets are compared on the same texts: for each way of asking, those that all methods have at all budgets,
of the kinds of needles of which the full cache finds at least 80 %. A method with at most half of the others' texts is
left out. Intervals are over texts, because one cache answers all questions about a text.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from kvkeep_lab.report import groups
from kvkeep_lab.report.figures import draw_depths, draw_quality
from kvkeep_lab.report.tasks import TaskGroup
from kvkeep_lab.statistics import student
from kvkeep_lab.store import ResultFile, TaskRecord
from kvkeep_lab.subject import at_once

ROOT = Path(__file__).parents[1]
STORE = ROOT / "docs" / "results" / "lab-which-method.jsonl"
TABLE = STORE.with_name("which-method.json")
NEEDS = {"unseen": "needles", "seen": "known-question"}
LEAST = 0.8
"""The least share that the full cache finds of a kind of needles: below, the model fails and not the method."""


def main() -> None:
    """Write the table and the figures."""
    store = ResultFile(STORE)
    store.refresh()
    (group,) = groups([store])
    assert isinstance(group, TaskGroup)
    records = [record for record in group.records if record.status == "done"]
    rows, common, kinds = [], [], set()
    for asked, need in NEEDS.items():
        found = _common([record for record in records if record.point["question"] == asked])
        for (method, budget), mine in found.items():
            name = at_once(method) if asked == "seen" else method
            for at in group.experiment.budgets if budget is None else (budget,):
                rows.append({"need": need, "budget": at, "method": name, **_numbers(mine)})
            common += mine
            kinds |= {str(record.point["kind"]) for record in mine}
    rows.sort(key=lambda row: (list(NEEDS.values()).index(row["need"]), group.experiment.budgets.index(row["budget"])))
    group = replace(group, records=common)
    commits = sorted({record.versions.get("commit", "?") for record in records})
    about = {
        "model": group.model,
        "kinds": sorted(kinds),
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
    titled = group.experiment.with_(title="Which method? Needles whose question is unseen")
    texts = [record.model_copy(update={"scores": {"match": [fmean(record.scores["match"])]}}) for record in unseen]
    drawn = replace(group, records=texts, experiment=titled)
    draw_quality(drawn, STORE.parent / "which-method-quality.png", "match")
    print(f"{len(records)} cells, {len(rows)} rows: {TABLE.relative_to(ROOT)}, two figures")


def _common(records: list[TaskRecord]) -> dict[tuple[str, str | None], list[TaskRecord]]:
    """Return the records of each method and budget, of the texts that all of them have; without those that have at most
    half of the texts of others. The full cache, which has no budget, may have more."""
    ways: dict[tuple[str, str | None], dict[tuple, TaskRecord]] = {}
    for record in records:
        ways.setdefault((record.method, record.budget), {})[record.point["kind"], record.seed] = record
    (full,) = (texts for (_, budget), texts in ways.items() if budget is None)
    most = max(len(texts) for (_, budget), texts in ways.items() if budget is not None)
    ways = {way: texts for way, texts in ways.items() if 2 * len(texts) > most}
    common = set.intersection(*map(set, ways.values()))
    found = {kind: fmean(value for text in common if text[0] == kind for value in full[text].scores["match"])
             for kind in {kind for kind, _ in common}}  # fmt: skip
    texts = sorted(text for text in common if found[text[0]] >= LEAST)
    return {way: [mine[text] for text in texts] for way, mine in ways.items()}


def _numbers(records: list[TaskRecord]) -> dict:
    matches, logs = ([fmean(record.scores[name]) for record in records] for name in ("match", "loglik"))
    match, loglik = student(matches, scale=(0.0, 1.0)), student(logs)
    shares = [(record.held_bytes + record.bookkeeping_bytes) / record.whole_bytes for record in records]
    return {
        "match": [round(value, 3) for value in (match.mean, match.low, match.high)],
        "loglik": [round(value, 3) for value in (loglik.mean, loglik.low, loglik.high)],
        "bytes": round(fmean(shares), 4),
        "n": sum(len(record.scores["match"]) for record in records),
        "texts": len(records),
    }


if __name__ == "__main__":
    main()
