"""The store: a file of JSON lines, one for each cell, and locks of cells for workers.

Each line is appended with one write while a lock is held, and flushed to the disk. A line that a kill or a full disk
truncated stays a separate line. A worker measures a cell under a lock file, which the operating system releases when
the process dies.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError

from kvkeep.errors import StoreError, reason_of
from kvkeep_lab.cell import Cell


class Definition(BaseModel):
    """The definition of an experiment at the time when cells of ``setting`` were measured."""

    kind: Literal["experiment"] = "experiment"
    setting: str
    experiment: dict[str, Any]


class Record(BaseModel):
    """One cell, measured or failed."""

    cell: str
    setting: str
    experiment: str
    model: str
    seed: int
    status: Literal["done", "failed"]
    error: str = ""
    """Reason of the failure, in a sentence."""
    versions: dict[str, str] = {}
    machine: dict[str, Any] = {}
    started: str = ""
    """Start in UTC."""
    seconds: FiniteFloat = 0.0
    """Seconds of the complete cell."""

    @property
    def label(self) -> str:
        """The measured case as text for people."""
        return self.model


class CacheBytes(BaseModel):
    """The bytes of a cache, as :meth:`~kvkeep.memory.meter.Memory.as_dict` returns them."""

    model_config = ConfigDict(extra="allow")

    resident_bytes: NonNegativeInt = 0
    compressed_bytes: NonNegativeInt = 0
    checkpoint_bytes: dict[str, NonNegativeInt] = {}
    bookkeeping_bytes: NonNegativeInt = 0


class TaskRecord(Record):
    """One cell of a task."""

    kind: Literal["cell"] = "cell"
    method: str
    budget: str | None
    point: dict[str, int | float | str]
    scores: dict[str, list[FiniteFloat]] = {}
    """For each metric, the numbers of the samples that have one, in the order of samples."""
    depths: list[FiniteFloat | None] = []
    """Where the answer to each sample stands in its text, in percent, if the task says so."""
    prompt_tokens: list[int] = []
    """Tokens of the prompt, by sample."""
    prefill_s: list[FiniteFloat] = []
    """Seconds of the prompt, by sample."""
    token_s: list[FiniteFloat | None] = []
    """Seconds per token after the first, by sample."""
    memory: CacheBytes = CacheBytes()
    """Bytes of the sample with the largest cache."""
    whole_bytes: NonNegativeInt = 0
    """Bytes of an unbounded bfloat16 cache for that sample; 0 in stores of earlier versions."""
    exactness: str = ""
    entries: int | None = None
    """Budget of a full layer."""

    @property
    def held_bytes(self) -> int:
        """Bytes of entries that attention reads, in full or compressed."""
        return self.memory.resident_bytes + self.memory.compressed_bytes

    @property
    def bookkeeping_bytes(self) -> int:
        """Bytes of what a method notes of entries: positions, scores, scales, tables."""
        return self.memory.bookkeeping_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of checkpoints in all places."""
        return sum(self.memory.checkpoint_bytes.values())

    @property
    def label(self) -> str:
        """Method and budget."""
        return f"{self.method} at {self.budget}" if self.budget else self.method


class StudyRecord(Record):
    """One cell of a study."""

    kind: Literal["study"] = "study"
    data: Any = None
    """Its result, as :meth:`~kvkeep_lab.studies.base.Study.plain` returns it."""


_LINE: TypeAdapter[Definition | TaskRecord | StudyRecord] = TypeAdapter(
    Annotated[Definition | TaskRecord | StudyRecord, Field(discriminator="kind")]
)


class ResultFile:
    """One file of results, and the results read from it. start: byte at which reading begins, the beginning of a line.
    torn: number of invalid lines."""

    def __init__(self, path: str | os.PathLike[str], start: int = 0) -> None:
        self.path = Path(path)
        self.start = self.end = start  # end: the byte after the last complete line
        self.records: list[TaskRecord | StudyRecord] = []
        self.definitions: list[Definition] = []
        self.torn = 0
        self._locks: dict[int, tuple[Cell, FileLock]] = {}  # by worker

    def refresh(self) -> None:
        """Read the lines added since the last call. Raises StoreError if the file cannot be read."""
        found, self.end = whole_lines(self.path, self.end)
        for line in found:
            try:
                record = _LINE.validate_json(line)
            except ValidationError:
                self.torn += 1
                continue
            if isinstance(record, Definition):
                self.definitions.append(record)
            else:
                self.records.append(record)

    @property
    def unfinished(self) -> bool:
        """Whether the file, as far as it was read, ends with an incomplete line, which no process completes."""
        return self.path.exists() and self.path.stat().st_size > self.end

    def done(self) -> set[str]:
        """Return the keys of the measured cells, as far as the file was read."""
        return {record.cell for record in self.records if record.status == "done"}

    def append(self, record: Record | Definition) -> None:
        """Append one line. Raises StoreError if it cannot be written."""
        append_line(self.path, record.model_dump_json())

    def define(self, setting: str, experiment: dict[str, Any]) -> None:
        """Append the definition of an experiment, unless the last definition of its setting is the same."""
        known = [definition for definition in self.definitions if definition.setting == setting]
        if not known or known[-1].experiment != experiment:
            self.append(Definition(setting=setting, experiment=experiment))

    def claim(self, cell: Cell, worker: int = 0) -> int:
        """Lock a cell for a worker, and return the number of workers that have begun it, including this one. A number
        above 1 means that others died while measuring it. Return 0 if the cell is not free: another process is
        measuring it, or has recorded it after ``start``. A cell that this worker has locked already counts as a death.
        Raises StoreError."""
        if worker in self._locks:
            self._locks.pop(worker)[1].release()
        if (lock := self._locked(cell)) is None:
            return 0
        self.refresh()
        if cell.key in {record.cell for record in self.records}:
            self._free(cell, lock)
            return 0
        self._locks[worker] = cell, lock
        with self._writing(), self._begun(cell).open("ab") as file:
            file.write(b".")
            return file.tell()

    def release(self, worker: int = 0) -> None:
        """Release the locks of a worker. A worker that dies does not call this."""
        if worker in self._locks:
            self._free(*self._locks.pop(worker))

    def forget(self, cells: Iterable[Cell]) -> None:
        """Remove the marks of begun cells, except cells that are being measured. It is called after this process has
        ended their workers."""
        for cell in cells:  # a worker killed before it began a cell leaves its lock file
            left = self._begun(cell).exists() or self._lock_file(cell).exists()
            if left and (lock := self._locked(cell)) is not None:
                self._free(cell, lock)

    def _begun(self, cell: Cell) -> Path:
        """Return the path of a file with one byte for each worker that began the cell and did not finish it."""
        return Path(f"{self.path}.{cell.key}.begun")

    def _lock_file(self, cell: Cell) -> Path:
        return Path(f"{self.path}.{cell.key}.lock")

    def _locked(self, cell: Cell) -> FileLock | None:
        lock = FileLock(self._lock_file(cell), timeout=0)
        with self._writing(), suppress(Timeout):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            return lock
        return None

    def _free(self, cell: Cell, lock: FileLock) -> None:
        with suppress(OSError):  # Windows cannot remove an open file; it stays, empty
            self._begun(cell).unlink(missing_ok=True)
            os.unlink(lock.lock_file)
        lock.release()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Timeout:  # Timeout is an OSError, but no fault of the disk
            raise
        except OSError as error:
            raise _unwritable(self.path, error) from error


def append_line(path: Path, line: str) -> None:
    """Append one line atomically. Raises StoreError if the disk is full."""
    data = line.encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if _ends_torn(file):
                    data = b"\n" + data
                if os.write(file, data) < len(data):
                    raise OSError(0, "no space left on device")
                os.fsync(file)
            finally:
                os.close(file)
    except OSError as error:
        raise _unwritable(path, error) from error


def whole_lines(path: Path, start: int = 0) -> tuple[list[bytes], int]:
    """Return the complete lines from byte ``start`` on that are not empty, and the byte at which the next line begins.
    A missing file has no lines. Raises StoreError if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return [], start
    except OSError as error:
        raise StoreError(f"The results '{path}' cannot be read: {reason_of(error)}.") from error
    data = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
    return [line for line in data.splitlines() if line.strip()], start + len(data)


def _unwritable(path: Path, error: OSError) -> StoreError:
    """Return the error to raise if ``path`` cannot be written."""
    return StoreError(f"The results '{path}' cannot be written: {reason_of(error)}.")


def _ends_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    if not size:
        return False
    os.lseek(file, size - 1, os.SEEK_SET)
    return os.read(file, 1) != b"\n"
