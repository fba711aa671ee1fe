"""Reports: means and intervals by hand, what is newest counts, and figures are pictures."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from kvkeep.errors import UsageError
from kvkeep.lab.experiment import Experiment
from kvkeep.lab.intervals import Estimate, estimate
from kvkeep.lab.report import markdown, places, sections, told, write
from kvkeep.lab.store import Row, Store
from kvkeep.lab.tasks.base import Metric

PAPER = {
    "title": "A Paper",
    "where": "Fig. 7",
    "setting": "a large model, 16 bits",
    "claims": ["It always finds."],
    "values": [
        {"metric": "found", "value": 0.75, "method": "h2o", "budget": "25%", "note": "read off"},
        {"metric": "found", "value": 0.5, "method": "unheard-of"},
    ],
}
EXPERIMENT = Experiment.model_validate(
    {
        "name": "small",
        "title": "A small thing",
        "task": {"name": "needle", "length": [128, 256], "depth": [0, 50], "samples": 2},
        "methods": ["h2o", "window", "quantized"],
        "budgets": ["10%", "25%"],
        "paper": PAPER,
    }
)


NAMES = EXPERIMENT.with_(
    task={"name": "ruler", "length": [512, 300], "family": ["vt", "niah_single_1"], "samples": 2}, paper=None
)


def filled(path: Path, experiment: Experiment = EXPERIMENT, missing: str = "") -> Store:
    """A store whose scores are made up: full finds all, h2o half, window nothing; quantized refuses 10 %."""
    store, draw = Store(path), random.Random(0)
    for number, cell in enumerate(experiment.cells("data")):
        if not number:
            store.define(cell.setting, experiment.model_dump(mode="json"))
        found = {"full": [1.0, 1.0], "h2o": [1.0, 0.0], "window": [0.0, 0.0], "quantized": [1.0, 1.0]}[cell.method]
        refused = cell.method == "quantized" and cell.budget == "10%"
        scores = {metric.name: found for metric in experiment.task.metrics} | {
            "loglik": [-draw.random(), -draw.random()]
        }
        share = {None: 1.0, "10%": 0.1, "25%": 0.25}[cell.budget]
        if cell.method == missing and cell.point == {"length": 256, "depth": 50}:
            continue
        store.append(
            Row(
                cell=cell.key, setting=cell.setting, experiment="small", model=cell.model, method=cell.method,
                budget=cell.budget, seed=cell.seed, point=cell.point, status="failed" if refused else "done",
                error="The budget is too small." if refused else "",
                scores={} if refused else scores,
                prompt_tokens=[127, 256], prefill_s=[1.0, 2.0], token_s=[0.05, None],
                memory={"resident_bytes": int(8e6 * share), "compressed_bytes": int(1e5)}, exactness="lossy",
                entries=None if cell.budget is None else 64, versions={"kvkeep": "0"}, machine={"dtype": "float32"},
                started=f"2026-01-01T00:00:{number:02}+00:00", seconds=1.0,
            )
        )  # fmt: skip
    store = Store(path)
    store.refresh()
    return store


def test_intervals_by_hand() -> None:
    assert estimate([0.5]) == Estimate(0.5, 0.5, 0.5, 1)
    assert estimate([2.0] * 5) == Estimate(2.0, 2.0, 2.0, 5)
    draw = random.Random(0)
    values = [draw.gauss(3, 1) for _ in range(400)]
    found = estimate(values)
    assert found.mean == pytest.approx(fmean(values)) and found == estimate(values)
    assert found.high - found.mean == pytest.approx(1.96 / 20, rel=0.15)  # the normal interval, for so many
    assert found.mean - found.low == pytest.approx(1.96 / 20, rel=0.15)


def test_numbers_as_they_are_told() -> None:
    found = Estimate(0.5, 0.25, 0.75, 4)
    assert told(Metric("a", "a"), found) == "50.0 [25.0, 75.0]"
    assert told(Metric("a", "a", "lower", "number"), Estimate(1.23456, 1, 2, 2)) == "1.23 [1, 2]"
    assert told(Metric("a", "a", "lower", "perplexity"), Estimate(0.0, 0.0, 0.0, 1)) == "1"


def test_a_section_by_hand(tmp_path: Path) -> None:
    (section,) = sections([filled(tmp_path / "r.jsonl")])
    lines = {(line.method, line.budget): line for line in section.lines}
    assert list(lines) == [
        ("full", None), ("h2o", "10%"), ("window", "10%"), ("quantized", "10%"),
        ("h2o", "25%"), ("window", "25%"), ("quantized", "25%"),
    ]  # fmt: skip
    line = lines["h2o", "25%"]
    assert line.scores is not None and line.beside is not None
    assert (line.scores["found"].mean, line.scores["found"].n, line.beside["found"].mean) == (0.5, 8, -0.5)
    assert (line.cells, line.of, line.prefill_s, line.token_s, line.entries) == (4, 4, 1.5, 0.05, (64, 64))
    assert line.held_bytes == pytest.approx(2.1e6) and [value.value for value in line.paper] == [0.75]
    assert len(line.at) == 4 and line.at[0][1]["found"] == 0.5
    assert lines["full", None].beside == {} and lines["quantized", "10%"].scores is None
    assert section.prompts == (127, 256) and section.name.startswith("small-smollm2-")
    told = json.loads(json.dumps(section.as_dict()))
    assert [line["paper"] for line in told["lines"] if line["paper"]] == [[PAPER["values"][0]]]


def test_the_newest_measurement_counts_and_a_failure_does_not_undo_one(tmp_path: Path) -> None:
    store = filled(tmp_path / "r.jsonl")
    first = next(row for row in store.rows if row.method == "window")
    store.append(first.model_copy(update={"scores": {"found": [1.0, 1.0], "words": [1.0, 1.0], "loglik": [0.0, 0.0]}}))
    store.append(first.model_copy(update={"status": "failed", "scores": {}, "error": "no"}))
    store.refresh()
    (section,) = sections([store])
    line = next(line for line in section.lines if (line.method, line.budget) == ("window", first.budget))
    assert line.cells == 4 and line.scores is not None and line.scores["found"].mean == 0.25


def test_markdown_says_what_there_is_to_know(tmp_path: Path) -> None:
    text = markdown(sections([filled(tmp_path / "r.jsonl", missing="window")]))
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1 and len(table) == 8
    (row,) = (line for line in table if line.startswith("| `h2o` | 25% |"))
    assert "50.0 [" in row and "-50.0 [" in row and "found 75.0" in row and "2.1 MB" in row and "50 ms" in row
    assert "N = 8 a row (2 samples, 4 points, 1 seeds)" in text and "prompts of 127 to 256 tokens" in text
    assert "* `quantized` at 10%: 0 of 4 cells: The budget is too small." in text
    assert "* `window` at 25%: 3 of 4 cells." in text and "Not measured yet" not in text
    assert "Beside A Paper, Fig. 7. Theirs: a large model, 16 bits. Ours: smollm2, float32." in text
    assert "* The paper says: It always finds." in text
    assert "* The paper's number: h2o at 25%: found 75.0 (read off)." in text
    assert "* The paper's number: unheard-of: found 50.0." in text


def test_axes_of_names_have_a_table_of_their_own_and_a_map(tmp_path: Path) -> None:
    store = filled(tmp_path / "r.jsonl", NAMES)
    (section,) = sections([store])
    assert places(section, "length") == [300, 512] and places(section, "family") == ["vt", "niah_single_1"]
    assert NAMES.cells("data")[0].label == "full (length 512, family vt)"
    table = markdown([section]).split("| string match (%) | budget | `vt` | `niah_single_1` |\n")[1].split("\n\n")[0]
    assert "| `full` | - | 100.0 | 100.0 |" in table and "| `h2o` | 25% | 50.0 | 50.0 |" in table
    assert "`quantized` | 10%" not in table
    pytest.importorskip("matplotlib")
    assert any("map" in path.name and path.stat().st_size > 10_000 for path in write([section], tmp_path / "out"))


def test_what_was_not_measured_is_named(tmp_path: Path) -> None:
    store = filled(tmp_path / "r.jsonl")
    store.rows = [row for row in store.rows if row.method != "h2o"]
    assert "* Not measured yet: `h2o` at 10%, `h2o` at 25%." in markdown(sections([store]))


def test_settings_and_models_are_apart(tmp_path: Path) -> None:
    other = EXPERIMENT.with_(task={**EXPERIMENT.model_dump(mode="json")["task"], "samples": 2, "new": 5})
    filled(tmp_path / "r.jsonl")
    store = filled(tmp_path / "r.jsonl", other)
    twins = filled(tmp_path / "s.jsonl", EXPERIMENT.with_(models=["gemma3-270m"]))
    found = sections([store, twins])
    assert len(found) == 3 and len({section.name for section in found}) == 3
    assert {section.model for section in found} == {"smollm2", "gemma3-270m"}


def test_nothing_to_report_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to report"):
        sections([Store(tmp_path / "r.jsonl")])
    store = Store(tmp_path / "r.jsonl")
    gone = {**EXPERIMENT.model_dump(mode="json"), "methods": ["no-longer"]}
    cell = EXPERIMENT.cells("data")[0]
    store.define(cell.setting, gone)
    store.append(filled(tmp_path / "s.jsonl").rows[0])
    store.refresh()
    with pytest.raises(UsageError, match="experiment 'small' are of a version"):
        sections([store])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"budgets": ["25%"]},
        {"task": {"name": "match", "length": [60], "samples": 2}, "paper": None},
        {"task": {"name": "needle", "length": [64, 65, 66, 67, 68], "depth": [0], "samples": 2}},
    ],
)
def test_files_are_a_page_and_pictures(tmp_path: Path, changes: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    found = sections([filled(tmp_path / "r.jsonl", EXPERIMENT.with_(**changes))])
    page, *pictures = write(found, tmp_path / "out" / "report")
    text = page.read_text()
    assert [path.suffix for path in pictures] == [".png", ".svg"] * (1 if changes.get("paper", 1) is None else 2)
    for path in pictures:
        data = path.read_bytes()
        assert len(data) > 10_000 and (data.startswith(b"\x89PNG") or b"<svg" in data)
        assert (f"]({path.name})" in text) == (path.suffix == ".png")
