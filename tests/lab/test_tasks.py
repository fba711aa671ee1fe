"""Tasks: their prompts, and their metrics computed by hand."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS, tokenizer
from families import tiny
from kvkeep_lab.reference import cases, compare
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks import TASKS, rows
from kvkeep_lab.tasks.match import Match
from kvkeep_lab.tasks.needle import FORMS, Needle, contains, hidden, share
from kvkeep_lab.tasks.summary import FORMS as SUMMARIES
from kvkeep_lab.tasks.summary import HUBS, Article, Summary, articles, rouge
from kvkeep_lab.tasks.texts import joined, passage, text_files
from measuring import subject

from kvkeep.errors import UsageError


@pytest.fixture
def haystack(tmp_path: Path) -> Path:
    folder = tmp_path / "haystack"
    folder.mkdir()
    for name in "ab":
        draw = random.Random(name)
        (folder / f"{name}.txt").write_text(". ".join(" ".join(draw.choices(WORDS, k=9)) for _ in range(60)))
    return tmp_path


@pytest.mark.parametrize("kind", TASKS.values(), ids=TASKS)
def test_every_task_describes_itself(kind: type) -> None:
    task = kind()
    names = [metric.name for metric in task.metrics]
    assert len(set(names)) == len(names) and {*task.relative, *task.mapped} <= set(names)
    assert task.about and task.protocol.endswith(".")
    assert all(isinstance(getattr(task, axis), list) for axis in task.axes)
    assert not task.mapped or len(task.axes) == 2


def test_texts_are_found_in_their_folder_or_in_a_folder_of_them(haystack: Path) -> None:
    assert text_files(haystack) == text_files(haystack / "haystack") == sorted((haystack / "haystack").iterdir())
    text = joined(text_files(haystack))
    drawn = [passage(tokenizer(), text, 50, random.Random(seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and [len(ids) for ids in drawn] == [50] * 3
    with pytest.raises(UsageError, match="too few words for a prompt of 5,000 tokens"):
        passage(tokenizer(), text, 5000, random.Random(0))


@pytest.mark.parametrize(("depth", "place"), [(0, 0), (26, 1), (50, 2), (72, 3), (100, 5)])
def test_the_needle_goes_between_sentences(depth: float, place: int) -> None:
    hay = ["One two three.", "Four five six!", "Seven (eight.)", "Nine ten? ", "Eleven."]
    assert hidden(" ".join(hay), "X.", depth) == " ".join([*hay[:place], "X.", *hay[place:]])


def test_needles_have_the_requested_length_and_depth(haystack: Path) -> None:
    task = Needle(length=[128], depth=[0, 100], samples=3)
    assert task.points() == [{"length": 128, "depth": 0}, {"length": 128, "depth": 100}]
    near, far = (task.prepare(tokenizer(), text_files(haystack), point, 0) for point in task.points())
    assert near == task.prepare(tokenizer(), text_files(haystack), task.points()[0], 0)
    assert near != task.prepare(tokenizer(), text_files(haystack), task.points()[0], 1)
    for one, other in zip(near, far, strict=True):
        assert len(one.ids) == len(other.ids) == 128 and one.facts == other.facts and one.ids != other.ids
        assert sorted(one.ids) == sorted(other.ids)  # the same haystack, and the same needle in it
    assert len({sample.facts["value"] for sample in near}) == 3
    short = Needle(length=[64], form="san-francisco")
    with pytest.raises(UsageError, match="no space for the question"):
        short.prepare(tokenizer(), text_files(haystack), {"length": 10, "depth": 0}, 0)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_asks_for_the_value_of_its_needle(name: str) -> None:
    form = FORMS[name].filled(random.Random(0))
    assert form.value in form.needle and f"{form.lead} {form.value}" in form.needle
    assert "{" not in form.needle + form.question + form.lead + form.value


def test_finding_ignores_case_and_spaces_and_needs_the_complete_value() -> None:
    assert contains("It is  Dolores\nPark, I think.", "dolores park") and contains("48213", "48213")
    assert not contains("148213", "48213") and not contains("Dolores", "Dolores Park")
    assert share("a sandwich in a PARK", "eat a sandwich in Dolores Park") == pytest.approx(4 / 6)


def test_a_needle_is_scored_by_likelihood_and_answer(haystack: Path) -> None:
    task = Needle(length=[128], depth=[50], samples=1, new=4)
    (sample,) = task.prepare(tokenizer(), text_files(haystack), task.points()[0], 0)
    full = task.measure(subject(), sample)
    kept, dropped = (task.measure(subject(name, "16"), sample).scores["loglik"] for name in ("kv-direct", "window"))
    assert kept == pytest.approx(full.scores["loglik"]) and dropped != pytest.approx(kept, abs=1e-3)
    assert set(full.scores) == {metric.name for metric in task.metrics}
    assert full.cost.prompt_tokens == 128 and full.cost.prefill_s > 0 and full.cost.memory["resident_bytes"] > 0
    said = subject().write(sample.ids, 4).text
    sample.facts["value"] = said
    assert task.measure(subject(), sample).scores["found"] == 1.0


def test_the_log_likelihood_equals_the_models(haystack: Path) -> None:
    import torch

    ids, more = [5, 9, 11, 40], [7, 8, 60]
    logits = tiny("llama")(torch.tensor([ids + more])).logits[0].detach().double().log_softmax(-1)
    expected = [float(logits[place, token]) for place, token in zip((3, 4, 5), more, strict=True)]
    for one in (subject(), subject("kv-direct", "16")):
        found = one.examine(ids, more, 5)
        assert found.logs == pytest.approx(expected, abs=1e-5)
        assert found.text == one.write(ids, 5).text  # not the right one, so it was written
        right = one.write(ids, 3).tokens
        assert one.examine(ids, right, 3).text == tokenizer().decode(right)


def test_match_equals_compare(haystack: Path) -> None:
    task = Match(length=[60], new=8, samples=2)
    first, second = task.prepare(tokenizer(), text_files(haystack), {"length": 60}, 0)
    assert first.ids != second.ids and len(first.ids) == 60
    one = subject("h2o", "25%")
    found = task.measure(one, first)
    row = compare(tiny("llama"), first.ids, cases(["h2o"], ["25%"]), new=8).rows[0]
    assert (found.scores["kl"], found.scores["match"], found.scores["top1"]) == (row.kl_mean, row.match, row.top1)
    assert found.scores["kl_free"] == row.kl_free_mean
    assert found.cost.entries == row.entries == 17 and found.cost.exactness == "lossy"
    other = Subject(one.loaded, "kv-direct", "25%", None, one.references)
    assert task.measure(other, first).scores["match"] == 1.0 and len(one.references) == 1  # was made once
    task.measure(other, second)
    assert len(one.references) == 2


@pytest.mark.skipif(find_spec("rouge_score") is None, reason="rouge-score is not installed")
def test_rouge_equals_scores_computed_by_hand() -> None:
    found = rouge("the cat sat on the mat", "the cats sat there")
    precision, recall = 3 / 4, 3 / 6  # the, cat(s), sat
    assert found["rouge1"] == pytest.approx(2 * precision * recall / (precision + recall))
    assert found["rouge2"] == pytest.approx(2 * (2 / 3) * (2 / 5) / (2 / 3 + 2 / 5))  # the cat, cat sat
    assert found["rougeL"] == pytest.approx(found["rouge1"])
    assert rouge("a b", "") == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}


def test_articles_are_read_in_every_form_and_drawn_by_seed(tmp_path: Path) -> None:
    path = tmp_path / "xsum.jsonl"
    given: list[dict[str, Any]] = [
        {"article": "###\nArticle: It rained.\n\nSummarize it.\n", "summary_gt": "Rain.", "n": 1},
        {"article": "It rained.", "highlights": "Rain.\nMuch.", "id": "a"},
        {"document": "It rained.", "summary": "Rain.", "id": "b"},
    ]
    for text in (json.dumps(given), "\n".join(map(json.dumps, given))):
        path.write_text(text)
        assert articles(path) == [
            Article("It rained.", given[0]["article"], "Rain."),
            Article("It rained.", "It rained.\n\nSummarize the above article in 3 sentences.", "Rain.\nMuch."),
            Article("It rained.", "It rained.\n\nSummarize the above article in 1 sentence.", "Rain."),
        ]
    given = [{"article": f"###\nArticle: the {word} of\n", "summary_gt": word} for word in WORDS[:6]]
    path.write_text("\n".join(map(json.dumps, given)))
    task = Summary(file="xsum.jsonl", samples=3)
    assert task.sources(tmp_path) == task.sources(path) == [path]
    first = task.prepare(tokenizer(), [path], {}, 0)
    assert [sample.facts["summary"] for sample in first] == WORDS[:3]
    assert "###" not in tokenizer().decode(first[0].ids)
    drawn = task.prepare(tokenizer(), [path], {}, 5)
    assert drawn == task.prepare(tokenizer(), [path], {}, 5) != first
    (long,) = Summary(samples=1, least=len(first[0].ids)).prepare(tokenizer(), [path], {}, 0)
    assert len(long.ids) >= len(first[0].ids)
    for sizes, sentence in (({"samples": 7}, "6 articles of 0 "), ({"samples": 1, "least": 900}, "0 articles of 900 ")):
        with pytest.raises(UsageError, match=f"has {sentence}tokens"):
            Summary.model_validate(sizes).prepare(tokenizer(), [path], {}, 0)
    path.write_text('{"article": "a", "summary_gt": "b"}\n{"text": "c"}')
    with pytest.raises(UsageError, match="Row 2 of .* is not an article with a summary; such have 'article' and"):
        articles(path)
    for wrong in (
        {"article": None, "summary_gt": "b"},
        {"article": " ", "summary_gt": "b"},
        {"article": "a", "summary_gt": ["b"]},
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(UsageError, match="Row 1 of .* is not an article with a summary"):
            Summary(file=path.name).sources(tmp_path)


@pytest.mark.skipif(find_spec("rouge_score") is None, reason="rouge-score is not installed")
def test_the_row_of_the_full_cache_has_floors(tmp_path: Path) -> None:
    words = [WORDS[:9], WORDS[9:18]]
    given = [{"document": " ".join(some), "summary": " ".join(some[:4])} for some in words]
    (tmp_path / "xsum.jsonl").write_text("\n".join(map(json.dumps, given)))
    task = Summary(file="xsum.jsonl", samples=2, new=4)
    full = subject("full", None)
    samples = task.prepare(full.tokenizer, task.sources(tmp_path), {}, 0)
    found = [task.measure(full, sample).scores for sample in samples]
    assert [one["lead"] for one in found] == [1.0, 1.0]  # the first four words are the summary
    blind = full.write(samples[0].facts["blind"], 4).text
    assert [one["blind"] for one in found] == [rouge(one["summary"], blind)["rouge1"] for one in given]
    assert set(task.measure(subject("snapkv", "90%"), samples[0]).scores) == {"rouge1", "rouge2", "rougeL"}


@pytest.mark.parametrize("file", HUBS)
def test_without_data_articles_come_from_the_hub(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = SUMMARIES[1] if "cnn" in file else SUMMARIES[2]
    requests = []

    class Datasets:
        @staticmethod
        def load_dataset(repository: str, part: str | None, *, split: str, streaming: bool) -> Any:
            requests.append((repository, part, split))
            return ({form.article: " ".join(WORDS[:number]), form.summary: "so"} for number in range(1, 600))

    monkeypatch.setattr(rows, "find_spec", lambda name: object())
    monkeypatch.setattr(rows, "import_module", lambda name: Datasets)
    task = Summary(file=file, samples=3)
    sources = task.sources(None)
    assert len(articles(sources[0])) == 500 and requests == [(HUBS[file].repository, HUBS[file].part, "test")]
    found = task.prepare(tokenizer(), sources, {}, 0)
    assert [len(sample.ids) for sample in found] == sorted({len(sample.ids) for sample in found})
    assert {sample.facts["summary"] for sample in found} == {"so"}
