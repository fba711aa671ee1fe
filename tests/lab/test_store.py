"""The store of results: torn lines, kills, and simultaneous writers."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked import exit_codes
from kvkeep_lab.cell import Cell
from kvkeep_lab.store import ResultFile, TaskRecord, append_line
from results import stored

from kvkeep.errors import StoreError

FORK = multiprocessing.get_context("fork")


def row(key: str, **changes: object) -> TaskRecord:
    common = {"setting": "s", "experiment": "e", "model": "m", "method": "h2o", "budget": "25%", "seed": 0, "point": {}}
    return TaskRecord.model_validate({"cell": key, "status": "done", **common, **changes})


def cell(key: str) -> Cell:
    return Cell(key, "s", "m", 0, "h2o", "25%")


def test_appended_records_are_read_once(tmp_path: Path) -> None:
    store = ResultFile(tmp_path / "new" / "results.jsonl")
    store.refresh()  # there is none yet
    assert store.records == [] and not store.unfinished
    store.append(row("a", scores={"kl": [0.5, 1e-12]}))
    store.define("s", {"name": "e"})
    store.refresh()
    store.define("s", {"name": "e"})  # said already
    store.append(row("b", status="failed", error="no"))
    store.refresh()
    store.refresh()
    assert [one.cell for one in store.records] == ["a", "b"] and store.done() == {"a"}
    assert store.records[0].scores == {"kl": [0.5, 1e-12]} and len(store.definitions) == 1
    assert [json.loads(line)["kind"] for line in store.path.read_text().splitlines()] == ["cell", "experiment", "cell"]


@pytest.mark.parametrize("cut", [1, 40, 10_000])
def test_a_torn_last_line_is_skipped_and_counted(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "results.jsonl"
    store = ResultFile(path)
    store.append(row("a"))
    first_size = path.stat().st_size
    store.append(row("b"))
    size = path.stat().st_size
    os.truncate(path, max(first_size + 1, size - cut))  # a kill in the middle of the write
    torn = stored(path)
    assert torn.done() == {"a"} and torn.unfinished and torn.torn == 0
    torn.append(row("c"))
    torn.refresh()
    assert torn.done() == ({"a", "c"} if cut > 1 else {"a", "b", "c"}) and not torn.unfinished
    assert torn.torn == (cut > 1) == stored(path).torn


def test_unreadable_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind": "weather"}\nnot json\n\n')
    ResultFile(path).append(row("a"))
    written = row("b").model_dump()
    for odd in (
        {"scores": {"found": [math.nan]}},
        {"memory": {"resident_bytes": None}},
        {"memory": {"checkpoint_bytes": [1]}},
    ):
        append_line(path, json.dumps(written | odd))
    found = stored(path)
    assert found.torn == 5 and found.done() == {"a"}


def test_many_processes_append_at_once(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"

    def write(name: str) -> None:
        for number in range(40):
            ResultFile(path).append(row(f"{name}{number}", error="x" * 5000))

    assert exit_codes(*(partial(write, name) for name in "pqr")) == [0, 0, 0]
    found = stored(path)
    assert len(found.records) == 120 and len(found.done()) == 120 and found.torn == 0


def begin(path: Path, key: str, there: Any) -> None:
    store = ResultFile(path)
    there.send(store.claim(cell(key)))
    time.sleep(60)


def test_a_cell_is_claimed_once_and_a_killed_process_is_counted(tmp_path: Path) -> None:
    path, (here, there) = tmp_path / "results.jsonl", FORK.Pipe()
    ours = ResultFile(path)
    for deaths in range(1, 3):
        holder = FORK.Process(target=begin, args=(path, "a", there), daemon=True)
        holder.start()
        assert here.recv() == deaths
        assert ours.claim(cell("a")) == 0  # somebody is at it
        ours.forget([cell("a")])
        holder.kill()
        holder.join()
    assert ours.claim(cell("a")) == 3 and ours.claim(cell("b"), 1) == 1 and ResultFile(path).claim(cell("b")) == 0
    assert ours.claim(cell("c"), 1) == 1 and ResultFile(path).claim(cell("b")) == 2  # worker 1 has died of b
    ours.release(0)
    ours.release(1)
    ours.release(1)
    ours.forget([cell("b")])
    assert [ResultFile(path).claim(cell(key)) for key in "abc"] == [1, 1, 1]


def test_a_lock_without_a_begun_cell_is_removed(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl.a.lock").touch()  # its process was killed between the two
    ResultFile(tmp_path / "results.jsonl").forget([cell("a"), cell("b")])
    assert list(tmp_path.iterdir()) == []


def test_a_cell_recorded_since_the_start_cannot_be_claimed(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    ResultFile(path).append(row("a"))
    store = ResultFile(path, path.stat().st_size)
    ResultFile(path).append(row("b", status="failed", error="no"))
    assert store.claim(cell("a")) == 1
    store.release()
    assert store.claim(cell("b")) == 0
    assert [path.name for path in tmp_path.iterdir() if path.suffix in (".begun", ".lock")] == ["results.jsonl.lock"]


def test_an_unusable_store_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        ResultFile(tmp_path / "file" / "results.jsonl").append(row("a"))
    with pytest.raises(StoreError, match="cannot be written"):
        ResultFile(tmp_path / "file" / "results.jsonl").claim(cell("a"))
    with pytest.raises(StoreError, match="cannot be read: is a directory"):
        ResultFile(tmp_path).refresh()
