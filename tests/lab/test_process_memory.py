"""Memory of a process: the system's numbers against known bytes, and pages that are really dropped."""

from __future__ import annotations

import mmap
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from kvkeep_lab import process_memory
from kvkeep_lab.page_cache import Mapped, mapped_below
from kvkeep_lab.partial import INTERRUPTED, Interruption
from kvkeep_lab.process_memory import InProcess, measure, measure_each, process_table
from kvkeep_lab.process_rollup import current_process_memory
from kvkeep_lab.studies.base import Trial
from kvkeep_lab.studies.bench import Bench, process_cases
from kvkeep_lab.timing import TimingCase

from kvkeep.errors import KvkeepError, UsageError
from kvkeep.memory.places import Disk
from kvkeep.models.loading import load

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")

SIZE = 32 << 20


@pytest.fixture
def on_disk(tmp_path: Path) -> torch.Tensor:
    """A tensor on disk, as checkpoints are, with a number in every page."""
    tensor = Disk(tmp_path).allocate((SIZE // 8,), torch.int64)
    return torch.arange(SIZE // 8, out=tensor)


def test_mapped_and_anonymous_memory_are_counted_separately(on_disk: torch.Tensor, tmp_path: Path) -> None:
    (file,) = mapped_below(tmp_path)
    file.drop()
    before = current_process_memory()
    assert int(on_disk[:: 4096 // 8].sum()) > 0  # reads every page
    mapped = current_process_memory() - before
    assert mapped.mapped == pytest.approx(SIZE, rel=0.1) and abs(mapped.anonymous) < SIZE / 4
    fresh = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # no memory that malloc has kept
    anonymous = torch.frombuffer(fresh, dtype=torch.uint8).fill_(1)
    more = current_process_memory() - before
    assert more.anonymous - mapped.anonymous == pytest.approx(SIZE, rel=0.1)
    now = current_process_memory()
    assert SIZE < now.pss <= now.anonymous + now.mapped and anonymous.sum() > 0  # how much less, others decide


def test_dropped_files_leave_memory_and_come_back_the_same(on_disk: torch.Tensor, tmp_path: Path) -> None:
    (file,) = mapped_below(tmp_path)
    assert file.size == SIZE and file.address == on_disk.data_ptr() and file.cached_bytes == SIZE
    file.drop()
    assert file.cached_bytes < SIZE / 4
    assert torch.equal(on_disk, torch.arange(SIZE // 8)) and file.cached_bytes == SIZE
    assert mapped_below(tmp_path.parent) == []  # a folder's own files only
    with pytest.raises(KvkeepError, match="cannot be dropped from memory here: msync says"):
        Mapped(file.address + 1, SIZE).drop()


def test_a_checkpoint_is_dropped_before_every_token(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVKEEP_CACHE", str(tmp_path))
    drops: list[Mapped] = []
    honest = Mapped.drop
    monkeypatch.setattr(Mapped, "drop", lambda file: (drops.append(file), honest(file))[1])
    options = {"budget": "32", "checkpoint": "kv", "where": "disk", "context": 80}
    row = measure(str(model_folder), "float32", "cpu", 1, TimingCase("direct", 80, "kv-direct", options), 5)
    files = row.dropped_bytes // max(file.size for file in drops)
    assert len(drops) >= 6 * files > 0 and row.left_bytes < row.dropped_bytes
    assert row.step_ms is not None and row.dropped_ms is not None and row.per_pass is None
    assert 0 < row.elsewhere_bytes <= row.dropped_bytes and row.held is not None
    stock = measure(str(model_folder), "float32", "cpu", 1, TimingCase("stock", 80, "stock"), 5)
    assert (stock.dropped_ms, stock.dropped_bytes, stock.elsewhere_bytes) == (None, 0, 0)
    assert stock.resident_bytes > 0


def forked(workers: int, mp_context: object) -> ProcessPoolExecutor:
    """Processes that import nothing anew."""
    return ProcessPoolExecutor(workers, mp_context=get_context("fork"))


def test_a_case_is_measured_by_another_interpreter(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    case = process_cases([80], "32", ["snapkv+verified"])[1]
    (row,) = measure_each(load(str(model_folder), device="cpu"), [case], 4, lambda what, done, total: None)
    assert (row.label, row.error) == (case.label, "") and row.per_pass is not None and row.per_pass >= 1


def test_each_case_is_measured_in_a_separate_process(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "ProcessPoolExecutor", forked)
    loaded = load(str(model_folder), device="cpu")
    study = Bench(contexts=[80], budget="32", steps=4, process=True, only=["verified"])
    labels: list[str] = []
    found = study.measure(Trial(loaded, progress=lambda what, done, total: labels.append(what)))
    assert [row.label for row in found.processes] == ["stock", "snapkv+verified kv@disk"] and len(labels) == 2
    assert not any(row.error for row in found.processes) and found.rows == []
    assert found.processes[1].per_pass is not None and found.processes[1].per_pass >= 1
    (table,) = study.tables(found)
    assert len(table.rows) == 2 and "MADV_PAGEOUT" in " ".join(table.notes)
    assert study.plain(study.restored(study.plain(found))) == study.plain(found)


def test_a_process_reads_the_beginning_of_a_text(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompts: list[list[int]] = []

    def noted(loaded: Any, sequence: list[int], *rest: Any) -> Any:
        prompts.append(sequence)
        return written(loaded, sequence, *rest)

    written = process_memory._written
    monkeypatch.setattr(process_memory, "_written", noted)
    loaded, file = load(str(model_folder), device="cpu"), tmp_path / "text.txt"
    file.write_text("the house of many rooms " * 40)
    ids = loaded.tokenizer(file.read_text()).input_ids
    study = Bench(contexts=[80], budget="32", steps=2, process=True, only=["stock"])
    study.check([file])
    monkeypatch.setattr(process_memory, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
    study.measure(Trial(loaded, sources=[file]))
    assert prompts[0] == ids[:80]
    with pytest.raises(UsageError, match="give one of at least 9,000"):
        Bench(contexts=[9000], process=True).measure(Trial(loaded, sources=[file]))
    with pytest.raises(UsageError, match="Only --process reads a text"):
        Bench().check([file])


def test_an_interrupt_or_a_fault_keeps_the_finished_processes(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case runs in a thread in place of a process."""
    ends: list[BaseException | None] = [None, RuntimeError("a fault\nof a method"), KeyboardInterrupt()]

    def measured(*given: object) -> InProcess:
        if (end := ends.pop(0)) is not None:
            raise end
        return InProcess("stock", 80)

    monkeypatch.setattr(process_memory, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
    monkeypatch.setattr(process_memory, "measure", measured)
    trial = Trial(load(str(model_folder), device="cpu"))
    study = Bench(contexts=[80], budget="32", steps=4, process=True)
    with pytest.raises(Interruption) as stop:
        study.measure(trial)
    errors = [row.error for row in stop.value.found.processes]
    assert errors == ["", "RuntimeError: a fault.", INTERRUPTED, INTERRUPTED]
    ends = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt) as nothing:
        study.measure(trial)
    assert not isinstance(nothing.value, Interruption)


def test_a_case_that_is_refused_or_dies_is_reported(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(str(model_folder), device="cpu")
    small = process_cases([80], "2")[2]

    monkeypatch.setattr(process_memory, "ProcessPoolExecutor", forked)
    (row,) = measure_each(loaded, [small], 2, lambda what, done, total: None)
    assert "less than one chunk" in row.error

    class Dying(ThreadPoolExecutor):
        def submit(self, *_: object, **options: object) -> None:  # type: ignore[override]
            raise BrokenProcessPool

    monkeypatch.setattr(process_memory, "ProcessPoolExecutor", lambda workers, mp_context: Dying(workers))
    dead = measure_each(loaded, [TimingCase("full", 80, "full")], 2, lambda what, done, total: None)
    table = process_table([row, *dead], "title")
    assert table.rows == [] and any("`full` at 80: The process ended" in note for note in table.notes)
