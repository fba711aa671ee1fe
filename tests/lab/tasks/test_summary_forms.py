"""Summaries: HELM's rows, and CNN/DM's and XSum's as the hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS, tokenizer
from kvkeep_lab.tasks import rows
from kvkeep_lab.tasks.summary import FORMS, HUBS, Summary, articles

from kvkeep.errors import UsageError

ROWS: list[dict[str, Any]] = [
    {"article": "###\nArticle: It rained.\n\nSummarize it.\n", "summary_gt": "Rain.", "n": 1},
    {"article": "It rained.", "highlights": "Rain.\nMuch.", "id": "a"},
    {"document": "It rained.", "summary": "Rain.", "id": "b"},
]


def test_articles_of_every_form(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    assert articles(tmp_path / "a.jsonl") == [
        (ROWS[0]["article"], "Rain."),
        ("It rained.\n\nSummarize the above article in 3 sentences.", "Rain.\nMuch."),
        ("It rained.\n\nSummarize the above article in 1 sentence.", "Rain."),
    ]
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    assert articles(tmp_path / "a.json") == articles(tmp_path / "a.jsonl")


@pytest.mark.parametrize("file", HUBS)
def test_without_data_the_hub_is_asked(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS[1] if "cnn" in file else FORMS[2]
    asked = []

    class Datasets:
        @staticmethod
        def load_dataset(repository: str, part: str | None, *, split: str, streaming: bool) -> Any:
            asked.append((repository, part, split))
            return ({form.article: " ".join(WORDS[:number]), form.summary: "so"} for number in range(1, 600))

    monkeypatch.setattr(rows, "find_spec", lambda name: object())
    monkeypatch.setattr(rows, "import_module", lambda name: Datasets)
    task = Summary(file=file, samples=3)
    sources = task.sources(None)
    assert len(articles(sources[0])) == 500 and asked == [(HUBS[file].repository, HUBS[file].part, "test")]
    found = task.prepare(tokenizer(), sources, {}, 0)
    assert [len(sample.ids) for sample in found] == sorted({len(sample.ids) for sample in found})
    assert {sample.facts["summary"] for sample in found} == {"so"}


def test_files_that_no_hub_has_need_data() -> None:
    with pytest.raises(UsageError, match="This task reads xsum_0shot_first200.jsonl: give the folder"):
        Summary().sources(None)
