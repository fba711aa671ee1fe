"""Workers on Ray, in a cluster of this machine that the test starts and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forked
import pytest
from kvkeep_cluster.ray_cluster import connected
from kvkeep_lab.ray_workers import _contents, cores
from kvkeep_lab.runner import run
from kvkeep_lab.store import ResultFile
from kvkeep_lab.subject import Subject
from kvkeep_lab.tasks import TASKS
from kvkeep_lab.tasks.base import Sample, TaskOutcome
from kvkeep_lab.tasks.match import Match
from living import descendants, living, until
from results import small, stored

from kvkeep.errors import KvkeepError, ModelError, UsageError
from kvkeep.files import owner


class Killed(Match):
    """Passages of which the first that h2o is given ends the process."""

    name = "killed"
    mark: str

    def measure(self, subject: Subject, sample: Sample) -> TaskOutcome:
        if subject.method == "h2o" and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().measure(subject, sample)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_killed_ray_worker_loses_no_cell(
    tmp_path: Path, model_folder: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a forked process: what was the driver of a cluster cannot fork the driver of another."""
    pytest.importorskip("ray")
    assert forked.exit_codes(lambda: killed_worker(tmp_path, model_folder, words, monkeypatch)) == [0]


def killed_worker(tmp_path: Path, model_folder: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    paths = [*map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setitem(TASKS, "killed", Killed)
    (tmp_path / "text.txt").write_text(". ".join([words] * 3))
    task = {"name": "killed", "length": [76], "new": 4, "samples": 1, "mark": str(tmp_path / "killed")}
    sizes = {"methods": ["h2o", "kv-direct", "static"], "budgets": ["25%"], "seeds": [0, 1]}
    experiment = small(model_folder, task=task, **sizes)
    steps: list[tuple[int, int]] = []
    before, processes = descendants(os.getpid()), set[int]()

    def progress(label: str, done: int, total: int) -> None:
        steps.append((done, total))
        processes.update(descendants(os.getpid()) - before)

    killed = Path(tempfile.mkdtemp(prefix="kvkeep-", dir="/tmp" if Path("/tmp").is_dir() else None))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (killed / "owner").write_text(f"{owner().rpartition('-')[0]}-{gone.pid}")  # as a killed command leaves it
    with connected(None, 2):  # a second cluster would take 15 s; within it a run's own call changes nothing
        with pytest.raises(ModelError, match="no model at './nowhere'"):  # as a worker raises it
            run(
                experiment.with_(models=["./nowhere"]),
                ResultFile(tmp_path / "no.jsonl"),
                tmp_path,
                workers=1,
                ray="local",
            )
        assert [left.name for left in tmp_path.glob("no.jsonl.*")] == ["no.jsonl.lock"]
        store = ResultFile(tmp_path / "ray.jsonl")
        tally = run(experiment, store, tmp_path, workers=2, ray="local", progress=progress)
        assert ray.is_initialized()
    assert (tally.done, tally.found, tally.elsewhere, len(tally.failed)) == (6, 0, 0, 2)
    assert (tmp_path / "killed").exists() and steps[-1] == (8, 8)
    assert list((Path(os.environ["KVKEEP_CACHE"]) / "lab-data").glob("[!.]*")) == []  # data are there for a while
    assert not ray.is_initialized() and len(processes) > 3 and not killed.exists()
    until(lambda: not processes & living())

    here = run(experiment, ResultFile(tmp_path / "here.jsonl"), tmp_path)
    assert (here.done, len(here.failed)) == (6, 2)
    assert scores(tmp_path / "ray.jsonl") == scores(tmp_path / "here.jsonl")


def scores(path: Path) -> dict[str, Any]:
    records = stored(path).records
    found = {row.cell: (row.status, row.error, row.scores) for row in records}
    assert len(found) == len(records) == 8
    return found


def test_a_missing_ray_package_is_reported(tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    (tmp_path / "text.txt").write_text(words)
    with pytest.raises(UsageError, match=r"needs the package 'ray'.*pip install ./connectors/cluster"):
        run(small(tmp_path), ResultFile(tmp_path / "r.jsonl"), tmp_path, ray="auto")


def test_an_unreachable_cluster_is_reported(tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    mismatch = RuntimeError("Version mismatch: the cluster was started with another one.\nMore.")
    monkeypatch.setattr(ray, "init", Mock(side_effect=mismatch))
    (tmp_path / "text.txt").write_text(words)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = f"127.0.0.1:{listening.getsockname()[1]}"
        for address, what in (
            ("local", "No Ray cluster can be started here: RuntimeError: Version mismatch: .* one."),
            (there, f"There is no Ray cluster at '{there}': RuntimeError: Version mismatch: .* one."),
            ("127.0.0.1:1", "There is no Ray cluster at '127.0.0.1:1': connection refused."),
        ):
            with pytest.raises(KvkeepError, match=f"^{what}$"):
                run(small(tmp_path), ResultFile(tmp_path / "r.jsonl"), tmp_path, ray=address)


def test_data_files_keep_their_relative_paths(tmp_path: Path) -> None:
    for name in ("data/a.txt", "data/inner/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    files = _contents([tmp_path / "data/inner/a.txt", tmp_path / "data/a.txt"])
    assert files == {"inner/a.txt": b"data/inner/a.txt", "a.txt": b"data/a.txt"} and _contents([]) == {}


def test_cores_are_shared_among_workers_by_machine() -> None:
    assert cores([8], 1) == 8 and cores([8], 3) == 2 and cores([8, 8], 2) == 8 and cores([3, 5], 2) == 3
    assert cores([16, 2, 0], 3) == 5
    with pytest.raises(UsageError, match="has 4 cores, too few for 5 workers"):
        cores([2, 2], 5)
