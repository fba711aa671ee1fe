"""Rows of data sets: forms of JSON, and the hub only if there are no data."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from kvkeep_lab.tasks import rows as module
from kvkeep_lab.tasks.rows import Hub, rows, source

from kvkeep.errors import KvkeepError, UsageError

ROWS: list[dict[str, Any]] = [{"text": "one\u2028line"}, {"text": "two"}, {"text": "three"}]


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(map(json.dumps, ROWS)),
        "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n",  # only \n ends a line
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
    ],
    ids=["lines", "separators", "list", "indented"],
)
def test_rows_are_read_from_json_and_json_lines(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert rows(tmp_path / "a.json", "text") == ROWS
    (tmp_path / "a.json").write_text(json.dumps({"data": ROWS}, indent=1))
    assert rows(tmp_path / "a.json") == [{"data": ROWS}]  # one object is one row


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"text": "a"}\n{"text": ', "Line 2 of .* is not a JSON object"),
        ('{"text": "a"}\n[1]', "Line 2 of .* is not a JSON object"),
        ('[{"text": "a"}, {"texts": "b"}]', "Entry 2 of .* has no field 'text'; wanted are text"),
        ("", "is empty"),
    ],
)
def test_an_invalid_row_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UsageError, match=sentence):
        rows(tmp_path / "a.jsonl", "text")


def test_a_source_is_a_file_or_in_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(UsageError, match="There is no file .*a.jsonl'; give the folder that holds a.jsonl"):
        source(tmp_path, "a.jsonl", Hub("some/set"))
    path.write_text("{}")
    assert source(tmp_path, "a.jsonl") == source(path, "b.jsonl") == path
    with pytest.raises(UsageError, match="This task reads a.jsonl: give the folder"):
        source(None, "a.jsonl")


def test_the_hub_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    load_dataset = Mock(side_effect=lambda *given, **options: iter(ROWS))
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "import_module", lambda name: SimpleNamespace(load_dataset=load_dataset))
    hub = Hub("some/set", "1.0", "validation", rows=2)
    path = source(None, "a.jsonl", hub)
    assert path.name == "some-set-1.0-validation-first2.jsonl" and rows(path) == ROWS[:2]
    assert source(None, "a.jsonl", hub) == path
    assert load_dataset.mock_calls == [call("some/set", "1.0", split="validation", streaming=True)]
    assert rows(source(None, "a.jsonl", Hub("some/set"))) == ROWS and load_dataset.call_count == 2


def test_an_unreachable_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="give the folder .* or install the package 'datasets'"):
        source(None, "a.jsonl", Hub("some/set"))
    unreachable = SimpleNamespace(load_dataset=Mock(side_effect=ConnectionError("No route\nto host")))
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "import_module", lambda name: unreachable)
    for _ in range(2):  # nothing is left of the first try
        with pytest.raises(KvkeepError, match=r"'some/set' could not be fetched from the hub \(No route\)"):
            source(None, "a.jsonl", Hub("some/set"))
