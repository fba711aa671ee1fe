"""LongBench: the authors' prompts and rules, on made-up rows of their shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import tokenizer
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.longbench import GROUPS, SETTINGS, LongBench, cut
from kvkeep_lab.tasks.longbench_scores import JUDGES
from kvkeep_lab.tasks.longbench_v2 import LongBenchV2, chosen, filled
from measuring import subject
from official import CLASSES, longbench_rows, longbench_v2_rows, write_lines, write_official

from kvkeep.errors import UsageError


@pytest.fixture
def data(tmp_path: Path, words: str) -> Path:
    write_official(tmp_path, words)
    return tmp_path


def test_the_settings_are_the_authors() -> None:
    assert len(SETTINGS) == 16 and {setting.group for setting in SETTINGS.values()} == set(GROUPS)
    assert {setting.judge for setting in SETTINGS.values()} == set(JUDGES)
    plain = {name for name, setting in SETTINGS.items() if not setting.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
    assert {name for name, setting in SETTINGS.items() if setting.first_line} == {"trec", "triviaqa", "samsum"}
    tokens = {name: setting.new for name, setting in SETTINGS.items()}
    some = ("qasper", "multifieldqa_en", "hotpotqa", "qmsum", "trec", "lcc")
    assert [tokens[name] for name in some] == [128, 64, 32, 512, 64, 64]
    for name, setting in SETTINGS.items():
        prompt = setting.prompt.format(context="{input}", input="<input>")
        whole = name in ("gov_report", "multi_news", "passage_count", "lcc")
        assert "{input}" in prompt and ("<input>" not in prompt) == whole


def test_only_the_first_line_counts_where_the_authors_say_so() -> None:
    trec, qasper = SETTINGS["trec"], SETTINGS["qasper"]
    assert trec.line("\n\nSport\nQuestion: x") == "Sport"
    assert trec.ended("\nSport\n") and not trec.ended("\n\nSp") and not qasper.ended("a\n")
    assert trec.score("Sport\nFood", ["Sport"], CLASSES) == 1.0
    assert qasper.score("no\nyes", ["yes"], []) == pytest.approx(2 / 3)
    assert qasper.score("yes", ["no", "yes"], []) == 1.0 and qasper.score("yes", [], []) == 0.0


def test_long_prompts_lose_their_middle() -> None:
    made = tokenizer()
    assert cut(made, "the man was not there", 5) == "the man was not there"
    assert cut(made, "the man was not there at all", 5) == "the manat all"  # put together as the authors do


@pytest.mark.parametrize("name", SETTINGS)
def test_every_data_set_is_asked_and_judged(data: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, name, replace(SETTINGS[name], new=16))  # summaries may have 512 tokens
    task = LongBench(dataset=[name], samples=1, max_length=120)
    (sample,) = task.prepare(tokenizer(), task.sources(data), {"dataset": name}, 0)
    assert ("<bot>" in tokenizer().decode(sample.ids)) == SETTINGS[name].chat and len(sample.ids) <= 124
    found = task.measure(subject("h2o", "32"), sample)
    assert set(found.scores) == {"score", SETTINGS[name].group} and 0 <= found.scores["score"] <= 1
    assert found.cost.prompt_tokens == len(sample.ids) and found.cost.entries == 32


def test_a_right_answer_is_found_right(data: Path) -> None:
    task = LongBench(dataset=["hotpotqa"], samples=1, max_length=100)
    (sample,) = task.prepare(tokenizer(), task.sources(data), {"dataset": "hotpotqa"}, 0)
    said = subject().write(sample.ids, 32).text
    sample.facts["answers"] = ["nothing", said]
    assert task.measure(subject(), sample).scores == {"score": 1.0, "multi_doc": 1.0}


def test_rows_are_the_first_or_drawn(data: Path, words: str) -> None:
    (data / "qasper.jsonl").write_text("".join(json.dumps(row) + "\n" for row in longbench_rows("qasper", words, 12)))
    task = LongBench(dataset=["lcc", "qasper"], samples=2)
    files, point = task.sources(data), {"dataset": "qasper"}
    assert [file.name for file in files] == ["lcc.jsonl", "qasper.jsonl"]
    assert task.points() == [{"dataset": "lcc"}, point]
    first, drawn = task.prepare(tokenizer(), files, point, 0), task.prepare(tokenizer(), files, point, 3)
    assert first != drawn == task.prepare(tokenizer(), files, point, 3)
    assert task.prepare(tokenizer(), files, {"dataset": "lcc"}, 0) != first


def test_rows_that_are_not_there_are_told(data: Path, words: str) -> None:
    point = {"dataset": "qasper"}
    (data / "a.jsonl").write_text('{"input": "", "context": "", "answers": []}')
    (data / "b.jsonl").write_text('{"context": "", "answers": [], "all_classes": []}')
    for file, samples, sentence in (
        ("qasper", 3, "has 2 rows, and 3 are wanted"),
        ("lcc", 1, "holds rows of lcc, not of qasper"),
        ("a", 1, "has no field 'all_classes'"),
        ("b", 1, "A row of qasper has no field 'input'"),
    ):
        with pytest.raises(UsageError, match=sentence):
            LongBench(dataset=["qasper"], samples=samples).prepare(tokenizer(), [data / f"{file}.jsonl"], point, 0)
    with pytest.raises(ValueError, match="Unknown data set of LongBench 'hotpot'"):
        LongBench(dataset=["hotpot"])
    with pytest.raises(UsageError, match=r"There is no file '.*qmsum.jsonl'"):
        LongBench(dataset=["qmsum"]).sources(data / "haystack")


def test_the_hub_calls_the_question_by_another_name(data: Path, words: str) -> None:
    task, samples = LongBench(dataset=["qasper"], samples=2), []
    for name in ("input", "question"):
        found = [
            {(name if key == "input" else key): value for key, value in row.items()}
            for row in longbench_rows("qasper", words)
        ]
        write_lines(data / "qasper.jsonl", found)
        samples.append(task.prepare(tokenizer(), [data / "qasper.jsonl"], {"dataset": "qasper"}, 0))
    assert samples[0] == samples[1]


# -- version 2 ----------------------------------------------------------------------------------------


def test_the_prompt_has_each_part_in_its_place(words: str) -> None:
    row = {**longbench_v2_rows(words, 1)[0], "context": " about $Q$ and $C_A$ ", "choice_A": "one $C_B$"}
    text = filled(row)
    asked = "Please read the following text and answer the question below."
    assert text.startswith(f"{asked}\n\n<text>\nabout $Q$ and $C_A$\n")
    assert "question: which of them was there\nChoices:\n(A) one $C_B$\n(B) the " in text
    assert text.endswith('\n\nFormat your response as follows: "The correct answer is (insert answer here)".')


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("The correct answer is (B).", "B"),
        ("**The correct answer is (C)**", "C"),
        ("The correct answer is **(D)** since", "D"),
        ("The correct answer is A.", "A"),
        ("The correct answer is A? No. The correct answer is (B)", "B"),  # brackets first
        ("The correct answer is (E)", None),
        ("the correct answer is (A)", None),
        ("(A)", None),
        ("", None),
    ],
)
def test_choices_are_read_as_the_authors_read_them(text: str, choice: str | None) -> None:
    assert chosen(text) == choice


def test_questions_are_counted_by_difficulty_and_length(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = LongBenchV2(samples=3, max_length=200, new=4)
    samples = task.prepare(tokenizer(), task.sources(data), {}, 0)
    assert [sample.facts["groups"] for sample in samples] == [["easy", "short"], ["hard", "medium"], ["easy", "long"]]
    found = task.measure(subject(), samples[0])
    assert found.scores == {"overall": 0.0, "easy": 0.0, "short": 0.0, "answered": 0.0}
    honest = Subject.write

    def right(self: Subject, ids: list[int], new: int, ended: object = None) -> object:
        answer = honest(self, ids, 2)
        return type(answer)("The correct answer is (B)", answer.tokens, answer.cost)

    monkeypatch.setattr(Subject, "write", right)
    assert task.measure(subject(), samples[1]).scores == {"overall": 1.0, "hard": 1.0, "medium": 1.0, "answered": 1.0}
    assert task.measure(subject(), samples[2]).scores["overall"] == 0.0
    with pytest.raises(UsageError, match="has 3 questions, and 4 are wanted"):
        LongBenchV2(samples=4).prepare(tokenizer(), task.sources(data), {}, 0)
