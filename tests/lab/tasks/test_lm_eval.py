"""Tasks of lm-evaluation-harness as tasks of the lab."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import tokenizer
from kvkeep_lab.experiment import load_experiment
from kvkeep_lab.tasks.lm_eval import LmEval
from measuring import ending_subject as subject
from official import hellaswag_rows, hellaswag_text_rows, write_lines

from kvkeep.errors import UsageError

needs_it = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")


@needs_it
@pytest.mark.slow
def test_a_harness_task_reads_rows_of_a_file(tmp_path: Path, words: str) -> None:
    write_lines(tmp_path / "rows.jsonl", hellaswag_rows(words, 6))
    task = LmEval(task="hellaswag", file="rows.jsonl", samples=3)
    samples = task.prepare(tokenizer(), task.sources(tmp_path), {}, 0)
    requests = [[instance.args for instance in sample.facts["instances"]] for sample in samples]
    row = hellaswag_rows(words)[0]
    assert requests[0] == [(f"{row['activity_label']}: {row['ctx_a']} He", f" {ending}") for ending in row["endings"]]
    assert len(samples) == 3 and samples[0].ids == tokenizer()(requests[0][0][0]).input_ids
    drawn = task.prepare(tokenizer(), task.sources(tmp_path), {}, 7)
    assert [sample.ids for sample in drawn] != [sample.ids for sample in samples]
    for sample in samples:
        found = [task.measure(subject(*how), sample) for how in (("full", None), ("kv-direct", "16"), ("window", "16"))]
        assert set(found[0].scores) == {"acc", "acc_norm"} and found[0].scores == found[1].scores
        assert found[2].cost.entries == 16 and found[2].cost.prompt_tokens == len(sample.ids)


@needs_it
def test_the_most_likely_ending_is_the_answer(tmp_path: Path, words: str) -> None:
    task = load_experiment("hellaswag").task
    assert isinstance(task, LmEval)
    given = hellaswag_text_rows(words, 6)
    one = subject()
    for row in given:
        ids, endings = tokenizer()(row["ctx"]).input_ids, [tokenizer()(end).input_ids for end in row["endings"]]
        weighed, _ = one.weigh(ids, endings)
        likely = [sum(found.logs) for found in weighed]
        row["label"] = likely.index(max(likely))
    write_lines(tmp_path / task.file, given)
    task = task.model_copy(update={"samples": 6})
    samples = task.prepare(tokenizer(), task.sources(tmp_path), {}, 0)
    assert [task.measure(one, sample).scores["acc"] for sample in samples] == [1.0] * 6
    assert [task.measure(one, sample).scores["acc"] for sample in samples] == [1.0] * 6  # requests can be asked again


@needs_it
def test_generated_answers_are_scored(tmp_path: Path, words: str) -> None:
    one = subject()
    said = one.write(tokenizer()("the man was").input_ids, 4).text
    rows = [{"question": "the man was", "answer": said}, {"question": "the man was", "answer": "nothing"}]
    write_lines(tmp_path / "rows.jsonl", rows)
    config = {
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    task = LmEval(task="mine", file="rows.jsonl", config=config, measures=["exact_match"], samples=2)
    samples = task.prepare(tokenizer(), task.sources(tmp_path), {}, 0)
    assert [task.measure(one, sample).scores["exact_match"] for sample in samples] == [1.0, 0.0]
    wrong = task.model_copy(update={"measures": ["bleu"]})
    with pytest.raises(UsageError, match="gives no share 'bleu' for a single row; it gives exact_match"):
        wrong.measure(one, samples[0])


@needs_it
@pytest.mark.slow
def test_too_few_rows_and_unknown_tasks_are_refused(tmp_path: Path, words: str) -> None:
    write_lines(tmp_path / "rows.jsonl", hellaswag_rows(words))
    with pytest.raises(UsageError, match="has 4 rows, and 5 are wanted"):
        LmEval(file="rows.jsonl", samples=5).prepare(tokenizer(), [tmp_path / "rows.jsonl"], {}, 0)
    with pytest.raises(UsageError, match="knows no task 'hellaswig'"):
        LmEval(task="hellaswig").prepare(tokenizer(), [], {}, 0)


def test_few_shot_examples_of_the_test_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="examples would be taken of the same ones"):
        LmEval(file="rows.jsonl", fewshot=2)


def test_a_missing_harness_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep_lab.experiment.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs the package 'lm-eval'.*pip install './lab\[harness\]'"):
        load_experiment("hellaswag").sources(tmp_path)
