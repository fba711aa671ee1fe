"""Worker processes: every cell is measured once, whichever process dies."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import standins
from hypothesis import given, settings
from hypothesis import strategies as st
from kvkeep_lab.store import ResultFile, StudyRecord
from kvkeep_lab.workers import devices, packed, work_in_processes
from living import in_group, until
from results import stored
from standins import Measures, StandIn, job

from kvkeep.errors import KvkeepError, ModelError, UsageError


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that import nothing anew; the drivers below, and ``test_runner.py``, start interpreters."""
    monkeypatch.setattr("kvkeep_lab.workers._SPAWN", multiprocessing.get_context("fork"))


def of_groups(*sizes: int) -> list[StandIn]:
    return [StandIn(f"{group}.{number}", group) for group, size in enumerate(sizes) for number in range(size)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), max_size=6), st.integers(1, 4))
def test_each_worker_takes_every_cell_once_and_groups_stay_contiguous(sizes: list[int], workers: int) -> None:
    cells = of_groups(*sizes)
    one: Any = job(Path(), cells, workers)
    orders = [list(one.order(number)) for number in range(workers)]
    for order in orders:
        assert sorted(cell.key for cell in order) == sorted(cell.key for cell in cells)
        groups = list(dict.fromkeys(cell.seed for cell in order))
        assert order == [cell for group in groups for cell in cells if cell.seed == group]
    assert orders[0] == cells
    if len(sizes) >= workers:
        assert len({order[0].seed for order in orders}) == workers


def work(folder: Path, cells: list[StandIn], **changes: Any) -> tuple[dict[str, StudyRecord], list[Any]]:
    """Return the records by cell, and the processes that were there when somebody looked."""
    store, seen = ResultFile(folder / "r.jsonl"), list[Any]()
    work_in_processes(job(folder, cells, **changes), store, lambda: seen.append(multiprocessing.active_children()))
    assert multiprocessing.active_children() == []
    return records(folder), seen


def records(folder: Path) -> dict[str, StudyRecord]:
    store = stored(folder / "r.jsonl")
    found = {record.cell: record for record in store.records if isinstance(record, StudyRecord)}
    assert len(found) == len(store.records) and store.torn == 0  # each cell once
    assert [path.name for path in folder.glob("r.jsonl.*") if path.name != "r.jsonl.lock"] == []
    return found


@pytest.mark.usefixtures("forked")
def test_killed_processes_lose_no_cell_and_leave_nothing_behind(tmp_path: Path) -> None:
    cells = [*of_groups(2, 2), StandIn("kills once", 1), StandIn("kills always", 2)]
    found, seen = work(tmp_path, cells)
    assert set(found) == {cell.key for cell in cells} and max(map(len, seen), default=0) <= 2
    lost = found.pop("kills always")
    assert (lost.status, lost.error) == ("failed", "lost")
    assert all(record.status == "done" and record.machine["workers"] == 2 for record in found.values())
    processes = {record.machine["process"] for record in found.values()}
    assert len(processes) >= 2 and os.getpid() not in processes


@pytest.mark.usefixtures("forked")
def test_two_workers_measure_at_the_same_time(tmp_path: Path) -> None:
    found, _ = work(tmp_path, [StandIn("meets one"), StandIn("meets two", 1)])
    processes = {record.machine["process"] for record in found.values()}
    assert len(found) == len(processes) == 2


@pytest.mark.usefixtures("forked")
def test_an_error_of_a_worker_is_raised_in_the_driver(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^There is no such model\.$"):
        work(tmp_path, [StandIn("quick"), StandIn("raises"), StandIn("hangs", 1)])
    assert multiprocessing.active_children() == [] and set(records(tmp_path)) == {"quick"}
    with pytest.raises(KvkeepError, match=r"^A worker failed \(ZeroDivisionError: by zero\)\.$"):
        work(tmp_path, [StandIn("breaks")])


def test_a_job_that_cannot_be_pickled_or_imported_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Measures):
        pass

    with pytest.raises(UsageError, match=r"cannot import what is to be measured.*put a task of your own into a module"):
        packed(pickle.dumps, job(tmp_path, [], make=partial(Local, tmp_path)))
    notebook: Any = ModuleType("notebook_of_somebody")
    notebook.Makes = type("Makes", (Measures,), {"__module__": "notebook_of_somebody"})
    monkeypatch.setitem(sys.modules, "notebook_of_somebody", notebook)
    with pytest.raises(UsageError, match=r"No module named 'notebook_of_somebody'.*or measure with one worker\.$"):
        work(tmp_path, [StandIn("quick")], make=partial(notebook.Makes, tmp_path))


def test_a_script_without_a_main_guard_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.append({str(Path(__file__).parent)!r})\nimport standins\n")
    script.write_text(script.read_text() + f"standins.main({str(tmp_path / 'out')!r}, workers=1)\n")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines()[-1].startswith("kvkeep.errors.KvkeepError: A worker could not be started.")


def test_gpus_are_taken_in_turn_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert devices(None, 3) == devices("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices("cuda:1", 2) == ["cuda:1"] * 2 and devices("cpu", 2) == ["cpu"] * 2


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("end", ["Ctrl-C", "a kill of the driver alone"])
def test_workers_end_with_their_driver_and_the_next_run_goes_on(tmp_path: Path, end: str) -> None:
    driver = subprocess.Popen(
        [sys.executable, standins.__file__, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job would ignore it
    )
    try:
        until(lambda: (tmp_path / "hangs").exists() and (tmp_path / "hangs too").exists())
        if end == "Ctrl-C":
            os.killpg(driver.pid, signal.SIGINT)
        else:
            driver.kill()
        _, err = driver.communicate(timeout=60)
        until(lambda: not in_group(driver.pid))
    finally:
        if in_group(driver.pid):
            os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == -(signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
    assert err.count("Traceback") == (end == "Ctrl-C")  # the driver's own, which the command line turns into a sentence
    cell: Any = StandIn("hangs")
    assert ResultFile(tmp_path / "r.jsonl").claim(cell) == (1 if end == "Ctrl-C" else 2)  # free, and a kill was counted
