"""The store against everything that may befall it: torn lines, kills, and several who write at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from kvkeep_lab.experiment import Cell
from kvkeep_lab.store import Row, Store

from kvkeep.errors import StoreError

FORK = multiprocessing.get_context("fork")


def row(key: str, **changes: object) -> Row:
    common = {"setting": "s", "experiment": "e", "model": "m", "method": "h2o", "budget": "25%", "seed": 0, "point": {}}
    return Row.model_validate({"cell": key, "status": "done", **common, **changes})


def cell(key: str) -> Cell:
    return Cell(key, "s", "m", "h2o", "25%", {}, 0)


def read(path: Path) -> Store:
    store = Store(path)
    store.refresh()
    return store


def test_what_was_appended_is_read_and_only_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "results.jsonl")
    store.refresh()  # there is none yet
    assert store.rows == [] and not store.unfinished
    store.append(row("a", scores={"kl": [0.5, 1e-12]}))
    store.define("s", {"name": "e"})
    store.refresh()
    store.define("s", {"name": "e"})  # said already
    store.append(row("b", status="failed", error="no"))
    store.refresh()
    store.refresh()
    assert [one.cell for one in store.rows] == ["a", "b"] and store.done() == {"a"}
    assert store.rows[0].scores == {"kl": [0.5, 1e-12]} and len(store.definitions) == 1
    assert [json.loads(line)["kind"] for line in store.path.read_text().splitlines()] == ["cell", "experiment", "cell"]


@pytest.mark.parametrize("cut", [1, 40, 10_000])
def test_a_torn_last_line_is_skipped_told_and_closed(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "results.jsonl"
    store = Store(path)
    store.append(row("a"))
    whole = path.stat().st_size
    store.append(row("b"))
    size = path.stat().st_size
    os.truncate(path, max(whole + 1, size - cut))  # a kill in the middle of the write
    torn = read(path)
    assert torn.done() == {"a"} and torn.unfinished and torn.torn == 0
    torn.append(row("c"))
    torn.refresh()
    assert torn.done() == ({"a", "c"} if cut > 1 else {"a", "b", "c"}) and not torn.unfinished
    assert torn.torn == (cut > 1) == read(path).torn


def test_lines_of_something_else_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind": "weather"}\nnot json\n\n')
    Store(path).append(row("a"))
    found = read(path)
    assert found.torn == 2 and found.done() == {"a"}


def test_many_processes_append_at_once(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"

    def write(name: str) -> None:
        for number in range(40):
            Store(path).append(row(f"{name}{number}", error="x" * 5000))

    writers = [FORK.Process(target=write, args=(name,)) for name in "pqr"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = read(path)
    assert len(found.rows) == 120 and len(found.done()) == 120 and found.torn == 0


def test_a_cell_is_claimed_once_and_a_killed_process_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    here, there = FORK.Pipe()

    def hold() -> None:
        with Store(path).claim(cell("a")) as ours:
            there.send(ours)
            time.sleep(60)

    holder = FORK.Process(target=hold)
    holder.start()
    assert here.recv() is True
    with Store(path).claim(cell("a")) as ours:
        assert not ours
    with Store(path).claim(cell("b")) as ours:
        assert ours
    holder.kill()
    holder.join()
    with Store(path).claim(cell("a")) as ours:
        assert ours
    assert list(tmp_path.glob("*.lock")) == []


def test_a_store_that_cannot_be_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        Store(tmp_path / "file" / "results.jsonl").append(row("a"))
    with pytest.raises(StoreError, match="cannot be read: is a directory"):
        Store(tmp_path).refresh()
