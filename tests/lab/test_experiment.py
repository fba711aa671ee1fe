"""Experiments: packaged ones load, invalid ones are refused, and keys change with results only."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvkeep_lab.experiment import Experiment, StudyExperiment, digest, load_experiment, packaged, read_experiment

from kvkeep.errors import UsageError

OURS = (  # beside no paper
    "beyond-32768", "beyond-the-window", "bounded", "finalists", "instructions", "kvgrad", "locomo", "locomo-beyond",
    "novel", "novel-perplexity", "novel-rephrased", "novel-rephrased-within",
    "other-author", "peers", "revive-parts", "rotated-values", "tool-calls", "tool-calls-shared", "which-method",
    "xsum",
)  # fmt: skip
SMALL = """
title = "Small"
methods = ["h2o", "full", "kv-direct"]
budgets = ["25%", "64"]
[task]
name = "needle"
length = [128]
depth = [0, 50]
[smoke]
budgets = ["64"]
[smoke.task]
depth = [50]
"""

PAPER = '[paper]\ntitle = "T"\nwhere = "W"\nsetting = "S"\n'
CLAIMED = PAPER + "[[paper.claims]]\nsays = 'So.'\n"
STUDY = """
title = "Small"
models = ["smollm2", "gemma3-270m"]
seeds = [0, 1]
[study]
name = "spectra"
tokens = 64
[smoke]
seeds = [0]
"""


def written(tmp_path: Path, text: str) -> Experiment:
    (tmp_path / "small.toml").write_text(text)
    return load_experiment(str(tmp_path / "small.toml"))


def test_packaged_experiments_load() -> None:
    assert {"bounded", "needle-25", "xsum"} <= set(packaged())
    for name in packaged():
        experiment = load_experiment(name)
        assert experiment.name == name and (experiment.paper is None) == (name in OURS)
        all_cells, smoke = len(experiment.cells("")), len(experiment.smoked().cells(""))
        assert 0 < smoke <= all_cells and (isinstance(experiment, StudyExperiment) or 1 < smoke < all_cells)


def test_an_experiment_has_a_cell_for_each_combination_and_the_baseline(tmp_path: Path) -> None:
    experiment = written(tmp_path, SMALL)
    cells = experiment.cells("data")
    ways = [("full", None), ("h2o", "25%"), ("kv-direct", "25%"), ("h2o", "64"), ("kv-direct", "64")]
    assert [(cell.method, cell.budget, cell.point["depth"]) for cell in cells] == [
        (*way, depth) for depth in (0, 50) for way in ways
    ]
    assert len({cell.key for cell in cells}) == 10 and len({cell.setting for cell in cells}) == 1
    assert cells[1].label == "h2o 25% (length 128, depth 0)"
    smoke = experiment.smoked()
    assert (smoke.budgets, len(smoke.cells("data"))) == (("64",), 3)
    assert {cell.key for cell in smoke.cells("data")} < {cell.key for cell in cells}  # axes and methods: the same cells


def test_keys_of_cells_change_with_settings_that_change_results(tmp_path: Path) -> None:
    experiment = written(tmp_path, SMALL)

    def keys(other: Experiment, data: str = "data") -> set[str]:
        return {cell.key for cell in other.cells(data)}

    task = experiment.model_dump(mode="json")["task"]
    for same in ({"title": "Other"}, {"budgets": ["25%"]}, {"methods": ["h2o"]}, {"task": {**task, "depth": [50]}}):
        assert keys(experiment.with_(**same)) <= keys(experiment)
    for other in ({"weights": "bfloat16"}, {"chunk": 32}, {"seeds": [1]}, {"task": {**task, "samples": 7}}):
        assert not keys(experiment.with_(**other)) & keys(experiment)
    assert not keys(experiment, "other data") & keys(experiment)


def test_the_digest_covers_names_and_contents_of_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("one")
    second.write_text("two")
    before = digest([first, second])
    assert before == digest([first, second]) != digest([first]) != digest([second])
    second.write_text("three")
    assert digest([first, second]) != before


@pytest.mark.parametrize(
    ("text", "changes", "sentence"),
    [
        (SMALL, {'"h2o"': '"h20"'}, r"wrong at 'methods.0': Unknown method 'h20': did you mean h2o"),
        (SMALL, {"title": "titel"},
         r"wrong at '(title': it is missing|titel': there is no such setting) \(and 1 more\)\."),
        (SMALL, {'"64"]\n[task]': '"64 parsecs"]\n[task]'},
         r"wrong at 'budgets.1': Budget '64 parsecs' cannot be read"),
        (SMALL, {"50]\n[smoke]": "500]\n[smoke]"},
         r"wrong at 'task.depth.1': input should be less than or equal to 100\."),
        (SMALL, {"depth = [50]": "depht = [50]"},
         r"\[smoke\] of experiment 'small' is wrong at 'task.depht': there is no"),
        (SMALL, {'"needle"': '"noodle"'}, r"wrong at 'task': Unknown task 'noodle': did you mean needle"),
        (SMALL, {'name = "needle"\n': ""}, r"wrong at 'task': it needs a name: .*match, needle, "),
        (SMALL, {'"needle"': '["needle"]'}, r"wrong at 'task': Unknown task '\['needle'\]'"),
        (SMALL, {"[smoke]": "[smoke]\ntune = 3"}, r"\[smoke\] of experiment 'small' is wrong at 'tune'"),
        (SMALL, {"[smoke]": "[smoke]\ntune = {candidates = 3}"}, r"\[smoke\] of .* is wrong at 'tune"),
        (SMALL, {"length": 'form = "haystack"\nlength'}, r"wrong at 'task.form': Unknown needle 'haystack'"),
        (SMALL, {"[task]": "[task"}, r"small.toml' is not TOML: "),
        (SMALL, {"methods": "seeds = []\nmethods"}, r"wrong at 'seeds': tuple should have at least 1 item"),
        (SMALL, {"[smoke]\nbudgets": f'{PAPER}[[paper.values]]\nmetric = "bleu"\nvalue = 1\n[smoke]\nbudgets'},
         r"Unknown metric 'bleu'"),
        *(
            (SMALL, {"[smoke]\nbudgets": f"{CLAIMED}{claim}\n[smoke]\nbudgets"}, sentence)
            for claim, sentence in (
                ('metric = "founds"\nmethods = ["h2o"]\nat_least = 1', r"Unknown metric 'founds': did you mean found"),
                ('metric = "found"\nmethods = ["h20"]\nat_least = 1', r"claims.0.methods.0': Unknown method 'h20'"),
                ('metric = "found"\nmethods = ["h2o"]\nthan = ["ful"]\nat_least = 1', r"claims.0.than.0': Unknown"),
                ('metric = "found"\nmethods = ["h2o"]\nbudgets = ["x"]\nat_least = 1', r"budgets.0': Budget 'x'"),
                ('methods = ["h2o"]\nat_most = 1', r"claims.0': methods, budgets and limits mean nothing without"),
                ('methods = ["h2o"]', r"claims.0': methods, budgets and limits mean nothing without"),
                ('metric = "found"\nat_least = 1', r"the claim 'So.' does not name the methods"),
                ('metric = "found"\nmethods = ["h2o"]\nat_least = 1\nat_most = 0.5', r"at least 1 and at most 0.5"),
            )
        ),
        (STUDY, {'"spectra"': '"spectre"'}, r"wrong at 'study': Unknown study 'spectre': did you mean spectra"),
        (STUDY, {"tokens": "token"}, r"wrong at 'study.token': there is no such setting"),
        (STUDY, {"64": "4"}, r"wrong at 'study.tokens': input should be greater than or equal to 16"),
        (STUDY, {"[study]": '[task]\nname = "match"\n[study]'}, r"has a \[task\] and a \[study\]"),
        (STUDY, {'"spectra"\ntokens': '"long-chat"\nmethods = ["h20"]\nturns'}, r"Unknown method 'h20'"),
        (STUDY, {"[smoke]": CLAIMED + 'metric = "within"\nmethods = ["h2o"]\nat_most = 0.0\n[smoke]'},
         r"the claim 'So.' names methods"),
    ],
)  # fmt: skip
def test_an_invalid_experiment_is_refused_in_one_sentence(
    tmp_path: Path, text: str, changes: dict[str, str], sentence: str
) -> None:
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new, 1)
    with pytest.raises(UsageError, match=sentence) as error:
        written(tmp_path, text)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_a_claim_is_a_sentence_or_a_limit_on_a_metric(tmp_path: Path) -> None:
    text = SMALL.replace("[smoke]\nbudgets", f"{PAPER}claims = ['So it is.']\n[smoke]\nbudgets")
    plain = written(tmp_path, text)
    assert plain.paper is not None and [claim.says for claim in plain.paper.claims] == ["So it is."]
    assert plain.paper.claims[0].metric is None
    decided = 'metric = "found"\nmethods = ["h2o"]\nthan = ["full"]\nbudgets = ["64"]\nat_least = -0.1\n'
    judged = written(tmp_path, SMALL.replace("[smoke]\nbudgets", f"{CLAIMED}{decided}[smoke]\nbudgets"))
    assert judged.paper is not None and judged.paper.claims[0].at_least == -0.1
    assert judged.with_() == judged and plain.with_() == plain  # as a store keeps them
    assert {cell.key for cell in judged.cells("")} == {cell.key for cell in plain.cells("")}


def test_an_unknown_experiment_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean needle-25"):
        load_experiment("needle25")
    with pytest.raises(UsageError, match="cannot be read: no such file"):
        load_experiment("nowhere.toml")


def test_missing_data_are_reported_before_anything_runs(tmp_path: Path) -> None:
    needle, summary = load_experiment("needle-25"), load_experiment("xsum")
    with pytest.raises(UsageError, match="give --data FOLDER, with .txt files in haystack/"):
        needle.sources(None)
    with pytest.raises(UsageError, match=r"There are no .txt files in"):
        needle.sources(tmp_path)
    with pytest.raises(UsageError, match=r"There is no file .*xsum_0shot_first200.jsonl"):
        summary.sources(tmp_path)


def test_a_study_has_a_cell_for_each_model_and_seed(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(STUDY)
    study = load_experiment(str(tmp_path / "small.toml"))
    assert isinstance(study, StudyExperiment) and study.study.name == "spectra"
    cells = study.cells("data")
    models = ("smollm2", "gemma3-270m")
    assert [(cell.model, cell.seed) for cell in cells] == [(model, seed) for model in models for seed in (0, 1)]
    assert len({cell.key for cell in cells}) == 4 and len({cell.setting for cell in cells}) == 1
    assert {cell.key for cell in study.smoked().cells("data")} < {cell.key for cell in cells}
    for other in ({"weights": "bfloat16"}, {"study": {"name": "spectra", "tokens": 65}}, {"name": "other"}):
        assert not {cell.key for cell in study.with_(**other).cells("data")} & {cell.key for cell in cells}
    again = read_experiment(study.model_dump(mode="json"), "it")
    assert again == study
