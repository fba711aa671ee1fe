"""RULER: questions have the parts that RULER gives them, and prompts fill the requested length."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS as KNOWN
from conftest import tokenizer
from kvkeep_lab.tasks.ruler import Ruler, qa
from kvkeep_lab.tasks.ruler.families import ESSAYS, FAMILIES, GENERATED
from kvkeep_lab.tasks.ruler.generated import LISTS, NOISE, WORDS, RulerQuestion
from kvkeep_lab.tasks.ruler.task import largest, string_match
from measuring import subject

from kvkeep.errors import UsageError

_SENTENCE = ["I", "read", "and", "wrote", "much", "then."]
ESSAY = _SENTENCE * 50
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
QUESTIONS = [
    [
        {"question": f"What is {about} {number}?", "answers": [{"text": "blue"}], "is_impossible": False},
        {"question": "Why?", "answers": [], "is_impossible": True},
    ]
    for about in ("Sea", "Sky")
    for number in range(3)
]
SQUAD = {
    "data": [
        {"paragraphs": [{"context": f"{qas[0]['question'][8:-1]} is blue.", "qas": qas} for qas in part]}
        for part in (QUESTIONS[:3], QUESTIONS[3:])
    ]
}
HOTPOT = [
    {"question": f"Who is {name}?", "answer": name, "context": [[name, ["One. ", "Two."]], ["Common", ["All."]]]}
    for name in ("Ann", "Bob", "Cid")
]


def question_of(name: str, size: int = 40, length: int = 4096, seed: int = 0) -> RulerQuestion:
    family = FAMILIES[name]
    return family.ask(ESSAY if family.reads == ESSAYS else None, random.Random(seed), size, length)


def test_word_lists_are_distinct_and_large_enough() -> None:
    assert list(LISTS) == ["nouns", "adjectives", "verbs"] and len(WORDS) == len(set().union(*LISTS.values())) > 800
    assert all(len(words) == len(set(words)) for words in LISTS.values())
    assert all(re.fullmatch("[a-z]+", word) for word in WORDS)


@pytest.mark.parametrize("name", GENERATED)
def test_a_question_depends_on_its_seed_and_contains_its_answers(name: str) -> None:
    size = 80 if name == "fwe" else 40
    one = question_of(name, size)
    assert one == question_of(name, size) != question_of(name, size, seed=1)
    assert all(answer in one.text for answer in one.answers) and "{" not in one.text + one.lead
    assert [one.right.index(answer) for answer in one.answers] == sorted(one.right.index(a) for a in one.answers)
    assert len(question_of(name, size + 20).text) > len(one.text)


@pytest.mark.parametrize(
    ("name", "needles", "answers", "kind"),
    [
        ("niah_single_1", 1, 1, r"\d{7}"),
        ("niah_single_2", 1, 1, r"\d{7}"),
        ("niah_single_3", 1, 1, UUID),
        ("niah_multikey_1", 4, 1, r"\d{7}"),
        ("niah_multikey_2", 41, 1, r"\d{7}"),
        ("niah_multikey_3", 41, 1, UUID),
        ("niah_multivalue", 4, 4, r"\d{7}"),
        ("niah_multiquery", 4, 4, r"\d{7}"),
    ],
)
def test_needle_families_hide_their_needles(name: str, needles: int, answers: int, kind: str) -> None:
    one = question_of(name)
    word = "uuids" if kind == UUID else "numbers"
    found = re.findall(rf"One of the special magic {word} for (\S+) is: (\S+)\.(?!\S)", one.text)
    assert len(found) == needles and len(one.answers) == len(set(one.answers)) == answers
    assert all(re.fullmatch(kind, value) for _, value in found)
    assert {value for key, value in found if key in one.lead} == set(one.answers)
    many = answers > 1
    assert one.text.startswith("Some special magic numbers are" if many else f"A special magic {word[:-1]} is hidden")
    assert one.lead.endswith("provided text are" if many else "provided text is")
    keys = {key for key, _ in found}
    pattern = UUID if name == "niah_multikey_3" else "[a-z]+-[a-z]+"
    assert all(re.fullmatch(pattern, key) for key in keys)
    assert len(keys) == {"niah_multivalue": 1}.get(name, needles)


def test_haystacks_are_noise_or_essays() -> None:
    noise, essay = question_of("niah_single_1"), question_of("niah_single_2")
    assert noise.text.count(f"{NOISE}\n") == 40
    hay = re.sub(r"One of the special magic numbers for \S+ is: \d{7}\. ?", "", essay.text.split("\n")[1])
    assert hay.split() == ESSAY[:40]
    assert question_of("niah_single_2", 700).text.count("wrote") > ESSAY.count("wrote")  # begins again at its end
    places = {question_of("niah_single_2", 300, seed=seed).text.index("One of the special") for seed in range(20)}
    assert len(places) > 10


def test_variable_tracking_has_a_chain_that_can_be_followed() -> None:
    one = question_of("vt")
    example, _, text = one.text.rpartition("Memorize and track")
    value = re.search(r"assigned the value (\d{5}) in", text)
    assert value is not None and one.lead.endswith(f"5 variables are assigned the value {value[1]}, they are:")
    assert text.count(NOISE) == 40 and example.count(NOISE) == 10
    for part, letters in ((example, 3), (text, 5)):
        first = re.search(r"VAR ([A-Z]+) = \d{5}", part)
        chain = [first[1] if first else "", *re.findall(r"VAR ([A-Z]+) = VAR", part)]
        assert re.findall(r"= VAR ([A-Z]+)", part) == chain[:-1] and len(set(chain)) == 5
        assert all(len(name) == letters for name in chain)
        said = example.strip().split("they are: ")[1].split() if letters == 3 else one.answers
        assert said == chain
    assert "The grass is green. " in question_of("vt", 1, 512).text  # sentences of their own where lines are too few


@pytest.mark.parametrize(("length", "often", "seldom", "example"), [(4096, 30, 3, 10), (1024, 6, 1, 3)])
def test_common_words_occur_as_often_as_the_paper_says(length: int, often: int, seldom: int, example: int) -> None:
    one = question_of("cwe", 40, length)
    first, second = one.text.split("Question: What are the 10 most common words")[:2]
    for text, times, answers in ((first, example, None), (second, often, one.answers)):
        listed = text.split("appear most often.\n")[1].split("\nQuestion")[0]
        counts = Counter(re.findall(r"\d+\. (\S+)", listed))
        common = [word for word, count in counts.most_common(10)]
        assert {counts[word] for word in common} == {times}
        assert answers is None or sorted(common) == sorted(answers)
    assert min(counts.values()) == seldom and len(counts) == 40
    assert one.right.startswith(f"1. {one.answers[0]} 2. {one.answers[1]} ")


def test_frequent_words_follow_the_zeta_distribution() -> None:
    one = question_of("fwe", 600, 2048)
    listed = one.text.split("coded words. ")[1].split("\nQuestion")[0].split()
    (dots, _), *rest = Counter(listed).most_common(5)
    assert dots == "..." and [word for word, _ in rest[:3]] == one.answers
    assert [count for _, count in rest[:3]] == [int(600 / rank**2 / 1.6449341) for rank in (2, 3, 4)]
    assert len(set(listed)) <= 2048 // 50 and all(re.fullmatch("[a-z]{6}", word) for word in one.answers)


def documents(read: Any, path: Path, content: Any) -> qa.Documents:
    path.write_text(json.dumps(content))
    found: qa.Documents = read([path])
    return found


def test_squad_questions_come_with_documents_of_squad(tmp_path: Path) -> None:
    squad = documents(qa.squad, tmp_path / "squad.json", SQUAD)
    assert len(squad.texts) == len(squad.questions) == 6 == FAMILIES["qa_1"].greatest(squad)
    for seed in range(5):
        one = qa.ask(squad, random.Random(seed), 3, 512)
        subject, number = re.findall(r"Question: What is (\w+) (\d)\?$", one.text)[0]
        assert f"{subject} {number} is blue." in one.text and one.text.count(f"{subject} ") == 4
        assert one.text.count("Document ") == 3 and one.answers == ["blue"] == [one.right]
    assert qa.ask(squad, random.Random(0), 6, 512).text.count("is blue.") == 6


def test_hotpotqa_questions_come_with_their_documents(tmp_path: Path) -> None:
    hotpotqa = documents(qa.hotpotqa, tmp_path / "hotpotqa.json", HOTPOT)
    assert sorted(hotpotqa.texts) == ["Ann\nOne. Two.", "Bob\nOne. Two.", "Cid\nOne. Two.", "Common\nAll."]
    one = qa.ask(hotpotqa, random.Random(0), 1, 512)
    (name,) = one.answers
    assert one.text.count("Document ") == 2 and f":\n{name}\nOne. Two." in one.text and ":\nCommon\nAll." in one.text


@pytest.mark.parametrize(("read", "content"), [(qa.squad, HOTPOT), (qa.hotpotqa, SQUAD), (qa.squad, {"data": []})])
def test_files_of_another_form_are_refused(tmp_path: Path, read: Any, content: Any) -> None:
    with pytest.raises(UsageError, match="has no questions in .* own JSON form"):
        documents(read, tmp_path / "a.json", content)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "haystack").mkdir()
    draw = random.Random(0)
    sentences = (" ".join(draw.choices(KNOWN, k=9)) for _ in range(60))
    (tmp_path / "haystack" / "a.txt").write_text(". ".join(sentences))
    paragraphs = [
        {"context": f"{word} is here", "qas": [{"question": f"where is {word}", "answers": [{"text": "here"}]}]}
        for word in KNOWN
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return tmp_path


def test_string_match_follows_the_official_rule() -> None:
    assert string_match(" It is 12,\n Ann and Bob.", ["ann", "BOB", "Cid", "12"], some=False) == 0.75
    assert string_match("ann", ["Ann", "Bob"], some=True) == 1.0 and string_match("cid", ["Ann"], some=True) == 0.0


@pytest.mark.parametrize("limit", [None, 5, 60, 100])
@pytest.mark.parametrize("space", [30, 31, 100, 2000])
def test_largest_finds_the_largest_size_that_fits(space: int, limit: int | None) -> None:
    fits = [size for size in range(3, (limit or 1000) + 1) if 10 * size <= space]
    assert largest(lambda size: 10 * size, space, 3, limit) == max(fits)
    assert largest(lambda size: 10 * size, 29, 3, limit) is None


@pytest.mark.parametrize("name", [*GENERATED, "qa_1"])
def test_prompts_fill_the_length(data: Path, name: str) -> None:
    task = Ruler(length=[1500], family=[name], samples=2, new=20)
    sources = task.sources(data)
    first, second = task.prepare(tokenizer(), sources, task.points()[0], 0)
    assert [first, second] == task.prepare(tokenizer(), sources, task.points()[0], 0) and first != second
    assert first != task.prepare(tokenizer(), sources, task.points()[0], 1)[0]
    for sample in (first, second):
        longest = len(KNOWN) * 5 if name == "qa_1" else 1500 - 20  # all there is, or a unit less than there is room for
        assert longest - 60 < len(sample.ids) <= 1500 - 20
        assert sample.facts["new"] == 20 and sample.facts["some"] == (name == "qa_1")
    official = Ruler().prepare(tokenizer(), sources, task.points()[0], 0)[0]
    assert official.facts["new"] == FAMILIES[name].new


def test_a_family_reads_only_the_files_it_needs(data: Path, tmp_path: Path) -> None:
    assert Ruler(family=["niah_single_1", "vt", "cwe", "fwe"]).sources(None) == []
    assert [path.name for path in Ruler(family=["niah_single_2", "qa_1"]).sources(data)] == ["a.txt", "squad.json"]
    assert [path.name for path in Ruler(family=["qa_1"]).sources(data / "squad.json")] == ["squad.json"]
    with pytest.raises(UsageError, match="give --data FOLDER, with .txt files"):
        Ruler().sources(None)
    with pytest.raises(UsageError, match="There is no file .*hotpotqa.json"):
        Ruler(family=["qa_2"]).sources(data)


def test_unknown_families_and_short_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="Unknown family of RULER 'niah_single': did you mean niah_"):
        Ruler(family=["niah_single"])
    with pytest.raises(UsageError, match="A length of 128 tokens has no room for RULER's cwe"):
        Ruler(family=["cwe"]).prepare(tokenizer(), [], {"length": 128, "family": "cwe"}, 0)


def test_an_answer_is_scored_by_string_match(data: Path) -> None:
    task = Ruler(length=[300], family=["niah_single_1"], samples=1, new=4)
    (sample,) = task.prepare(tokenizer(), [], task.points()[0], 0)
    one = subject("kv-direct", "32")
    found = task.measure(one, sample)
    assert set(found.scores) == {metric.name for metric in task.metrics} and found.cost.prompt_tokens == len(sample.ids)
    sample.facts["answers"] = [one.write(sample.ids, 4).text, "never said"]
    assert task.measure(one, sample).scores["match"] == 0.5
