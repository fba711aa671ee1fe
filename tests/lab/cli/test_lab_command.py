"""``kvkeep lab`` as a person and a program meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from calling import calling_model
from kvkeep_lab.experiment import StudyExperiment, load_experiment, packaged
from kvkeep_lab.runner import Runner
from kvkeep_lab.studies import STUDIES
from kvkeep_lab.tasks.novel import FILE, QUESTIONS
from official import write_official

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def data(tmp_path: Path, words: str) -> Path:
    folder = tmp_path / "data"
    (folder / "haystack").mkdir(parents=True)
    for name in ("more", "text"):  # where parameters are searched, texts of their own
        (folder / "haystack" / f"{name}.txt").write_text(". ".join([words] * 5))
    rows = [{"article": f"###\nArticle: {words}", "summary_gt": words[: 20 + number]} for number in range(8)]
    (folder / "xsum_0shot_first200.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    rows = [{"article": words, "highlights": words[: 20 + number]} for number in range(8)]
    (folder / "cnn_dm.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "wikitext2_test.txt").write_text(words)
    turns = [{"speaker": "Ann", "dia_id": f"D1:{number}", "text": words[:60]} for number in range(5)]
    talk = {"speaker_a": "Ann", "speaker_b": "Bob", "session_1_date_time": "1 May", "session_1": turns}
    asked = [{"question": "What?", "answer": "the", "evidence": ["D1:1"], "category": 4}]
    (folder / "locomo").mkdir()
    (folder / "locomo" / "locomo_first6.json").write_text(json.dumps([{"conversation": talk, "qa": asked}] * 6))
    (folder / FILE).write_text("\n\n".join(one.evidence for one in QUESTIONS))
    write_official(folder, words)
    return folder


def test_the_list_names_experiments_and_tasks(run: Run) -> None:
    code, out, err = run("lab", "list")
    assert code == 0, err
    assert all(name in out for name in ("bounded", "needle-25", "xsum", "KVReviver", "Fig. 5", "samples"))
    code, out, _ = run("lab", "list", "--json")
    found = json.loads(out)
    assert [one["name"] for one in found["experiments"]] == packaged() and "depth" in found["tasks"]["needle"]["sizes"]
    assert "kvpress" in found["peers"]["peer-kvpress"]["needs"]


AGAIN = ("needle-25", "bounded", "peers", "patching")
"""One of a task, of searched parameters, of other libraries, of a study: run again, and reported for programs."""


# Of the studies one here: tests/lab/studies/test_studies.py runs the smoke version of each.
@pytest.mark.parametrize("name", [*(name for name in packaged() if name not in STUDIES), "patching"])
def test_the_smoke_version_of_every_experiment(
    run: Run, name: str, data: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = load_experiment(name)
    packages = {} if isinstance(experiment, StudyExperiment) else experiment.task.packages
    if any(find_spec(package) is None for package in packages):
        pytest.skip(f"{', '.join(packages.values())} is not installed")
    monkeypatch.chdir(tmp_path)
    model = calling_model(tmp_path) if "bfcl_eval" in packages else str(model_folder)
    command = ("lab", "run", name, "--smoke", "-m", model, "--data", str(data), "--json")
    code, out, err = run(*command)
    assert code == 0, err
    tally = json.loads(out)
    cells = experiment.smoked().with_(models=["m"]).cells("")
    assert tally["done"] + len(tally["failed"]) == len(cells) and tally["store"] == f"kvkeep-lab/{name}-smoke.jsonl"
    assert all(cell["method"].startswith("peer-") for cell in tally["failed"])  # what is not installed here
    code, out, err = run("lab", "report", tally["store"])
    study = isinstance(experiment, StudyExperiment)
    assert code == 0 and out.startswith("# Results of the lab") and (study or f"| `{experiment.baseline}` | " in out)
    if name not in AGAIN:
        return
    code, out, err = run(*command)
    assert (json.loads(out)["done"], json.loads(out)["found"]) == (0, tally["done"])
    code, out, err = run("lab", "report", tally["store"], "--json")
    found = json.loads(out)
    tuned = getattr(experiment, "tune", None) is not None
    assert (len(found["sections"]), len(found["studies"])) == ((0, 1) if study else (1 + tuned, 0))


def test_only_some_methods_a_report_in_a_folder_and_torn_lines(
    run: Run, data: Path, model_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    store = tmp_path / "r.jsonl"
    common = ("lab", "run", "needle-25", "--smoke", "-m", str(model_folder), "--data", str(data), "--store", str(store))
    code, out, err = run(*common, "--only", "kv-direct")
    assert code == 0 and "2 cells measured, 0 had results already, 0 failed" in " ".join(err.split())
    with store.open("a") as file:
        file.write('{"kind": "cell", "ce')
    code, out, err = run("lab", "report", str(store), "-o", str(tmp_path / "out"))
    assert code == 0 and out == "" and "1 line of" in err and (tmp_path / "out" / "report.html").is_file()
    code, out, err = run(*common, "--only", "h2o")
    assert code == 2 and "Unknown method of experiment 'needle-25' 'h2o'" in err


def test_one_budget_first_and_then_all(run: Run, data: Path, model_folder: Path, tmp_path: Path) -> None:
    chosen = "lab", "run", "which-method", "--smoke", "-m", str(model_folder), "--data", str(data), "--only", "snapkv"
    common = *chosen, "--store", str(tmp_path / "r.jsonl")
    code, _, err = run(*common, "--budget", "60%")
    assert code == 0 and "2 cells measured, 0 had results already" in " ".join(err.split())
    code, _, err = run(*common)
    assert code == 0 and "2 cells measured, 2 had results already" in " ".join(err.split())
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    experiments = [row["experiment"] for row in map(json.loads, lines) if row["kind"] == "experiment"]
    assert [one["budgets"] for one in experiments] == [["60%", "40%"]]  # a part of an experiment does not change it
    code, _, err = run(*common, "-b", "10%")
    assert code == 2 and "Unknown budget of experiment 'which-method' '10%'" in err
    code, _, err = run("lab", "run", "patching", "-b", "60%")
    assert code == 2 and "'patching' is a study, which has no budgets; leave --budget out" in err


def test_one_point_first_and_then_all(run: Run, data: Path, model_folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "r.jsonl"
    chosen = "lab", "run", "which-method", "--smoke", "-m", str(model_folder), "--data", str(data), "--only", "snapkv"
    common = *chosen, "--store", str(store)
    code, _, err = run(*common, "--at", "question=seen", "--at", "seed=0")
    assert code == 0 and "2 cells measured, 0 had results already" in " ".join(err.split())
    cells = [row for row in map(json.loads, store.read_text().splitlines()) if row["kind"] == "cell"]
    assert [cell["point"]["question"] for cell in cells] == ["seen", "seen"]
    code, _, err = run(*common)
    assert code == 0 and "2 cells measured, 2 had results already" in " ".join(err.split())
    code, _, err = run(*common, "--at", "asked=seen")
    assert code == 2 and "Unknown axis of experiment 'which-method' 'asked'" in err
    code, _, err = run(*common, "--at", "question=heard")
    assert code == 2 and "Unknown question of experiment 'which-method' 'heard'" in err
    code, _, err = run(*common, "--at", "question")
    assert code == 2 and "--at takes an axis and a value, such as seed=0, not 'question'" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "needle25"), "Unknown experiment 'needle25': did you mean needle-25"),
        (("run", "needle-25"), "give --data FOLDER"),
        (("run", "needle-25", "--data", "nowhere"), "There are no .txt files in 'nowhere/haystack'"),
        (("report", "nowhere.jsonl"), "There are no results at 'nowhere.jsonl'"),
    ],
)
def test_wrong_requests_are_one_sentence(run: Run, arguments: tuple[str, ...], sentence: str) -> None:
    code, out, err = run("lab", *arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1 and sentence in err


def test_ctrl_c_ends_with_a_sentence_and_130(
    run: Run, data: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "measure", interrupted)
    store = str(tmp_path / "r.jsonl")
    code, out, err = run("lab", "run", "needle-25", "--smoke", "--data", str(data), "--store", store)
    assert (code, out) == (130, "") and "run the same command again to continue" in err


def test_a_run_in_which_everything_fails_says_so(run: Run, data: Path, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(
        f'title = "t"\nmodels = ["{model_folder}"]\nmethods = ["full"]\nbudgets = ["64"]\n'
        '[task]\nname = "match"\nlength = [600]\n'
    )
    store = tmp_path / "r.jsonl"
    code, _, err = run("lab", "run", str(tmp_path / "small.toml"), "--data", str(data), "--store", str(store))
    assert code == 1 and "No cell of 'small' could be measured" in err
    assert "exceeds the model's 512 positions" in " ".join(err.split())
