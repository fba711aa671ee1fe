"""The file of a server's day, and what is reported of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvkeep_lab.agent_day.records import Answered, DayRecords, Repeated, Started

from kvkeep.errors import StoreError

MESSAGE = {"role": "assistant", "content": "é\u2028"}


def answered(number: int, read: int, reusable: int = 1000, prompt: int = 2000, **fields: object) -> Answered:
    given = {"prompt": prompt, "cached": prompt - read, "reusable": reusable, "first_s": 0.25, "seconds": 2.0}
    return Answered(number, "first", "text", MESSAGE, **(given | fields))  # type: ignore[arg-type]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    records = DayRecords(tmp_path / "new" / "a.jsonl")
    records.begin({"start": 20})
    records.started(Started(0, False, 1.5))
    records.answered(answered(0, 500))
    with records.path.open("a") as file:
        file.write('{"answer": {"num')  # a kill
    again = DayRecords(records.path)
    assert (again.about, again.starts, again.answers) == (records.about, records.starts, records.answers)
    again.answered(answered(1, 500))
    assert DayRecords(records.path).answers == again.answers


def test_the_report_counts_reusable_tokens_that_were_read_again(tmp_path: Path) -> None:
    records = DayRecords(tmp_path / "a.jsonl")
    records.begin({})
    records.started(Started(0, False, 9.0))
    for number, (read, reusable) in enumerate([(2000, 0), (1000, 1000), (1500, 1000), (900, 1000)]):
        records.answered(answered(number, read, reusable))
    records.started(Started(4, True, 3.0))
    records.answered(answered(4, 1200, first_s=12.75))
    records.answered(answered(5, 0, error="500: no", first_s=None))
    records.repeated(Repeated(False, 9, 8, 0.5))
    records.repeated(Repeated(True, 9, 8, 0.75))
    found = DayRecords(records.path).summary("a", 9)
    assert (found.reusable, found.again, found.reused) == (4000, 700, 1 - 700 / 4000)
    assert (found.requests, found.planned, found.failures, found.interrupted) == (6, 9, 1, [])
    assert (found.repeated_s, found.repeated_restarted_s) == (0.5, 0.75)
    assert found.first_after_kill_s == 12.75 and found.start_s == 3.0 and found.seconds == 15.0
    again = [(one.after, one.requests, one.reusable, one.again) for one in found.kinds]
    assert again == [("nothing", 1, 0, 0), ("a text", 4, 4000, 500), ("the kill", 1, 1000, 200)]
    records.started(Started(6, False, 1.0))
    assert records.summary("a", 9).interrupted == [6]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be written"):
        DayRecords(tmp_path / "file" / "a.jsonl").begin({})
