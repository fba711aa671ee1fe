"""Studies in stores and reports: results, verdicts and failures."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import WORDS
from kvkeep_lab.experiment import StudyExperiment
from kvkeep_lab.report import groups, markdown
from kvkeep_lab.report.chapter import VerdictOutcome
from kvkeep_lab.runner import run
from kvkeep_lab.store import ResultFile
from kvkeep_lab.studies.token_bytes import TokenBytes
from results import chapters, stored

from kvkeep.errors import KvkeepError


@pytest.fixture
def experiment(model_folder: Path) -> StudyExperiment:
    claims = [
        {"says": "It is so.", "metric": "rho", "at_least": 3.9, "at_most": 4.1},
        {"says": "It is not.", "metric": "rho", "at_most": 1.0},
        {"says": "Nobody knows."},
    ]
    values = [{"metric": "rho", "value": 20.0, "note": "another model"}]
    paper = {"title": "A Paper", "where": "Table 1", "setting": "large", "claims": claims, "values": values}
    study = {"name": "token-bytes", "shapes": ["qwen3-0.6b"]}
    sizes = {"name": "small", "title": "Small", "models": [str(model_folder)], "study": study, "paper": paper}
    return StudyExperiment.model_validate(sizes)


def test_a_study_is_run_once_and_its_chapter_shows_the_results(experiment: StudyExperiment, tmp_path: Path) -> None:
    store, progress = ResultFile(tmp_path / "r.jsonl"), []
    tally = run(experiment, store, progress=lambda *given: progress.append(given[1:]))
    assert (tally.done, tally.found, progress[0]) == (1, 0, (0, 100))
    assert run(experiment, ResultFile(tmp_path / "r.jsonl")).found == 1
    store = stored(tmp_path / "r.jsonl")
    (record,) = store.records
    assert record.machine["dtype"] == "float32" and record.seconds > 0
    (one,) = groups([store])
    (chapter,) = chapters(store)
    assert [verdict.outcome for verdict in chapter.verdicts] == [VerdictOutcome.HOLDS, VerdictOutcome.DIFFERS]
    text = markdown([chapter])
    assert "| ρ | 4 | 20 (another model) |" in text and "* The paper says: Nobody knows." in text
    assert "KB a token" in text and "112.0, 2.0, 56.0" in text and f"![Small: {one.model}]" not in text
    assert len(chapter.pictures) == 1 and one.as_dict()["values"]["rho"] == [4.0]


def test_a_failure_is_reported_and_does_not_replace_a_result(
    experiment: StudyExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ResultFile(tmp_path / "r.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(TokenBytes, "measure", Mock(side_effect=KvkeepError("It cannot be.")))
        tally = run(experiment, store)
    assert [(record.error, record.label) for record in tally.failed] == [("It cannot be.", experiment.models[0])]
    store.refresh()
    (chapter,) = chapters(store)
    assert chapter.missing == ("Seed 0: It cannot be.",) and chapter.verdicts[0].outcome is VerdictOutcome.UNMEASURED
    run(experiment, store)
    store.refresh()
    store.append(store.records[0].model_copy(update={"started": "9999"}))
    store.refresh()
    (one,) = groups([store])
    assert [record.status for record in one.records] == ["done"]


def test_varying_numbers_are_judged_over_seeds(experiment: StudyExperiment, tmp_path: Path) -> None:
    study = {"name": "sketch-error", "tokens": 64, "loads": [6]}
    claims = [{"says": "Less.", "metric": "lemma", "at_most": 50.0}]
    paper = {**experiment.model_dump(mode="json")["paper"], "claims": claims, "values": []}
    varying = experiment.with_(study=study, paper=paper, seeds=[0, 1, 2])
    (tmp_path / "text.txt").write_text(" ".join(WORDS * 5))
    path = tmp_path / "r.jsonl"
    run(varying.with_(seeds=[0]), ResultFile(path), tmp_path)
    (chapter,) = chapters(stored(path))
    assert chapter.verdicts[0].outcome is VerdictOutcome.OPEN  # of one number nothing is sure
    run(varying, ResultFile(path), tmp_path)
    (chapter,) = chapters(stored(path))
    assert chapter.verdicts[0].outcome is VerdictOutcome.HOLDS and chapter.verdicts[0].samples == 3
    assert "seeds 0, 1 and 2" in chapter.ours
