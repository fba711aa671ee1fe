"""Workers: every cell once, whoever dies."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import standins
from hypothesis import given, settings
from hypothesis import strategies as st
from kvkeep_lab.workers import Died, Queue, local_workers, measured, packed, unpacked
from living import in_group, until
from standins import Desk, StandIn, yes

from kvkeep.errors import KvkeepError, ModelError, UsageError


def of_groups(*sizes: int) -> list[StandIn]:
    return [StandIn(f"{group}.{number}", group) for group, size in enumerate(sizes) for number in range(size)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), max_size=5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_cell_is_taken_once_and_groups_stay_together(sizes: list[int], count: int, draw: Any) -> None:
    cells, workers = of_groups(*sizes), [object() for _ in range(count)]
    queue: Any = Queue(cells)
    taken: list[StandIn] = []
    latest: dict[Any, int] = {}
    while queue:
        worker = draw.choice(workers)
        whole = set(range(len(sizes))) - {cell.seed for cell in taken}
        cell = queue.take(worker)  # never None: while anything waits, nobody has to
        assert not whole or cell.seed in (latest.get(worker), min(whole))  # no group is cut while one is whole
        latest[worker] = cell.seed
        taken.append(cell)
    assert all(queue.take(worker) is None for worker in workers)
    assert sorted(cell.key for cell in taken) == sorted(cell.key for cell in cells)
    assert taken == cells or count > 1


def test_who_has_nothing_takes_half_of_the_longest_rest() -> None:
    queue: Any = Queue(of_groups(7))
    assert queue.take("a").key == "0.0"
    assert queue.take("b").key == "0.4"  # three of six stay with a
    assert [queue.take(who).key for who in "aabb"] == ["0.1", "0.2", "0.5", "0.6"]
    queue.put_back(StandIn("again"))
    assert [queue.take("c").key, queue.take("c").key, queue.take("c")] == ["again", "0.3", None]


class Fragile:
    """A worker in this process that dies and raises as it is told."""

    def __init__(self, deaths: Counter[str], starts: int = 100) -> None:
        self.deaths, self.starts, self.given = deaths, starts, Counter[str]()

    def start(self) -> Future[Any]:
        self.starts -= 1
        return self._future(Died("no room") if self.starts < 0 else None)

    def measure(self, cell: StandIn) -> Future[Any]:
        self.given[cell.key] += 1
        self.deaths[cell.key] -= 1
        return self._future(Died() if self.deaths[cell.key] >= 0 else f"row of {cell.key}")

    def result(self, future: Future[Any]) -> Any:
        return future.result()

    def _future(self, result: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
        return future


class Claims:
    """Who holds what, and how many at most."""

    def __init__(self, others: tuple[str, ...] = ()) -> None:
        self.others, self.held, self.most = others, Counter[str](), 0

    @contextmanager
    def __call__(self, cell: StandIn) -> Any:
        self.held[cell.key] += 1
        self.most = max(self.most, self.held.total())
        try:
            yield cell.key not in self.others
        finally:
            self.held[cell.key] -= 1


def found(workers: Any, cells: Any, claim: Any = yes) -> dict[str, Any]:
    listed = [(cell.key, row) for cell, row in measured(workers, cells, claim, lambda cell: f"{cell.key} is lost")]
    assert len(dict(listed)) == len(listed)
    return dict(listed)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_cell_that_workers_die_of_is_given_out_again_and_counts_as_failed_after_three(count: int) -> None:
    deaths, claims = Counter({"0.1": 1, "0.2": 3, "1.0": 2}), Claims(others=("1.1",))
    workers = [Fragile(deaths) for _ in range(count)]
    rows = found(workers, of_groups(4, 2), claims)
    assert rows == {
        "0.0": "row of 0.0", "0.1": "row of 0.1", "0.2": "0.2 is lost", "0.3": "row of 0.3", "1.0": "row of 1.0",
        "1.1": None,
    }  # fmt: skip
    times = sum((worker.given for worker in workers), Counter())
    assert times == {"0.0": 1, "0.1": 2, "0.2": 3, "0.3": 1, "1.0": 3}
    assert claims.held.total() == 0 and claims.most <= count


def test_a_claim_is_held_until_the_row_has_been_dealt_with() -> None:
    claims = Claims()
    for cell, _ in measured([Fragile(Counter())], of_groups(3), claims, dict):
        assert claims.held[cell.key] == 1
    results = measured([Fragile(Counter()), Fragile(Counter())], of_groups(3), claims, dict)
    next(results)
    results.close()
    assert claims.held.total() == 0


def test_who_cannot_start_is_done_without_and_nobody_at_all_is_an_error() -> None:
    assert len(found([Fragile(Counter(), starts=0), Fragile(Counter())], of_groups(4))) == 4
    with pytest.raises(KvkeepError, match=r"No worker could be started: no room\. Workers import the script"):
        found([Fragile(Counter(), starts=0) for _ in range(2)], of_groups(4))
    with pytest.raises(KvkeepError, match=r"No worker could be started"):
        found([Fragile(Counter({"0.1": 1}), starts=1)], of_groups(4))
    assert found([], []) == {}


def test_processes_that_are_killed_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    cells = [*of_groups(2, 2), StandIn("kills once", 1), StandIn("kills always", 2)]
    with local_workers(partial(Desk, tmp_path), None, 2) as workers:
        rows = found(workers, cells)
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []
    assert rows.pop("kills always") == "kills always is lost"
    assert sorted(rows) == ["0.0", "0.1", "1.0", "1.1", "kills once"] and all(
        row["cell"] == key and row["workers"] == 2 and row["process"] != os.getpid() for key, row in rows.items()
    )
    assert len({row["process"] for row in rows.values()}) >= 2


def test_gpus_are_taken_in_turn_unless_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for device, taken in ((None, ["cuda:0", "cuda:1", "cuda:0"]), ("cuda:1", ["cuda:1"] * 3), ("cpu", ["cpu"] * 3)):
        with local_workers(partial(Desk, tmp_path), device, 3) as workers:
            assert [unpacked(worker._order)().device for worker in workers] == taken


def test_what_is_raised_over_there_is_raised_here(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelError, match=r"^There is no such model\.$"),
        local_workers(partial(Desk, tmp_path), None, 2) as workers,
    ):
        found(workers, [StandIn("quick"), StandIn("raises"), StandIn("hangs")])
    assert multiprocessing.active_children() == []


def test_what_cannot_be_sent_or_is_not_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Desk):
        pass

    with pytest.raises(UsageError, match=r"cannot have what is to be measured.*put a task of your own into a module"):
        packed(pickle.dumps, partial(Local, tmp_path))
    notebook: Any = ModuleType("notebook_of_somebody")
    notebook.Makes = type("Makes", (standins.Makes,), {"__module__": "notebook_of_somebody"})
    monkeypatch.setitem(sys.modules, "notebook_of_somebody", notebook)
    with (
        pytest.raises(UsageError, match=r"No module named 'notebook_of_somebody'.*or measure with one worker\.$"),
        local_workers(notebook.Makes(tmp_path), None, 2) as workers,
    ):
        found(workers, [StandIn("quick")])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("end", ["Ctrl-C", "a kill of the driver alone"])
def test_workers_end_with_their_driver(tmp_path: Path, end: str) -> None:
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
        out, err = driver.communicate(timeout=60)
        until(lambda: not in_group(driver.pid))
    finally:
        if in_group(driver.pid):
            os.killpg(driver.pid, signal.SIGKILL)
    assert out == "quick\n"
    assert driver.returncode == -(signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
    assert err.count("Traceback") == (end == "Ctrl-C")  # the driver's own, which the command line turns into a sentence
