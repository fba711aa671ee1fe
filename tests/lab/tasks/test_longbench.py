"""LongBench: the authors' prompts and rules on made-up rows, and scores computed by hand."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import tokenizer
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks.longbench import GROUPS, SETTINGS, LongBench, cut
from kvkeep_lab.tasks.longbench_scores import JUDGES, classification, code_similarity, count, qa_f1, retrieval, rouge_l
from kvkeep_lab.tasks.longbench_v2 import LongBenchV2, chosen, filled
from measuring import subject
from official import CLASSES, longbench_rows, longbench_v2_rows, write_lines, write_official

from kvkeep.errors import UsageError


@pytest.fixture
def data(tmp_path: Path, words: str) -> Path:
    write_official(tmp_path, words)
    return tmp_path


def test_settings_equal_the_authors() -> None:
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
        without_question = name in ("gov_report", "multi_news", "passage_count", "lcc")
        assert "{input}" in prompt and ("<input>" not in prompt) == without_question


def test_only_the_first_line_is_scored_for_some_data_sets() -> None:
    trec, qasper = SETTINGS["trec"], SETTINGS["qasper"]
    assert trec.line("\n\nSport\nQuestion: x") == "Sport"
    assert trec.ended("\nSport\n") and not trec.ended("\n\nSp") and not qasper.ended("a\n")
    assert trec.score("Sport\nFood", ["Sport"], CLASSES) == 1.0
    assert qasper.score("no\nyes", ["yes"], []) == pytest.approx(2 / 3)
    assert qasper.score("yes", ["no", "yes"], []) == 1.0 and qasper.score("yes", [], []) == 0.0


def test_long_prompts_are_cut_in_the_middle() -> None:
    made = tokenizer()
    assert cut(made, "the man was not there", 5) == "the man was not there"
    assert cut(made, "the man was not there at all", 5) == "the manat all"  # put together as the authors do


@pytest.mark.parametrize("name", SETTINGS)
def test_every_data_set_is_prompted_and_scored(data: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, name, replace(SETTINGS[name], new=16))  # summaries may have 512 tokens
    task = LongBench(dataset=[name], samples=1, max_length=120)
    (sample,) = task.prepare(tokenizer(), task.sources(data), {"dataset": name}, 0)
    assert ("<bot>" in tokenizer().decode(sample.ids)) == SETTINGS[name].chat and len(sample.ids) <= 124
    found = task.measure(subject("h2o", "32"), sample)
    assert set(found.scores) == {"score", SETTINGS[name].group} and 0 <= found.scores["score"] <= 1
    assert found.cost.prompt_tokens == len(sample.ids) and found.cost.entries == 32


def test_a_right_answer_scores_one(data: Path) -> None:
    task = LongBench(dataset=["hotpotqa"], samples=1, max_length=100)
    (sample,) = task.prepare(tokenizer(), task.sources(data), {"dataset": "hotpotqa"}, 0)
    said = subject().write(sample.ids, 32).text
    sample.facts["answers"] = ["nothing", said]
    assert task.measure(subject(), sample).scores == {"score": 1.0, "multi_doc": 1.0}


def test_rows_are_the_first_ones_or_drawn_by_seed(data: Path, words: str) -> None:
    (data / "qasper.jsonl").write_text("".join(json.dumps(row) + "\n" for row in longbench_rows("qasper", words, 12)))
    task = LongBench(dataset=["lcc", "qasper"], samples=2)
    files, point = task.sources(data), {"dataset": "qasper"}
    assert [file.name for file in files] == ["lcc.jsonl", "qasper.jsonl"]
    assert task.points() == [{"dataset": "lcc"}, point]
    first, drawn = task.prepare(tokenizer(), files, point, 0), task.prepare(tokenizer(), files, point, 3)
    assert first != drawn == task.prepare(tokenizer(), files, point, 3)
    assert task.prepare(tokenizer(), files, {"dataset": "lcc"}, 0) != first


def test_missing_rows_and_fields_are_reported(data: Path, words: str) -> None:
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


def test_the_field_names_of_the_hub_are_accepted(data: Path, words: str) -> None:
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


def test_the_prompt_of_version_2_follows_the_template(words: str) -> None:
    row = {**longbench_v2_rows(words, 1)[0], "context": " about $Q$ and $C_A$ ", "choice_A": "one $C_B$"}
    text = filled(row)
    instruction = "Please read the following text and answer the question below."
    assert text.startswith(f"{instruction}\n\n<text>\nabout $Q$ and $C_A$\n")
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
def test_choices_are_parsed_as_the_authors_do(text: str, choice: str | None) -> None:
    assert chosen(text) == choice


def test_questions_are_scored_by_difficulty_and_length(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("text", "right", "expected"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("It is the Eiffel Tower in Paris", "Eiffel Tower", 2 * (2 / 6) * 1 / (2 / 6 + 1)),  # without "the"
        ("paris, paris", "Paris", 2 * (1 / 2) * 1 / (1 / 2 + 1)),  # a word counts as often as both have it
        ("don't", "dont", 1.0),
        ("theory of an idea", "of idea", 2 * (2 / 3) * 1 / (2 / 3 + 1)),  # articles go as words, not as letters
        ("", "Paris", 0.0),
        ("the", "a", 0.0),
        ("London", "Paris", 0.0),
    ],
)
def test_f1_is_computed_over_words(text: str, right: str, expected: float) -> None:
    assert qa_f1(text, right) == pytest.approx(expected)


# The example of the package's README, broken words and all, and what it prints for it: p 19/36, r 19/49.
HYPOTHESIS = (
    "the #### transcript is a written version of each day 's cnn student news program use this transcript to he    lp "
    "students with reading comprehension and vocabulary use the weekly newsquiz to test your knowledge of storie s you "
    "    saw on cnn student news"
)
REFERENCE = (
    "this page includes the show transcript use the transcript to help students with reading comprehension and     "
    "vocabulary at the bottom of the page , comment for a chance to be mentioned on cnn student news . you must be a "
    "teac    her or a student age # # or older to request a mention on the cnn student news roll call . the "
    "weekly newsquiz tests     students ' knowledge of even ts in the news"
)


def test_rouge_equals_the_packages_example() -> None:
    assert rouge_l(HYPOTHESIS, REFERENCE) == pytest.approx(0.44705881864636676, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "right", "expected"),
    [
        ("the cat sat", "the cat sat", 1.0),
        ("the cat sat", "the cat ran", 2 / 3),
        ("The cat sat", "the cat sat", 2 / 3),  # case counts
        ("the cats sat", "the cat sat", 2 / 3),  # and so do endings
        ("sat cat the", "the cat sat", 1 / 3),  # order within a sentence
        ("c d. a b", "a b. c d", 1.0),  # but not of sentences
        ("the the the the", "the", 1.0),  # a word counts once
        ("a b a c", "a b", 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("a b. ", "a b", 2 * (2 / 3) * 1 / (2 / 3 + 1)),  # what follows the last stop is a word, if it is a space
        ("", "a b", 0.0),
        ("...", "a b", 0.0),
        ("x y", "a b", 0.0),
    ],
)
def test_rouge_equals_scores_computed_by_hand(text: str, right: str, expected: float) -> None:
    assert rouge_l(text, right) == pytest.approx(expected, abs=1e-7)


def slow_common(left: list[str], right: list[str]) -> list[str]:
    """The definition: by recursion, from the ends."""
    if not left or not right:
        return []
    if left[-1] == right[-1]:
        return [*slow_common(left[:-1], right[:-1]), left[-1]]
    one, other = slow_common(left[:-1], right), slow_common(left, right[:-1])
    return one if len(one) > len(other) else other


def test_rouge_equals_its_recursive_definition() -> None:
    draw = random.Random(0)
    for _ in range(60):
        said, wanted = ([draw.choices("abcdef", k=draw.randrange(1, 7)) for _ in range(2)] for _ in range(2))
        common = {word for one in wanted for other in said for word in slow_common(one, other)}
        recall, precision = len(common) / len({*wanted[0], *wanted[1]}), len(common) / len({*said[0], *said[1]})
        expected = 2 * precision * recall / (precision + recall + 1e-8)
        found = rouge_l(*(".".join(" ".join(words) for words in part) for part in (said, wanted)))
        assert found == pytest.approx(expected)


def test_rouge_handles_very_long_sentences() -> None:
    words = [f"w{number}" for number in range(1500)]
    assert rouge_l(" ".join(words), " ".join(words[::2])) == pytest.approx(2 / 3, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "right", "expected"),
    [
        ("Type: Other location", "Other location", 1.0),  # "location" is part of the right one
        ("Sport or Food", "Sport", 1 / 2),
        ("Sport", "Food", 0.0),
        ("sport", "Sport", 0.0),
        ("location", "Other location", 0.0),
        ("", "Sport", 0.0),
    ],
)
def test_classification_divides_by_the_classes_named(text: str, right: str, expected: float) -> None:
    assert classification(text, right, ["Food", "Sport", "location", "Other location"]) == expected


def test_counts_and_retrieval_score_the_share_of_right_numbers() -> None:
    assert count("17", "17") == 1.0 and count("17 of 30, no: 17", "17") == 2 / 3
    assert count("none", "17") == 0.0 and count("170", "17") == 0.0 and count("1 7", "17") == 0.0
    assert retrieval("Paragraph 12", "Paragraph 12") == 1.0
    assert retrieval("Paragraphs 1 and 12", "Paragraph 12") == 1 / 2 and retrieval("twelve", "Paragraph 12") == 0.0


@pytest.mark.parametrize(
    ("text", "right", "expected"),
    [
        ("return a + b", "return a + b", 1.0),
        ("\n\n# adds\n// so\n```python\nabcd\nrest", "abxd", 0.75),  # ab and d: 2 * 3 / 8
        ("# all is comment", "x", 0.0),
        ("abc", "abcdefg", 0.6),
        ("abc", "ab", 0.8),
        ("ab", "abcd", 0.67),  # in whole percent
    ],
)
def test_code_similarity_compares_the_first_line_of_code(text: str, right: str, expected: float) -> None:
    assert code_similarity(text, right) == expected
