"""Studies: what is measured can be kept, told and drawn, and says what it should where the answer is known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS
from families import tiny
from kvkeep_lab.experiment import Inquiry, load_experiment, packaged
from kvkeep_lab.report import markdown, studied, study_chapters
from kvkeep_lab.report.chapter import Outcome
from kvkeep_lab.runner import run as run_experiment
from kvkeep_lab.shapes import SHAPES, config_of
from kvkeep_lab.store import Store
from kvkeep_lab.studies import STUDIES
from kvkeep_lab.studies.base import Drawn, Study
from kvkeep_lab.studies.decoding import Decoding
from kvkeep_lab.studies.rebuilt import Rebuilt
from kvkeep_lab.studies.sketch_error import NORMAL, SketchError
from kvkeep_lab.studies.throughput import Throughput
from kvkeep_lab.studies.token_bytes import TokenBytes
from kvkeep_lab.tables import Table
from kvkeep_lab.timing import NAIVE, Case, run
from measuring import loaded, measured
from pydantic import ValidationError
from transformers import AutoConfig

from kvkeep.errors import KvkeepError
from kvkeep.geometry import ModelGeometry

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
PUBLISHED = {
    "smollm2-135m": "SmolLM2-135M-Instruct",
    "qwen2.5-0.5b": "Qwen2.5-0.5B-Instruct",
    "qwen3-0.6b": "Qwen3-0.6B",
    "r1-distill-qwen-1.5b": "DeepSeek-R1-Distill-Qwen-1.5B",
    "qwen2.5-1.5b": "Qwen2.5-1.5B-Instruct",
    "gemma3-4b": "gemma-3-4b-it",
}


def inquiries() -> list[Inquiry]:
    return [one for one in map(load_experiment, packaged()) if isinstance(one, Inquiry)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(". ".join(" ".join(WORDS[(7 * number) % len(WORDS)] for number in range(200)) for _ in range(5)))
    return path


SMALL: dict[str, dict[str, Any]] = {
    "bounds": {"tokens": 100, "pages": [2, 8], "queries": 20},
    "held-bytes": {"lengths": [96], "kinds": ["kv"]},
    "kept": {"tokens": 100, "budget": "32"},
    "verify": {"quick": True},
    "prove": {"prompts": 1, "lengths": [60], "new": 4, "budgets": ["20"]},
    "bench": {"contexts": [64], "budget": "32", "rounds": 1, "steps": 3, "only": ["full", "h2o"], "slow": False},
    "compare": {"limit": 60, "new": 4, "methods": ["full", "h2o"], "budgets": ["32"]},
    "stream": {"tokens": 300, "stretch": 100, "budget": "32"},
}
"""Sizes of the studies that no experiment is packaged of."""


@pytest.fixture(scope="module")
def found(text: Path) -> Callable[[str], tuple[Study, Any]]:
    """What the smoke version of an experiment, or a small study, finds in the tiny model, measured once."""

    @cache
    def measure(name: str) -> tuple[Study, Any]:
        study = STUDIES[name].model_validate(SMALL[name]) if name in SMALL else load_experiment(name).smoked().subject
        assert isinstance(study, Study)
        told: list[float] = []
        result = study.measure(loaded(), [text], 0, lambda what, done, total: told.append(done / total))
        assert all(0 <= share <= 1.01 for share in told)
        return study, result

    return measure


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_studies_say_what_they_are(study: type[Study]) -> None:
    names = [metric.name for metric in study.metrics]
    assert len(set(names)) == len(names) and set(study.certain) <= set(names)
    assert study.about and study.protocol.endswith(".") and is_dataclass(study.found)
    assert all(field.description for field in study.model_fields.values())
    packaged_of = any(type(one.study) is study for one in inquiries())
    assert packaged_of == bool(study.metrics) == (study.name not in SMALL)


def test_what_is_none_is_no_part_of_an_experiment() -> None:
    """So that a field can be added without measuring all again."""
    names = {name for study in STUDIES.values() for name, value in study.model_validate({}) if value is None}
    assert {"folder", "where", "kinds"} <= names
    for study in STUDIES.values():
        assert None not in study.model_validate({}).model_dump(mode="json").values()


@pytest.mark.parametrize("name", [*(one.name for one in inquiries()), *SMALL])
def test_what_was_found_can_be_kept_told_and_drawn(
    found: Callable[[str], tuple[Study, Any]], name: str, tmp_path: Path
) -> None:
    study, result = found(name)
    data = json.loads(json.dumps(study.plain(result)))
    again = study.restored(data)
    assert type(again) is type(result) and study.plain(again) == data
    scores = study.scores(again)
    assert bool(scores) == bool(study.metrics) and set(scores) <= {metric.name for metric in study.metrics}
    assert all(math.isfinite(value) for value in scores.values())
    for key, value in study.scores(result).items():
        assert scores[key] == pytest.approx(value, rel=1e-2, abs=1e-4)
    assert study.problem(again) is None and json.dumps(study.as_json(again))
    for table in (*study.details(again), *study.tables(again)):
        assert table.rows and all(len(row) == len(table.headings) for row in table.rows)
        lines = [line for line in table.markdown().splitlines() if line.startswith("|")]
        assert len({line.count(" | ") for line in lines}) == 1
    if isinstance(study, Drawn):
        pytest.importorskip("matplotlib")
        study.draw(again, tmp_path / "figure.png", title="tiny")
        assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_numbers_that_are_none_are_refused() -> None:
    study = TokenBytes()
    found = measured(study)
    found.rows[0].checkpoints["kv"] = 1
    bad = type(found)([type(row)(**{**row.__dict__, "rho": math.nan}) for row in found.rows])
    with pytest.raises(KvkeepError, match="nan"):
        study.plain(bad)


def test_tables_are_markdown() -> None:
    table = Table("T", ["a|b", "c"], [["1", "2"]], notes=["One.", "Two."])
    assert table.markdown() == "### T\n\n| a\\|b | c |\n| --- | ---: |\n| 1 | 2 |\n\nOne. Two."


def test_sizes_that_cannot_be_are_refused() -> None:
    """By the types that studies share."""
    for name, wrong in (
        ("bounds", {"share": 1.0}),
        ("compare", {"methods": ["nonsense"]}),
        ("compare", {"budgets": ["12.5.1%"]}),
        ("prove", {"checkpoints": ["x"]}),
        ("long-chat", {"methods": ["stock-static"]}),
        ("long-chat", {"where": "nowhere"}),
        ("recompute", {"beside": ["qwen3"]}),
        ("recompute", {"counts": []}),
    ):
        with pytest.raises(ValidationError):
            STUDIES[name].model_validate(wrong)
    assert STUDIES["recompute"].model_validate({"counts": [9, 1, 9]}).model_dump()["counts"] == [1, 9]


# -- one by one -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_the_published_configs(name: str) -> None:
    theirs = ModelGeometry.from_config(AutoConfig.from_pretrained(CONFIGS / f"{PUBLISHED[name]}.json"), 2)
    ours = ModelGeometry.from_config(config_of(name), 2)
    assert (ours.layers, ours.hidden_size) == (theirs.layers, theirs.hidden_size)


def test_token_bytes_are_table_1_and_what_a_cache_holds() -> None:
    study = TokenBytes()
    found = measured(study, "gemma3")
    rows = {row.model: row for row in found.rows}
    assert rows["smollm2-135m"].entries == 22.5 * 1024 and rows["gemma3-4b"].rho == pytest.approx(27.2)
    assert rows["gemma3-4b"].checkpoints["residual"] == 5 * 5 * 1024  # five full layers, 5 KB each
    whole = measured(TokenBytes()).rows[0]
    assert whole.held == whole.entries
    (table,) = study.tables(found)
    assert any("22.5, 1.1, 20.0" in row for row in table.rows)


def test_rebuilding_is_looked_at_beyond_windows_too() -> None:
    study = Rebuilt(lengths=[16], dtypes=["float32"])
    found = measured(study, "gemma3")
    assert {row.kind for row in found.rows} == {"full", "sliding"} and found.windows is not None
    assert study.scores(found) == {"keys": 0, "values": 0, "window": 0}
    assert len(study.tables(found)) == 2


def test_decoding_takes_every_step_of_every_way() -> None:
    study = Decoding(prompt=8, new=12, lengths=[16, 32], rounds=1, caches=["paged"])
    found = measured(study)
    assert [one.way for one in found.runs] == [NAIVE, "stock", "paged"]
    assert all(len(one.step_ms) == 11 and one.total_s > one.first_s > 0 for one in found.runs)
    assert [(one.way, one.length) for one in found.appends] == [
        (way, length) for way in ("stock", "full", "static") for length in (16, 32)
    ]


def test_batches_hold_as_many_rows() -> None:
    rows = run(tiny("llama"), [Case(f"{n}", 40, "stock", batch=n) for n in (1, 3)], rounds=1, steps=2)
    assert rows[1].memory["resident_bytes"] == 3 * rows[0].memory["resident_bytes"]
    study = Throughput(methods=["stock", "h2o", "static"], batches=[1, 8], budget="25%", length=96, steps=3, rounds=1)
    found = measured(study)
    one, eight = found.of(1, "h2o"), found.of(8, "h2o")
    assert one is not None and eight is not None and eight.held_bytes == 8 * one.held_bytes
    assert any("static" in note for note in study.tables(found)[0].notes)  # too small a budget: refused, and said


def test_the_sketch_is_as_its_lemma_says_for_normal_vectors(text: Path) -> None:
    study = SketchError(tokens=500, loads=[5, 20], dim=32)
    found = measured(study, files=[text])
    for row in (row for row in found.rows if row.sort == NORMAL):
        assert row.median == pytest.approx(row.predicted, rel=0.15) and row.mean < row.median < row.bound
        assert row.constant == pytest.approx(1, abs=0.02) and row.crowded < row.chance


# -- in stores and reports --------------------------------------------------------------------------


@pytest.fixture
def inquiry(model_folder: Path) -> Inquiry:
    claims = [
        {"says": "It is so.", "metric": "rho", "at_least": 3.9, "at_most": 4.1},
        {"says": "It is not.", "metric": "rho", "at_most": 1.0},
        {"says": "Nobody knows."},
    ]
    values = [{"metric": "rho", "value": 20.0, "note": "another model"}]
    paper = {"title": "A Paper", "where": "Table 1", "setting": "large", "claims": claims, "values": values}
    return Inquiry.model_validate(
        {
            "name": "small",
            "title": "Small",
            "models": [str(model_folder)],
            "study": {"name": "token-bytes", "shapes": ["qwen3-0.6b"]},
            "paper": paper,
        }
    )


def test_a_study_is_run_once_and_its_chapter_says_what_it_found(inquiry: Inquiry, tmp_path: Path) -> None:
    store, told = Store(tmp_path / "r.jsonl"), []
    tally = run_experiment(inquiry, store, progress=lambda *given: told.append(given[1:]))
    assert (tally.done, tally.found, told[0]) == (1, 0, (0, 100))
    assert run_experiment(inquiry, Store(tmp_path / "r.jsonl")).found == 1
    store = Store(tmp_path / "r.jsonl")
    store.refresh()
    (finding,) = store.findings
    assert store.rows == [] and finding.machine["dtype"] == "float32" and finding.seconds > 0
    (one,) = studied([store])
    (chapter,) = study_chapters([one])
    assert [verdict.outcome for verdict in chapter.verdicts] == [Outcome.HOLDS, Outcome.DIFFERS]
    text = markdown([chapter])
    assert "| ρ | 4 | 20 (another model) |" in text and "* The paper says: Nobody knows." in text
    assert "KB a token" in text and "112.0, 2.0, 56.0" in text and f"![Small: {one.model}]" not in text
    assert len(chapter.pictures) == 1 and one.as_dict()["values"]["rho"] == [4.0]


def test_what_fails_is_told_and_a_later_failure_undoes_nothing(
    inquiry: Inquiry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: Any) -> Any:
        raise KvkeepError("It cannot be.")

    store = Store(tmp_path / "r.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(TokenBytes, "measure", refused)
        tally = run_experiment(inquiry, store)
    assert [(record.error, record.label) for record in tally.failed] == [("It cannot be.", inquiry.models[0])]
    store.refresh()
    (chapter,) = study_chapters(studied([store]))
    assert chapter.missing == ("Seed 0: It cannot be.",) and chapter.verdicts[0].outcome is Outcome.UNMEASURED
    run_experiment(inquiry, store)
    store.refresh()
    store.append(store.findings[0].model_copy(update={"started": "9999"}))
    store.refresh()
    (one,) = studied([store])
    assert [record.status for record in one.records] == ["done"]


def test_numbers_that_vary_are_judged_over_seeds(inquiry: Inquiry, tmp_path: Path) -> None:
    study = {"name": "sketch-error", "tokens": 64, "loads": [6]}
    claims = [{"says": "Less.", "metric": "lemma", "at_most": 50.0}]
    paper = {**inquiry.model_dump(mode="json")["paper"], "claims": claims, "values": []}
    varying = inquiry.with_(study=study, paper=paper, seeds=[0, 1, 2])
    (tmp_path / "text.txt").write_text(" ".join(WORDS * 5))
    store = Store(tmp_path / "r.jsonl")
    run_experiment(varying.with_(seeds=[0]), store, tmp_path)
    store.refresh()
    (chapter,) = study_chapters(studied([store]))
    assert chapter.verdicts[0].outcome is Outcome.OPEN  # of one number nothing is sure
    run_experiment(varying, store, tmp_path)
    store.refresh()
    (chapter,) = study_chapters(studied([store]))
    assert chapter.verdicts[0].outcome is Outcome.HOLDS and chapter.verdicts[0].samples == 3
    assert "seeds 0, 1 and 2" in chapter.ours
