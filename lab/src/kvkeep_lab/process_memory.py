"""The memory of a process with a cache, as the system reports it, and the time of its steps without the page cache.

Each case is measured in a new process, so that the memory of other cases is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch

from kvkeep.cache import KeepCache
from kvkeep.decode.generate import Generation, generate
from kvkeep.models.folders import cache_folder
from kvkeep.models.loading import Loaded, load
from kvkeep.stock import new_cache
from kvkeep_lab.drafts import without_drafts
from kvkeep_lab.page_cache import Mapped, mapped_below
from kvkeep_lab.partial import INTERRUPTED, Interruption, reason
from kvkeep_lab.process_rollup import ProcessMemory, current_process_memory
from kvkeep_lab.tables import Table, fixed, megabytes, percent, refusals
from kvkeep_lab.timing import TimingCase, random_ids

WARM_UP = 16
"""Tokens that are read before memory is counted, because a process allocates memory in its first pass."""


@dataclass(frozen=True)
class InProcess:
    """One case in a separate process."""

    label: str
    context: int
    before: ProcessMemory | None = None
    """Memory of the process with the model, before the cache is created."""
    held: ProcessMemory | None = None
    """Memory of the process after prompt and steps."""
    resident_bytes: int = 0
    """Resident bytes that the cache reports."""
    elsewhere_bytes: int = 0
    """Bytes that the cache reports in other places."""
    step_ms: float | None = None
    """Mean milliseconds of a new token."""
    dropped_ms: float | None = None
    """Mean milliseconds of a new token if the checkpoint is dropped from memory before each token or round; None
    without a checkpoint."""
    dropped_bytes: int = 0
    """Mean bytes of the checkpoint's files."""
    left_bytes: int = 0
    """Mean bytes of these files that stayed in memory."""
    per_pass: float | None = None
    """Tokens of an exact pass, for methods that draft."""
    error: str = ""
    """Reason if there are no other figures."""


def process_table(rows: Sequence[InProcess], title: str) -> Table:
    """Return a table of bytes above those of the model, and of seconds."""
    table = Table(
        title,
        [
            *("context", "cache", "Pss", "above the model: anonymous", "mapped"),
            *("resident", "kept smaller or elsewhere", "step ms", "dropped ms", "tokens a pass"),
        ],
        notes=[
            "Pss: the private memory of the process, and its share of memory that other processes map as well. "
            "Above the model: the memory added since before the cache was made, without a file (anonymous) and "
            "of mapped files. Both come from /proc/self/smaps_rollup; the cache itself reports the columns "
            "'resident' and 'kept smaller or elsewhere'.",
            "Step: mean time of a new token. Dropped: the same with the checkpoint's files taken out of memory "
            f"before each token or round (MADV_PAGEOUT; {_stayed(rows)} of them stayed), so that the step reads "
            "them from the disk. No memory limit was set, and the model stays in memory.",
            *refusals((row.label, f"{row.context:,}", row.error) for row in rows),
        ],
        named=2,
    )
    for row in rows:
        if row.held is not None and row.before is not None:
            above = row.held - row.before
            in_cache = row.resident_bytes or None, row.elsewhere_bytes or None
            sizes = map(megabytes, (row.held.pss, above.anonymous, above.mapped, *in_cache))
            times = [fixed(row.step_ms, 1), fixed(row.dropped_ms, 1), fixed(row.per_pass)]
            table.rows.append([f"{row.context:,}", f"`{row.label}`", *sizes, *times])
    return table


def _stayed(rows: Sequence[InProcess]) -> str:
    dropped = sum(row.dropped_bytes for row in rows)
    return percent(sum(row.left_bytes for row in rows) / dropped if dropped else 0.0)


def measure_each(
    loaded: Loaded,
    listed: Sequence[TimingCase],
    steps: int,
    progress: Callable[[str, float, float], None],
    text: list[int] | None = None,
) -> list[InProcess]:
    """Measure every case in a new process, which loads the model by its name. text: ids whose beginning is the prompt;
    None: random ids. An interrupt after the first case raises :class:`Interruption` with the rows."""
    about = loaded.name, loaded.weights, str(loaded.model.device), torch.get_num_threads()
    rows: list[InProcess] = []
    try:
        for done, case in enumerate(listed):
            progress(f"{case.label} at {case.length}", done, len(listed))
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                try:
                    rows.append(pool.submit(measure, *about, case, steps, text).result())
                except BrokenProcessPool:
                    rows.append(
                        InProcess(
                            case.label, case.length, error="The process ended unexpectedly; memory may have run out."
                        )
                    )
                except Exception as error:
                    rows.append(InProcess(case.label, case.length, error=reason(error)))
    except KeyboardInterrupt:
        if not rows:
            raise
        rows += [InProcess(case.label, case.length, error=INTERRUPTED) for case in listed[len(rows) :]]
        raise Interruption(rows) from None
    return rows


def measure(
    name: str, weights: str, device: str, threads: int, case: TimingCase, steps: int, text: list[int] | None = None
) -> InProcess:
    """Measure one case in this process, which must be new."""
    torch.set_num_threads(threads)
    loaded = load(name, weights=weights, device=device)
    ids = random_ids(loaded.model, case.length)
    if text is not None:
        ids = ids.new_tensor([text[: case.length]])
    with torch.inference_mode():
        loaded.model(ids[:, :WARM_UP], use_cache=False, logits_to_keep=1)
    before = current_process_memory()
    cache = new_cache(loaded.model, case.method, **case.options)
    begun, _ = _written(loaded, ids[0].tolist(), cache, 1)
    warm, warm_ms = _written(loaded, begun.sequence, cache, steps)
    holding, memory = current_process_memory(), warm.memory
    drops = _Drops(mapped_below(cache_folder() / "checkpoints"))
    dropped_ms = _written(loaded, warm.sequence, cache, steps, drops)[1] if drops.files else None
    return InProcess(
        case.label,
        case.length,
        before,
        holding,
        memory.resident_bytes,
        memory.compressed_bytes + sum(memory.checkpoint_bytes.values()),
        warm_ms,
        dropped_ms,
        sum(file.size for file in drops.files),
        drops.left // max(drops.count, 1),
        len(warm.tokens) / (len(warm.tokens) - warm.accepted) if warm.drafted else None,
    )


class _Drops:
    """Drops files from memory on each call. Counts calls, seconds, and the bytes that stayed in memory."""

    def __init__(self, files: Sequence[Mapped]) -> None:
        self.files, self.count, self.seconds, self.left = files, 0, 0.0, 0

    def __call__(self) -> bool:
        """Drop the files. Returns False, so that generation continues."""
        start = time.perf_counter()
        for file in self.files:
            file.drop()
        self.left += sum(file.cached_bytes for file in self.files)
        self.count += 1
        self.seconds += time.perf_counter() - start
        return False


def _written(
    loaded: Loaded, sequence: list[int], cache: Any, new: int, drops: _Drops | None = None
) -> tuple[Generation, float]:
    """Generate ``new`` more greedy tokens, dropping files before each token. Return the answer and the
    milliseconds of a token, without the time to drop files."""
    drops = drops or _Drops(())
    drops()
    apart, start = drops.seconds, time.perf_counter()
    with without_drafts(loaded.model, unless=isinstance(cache, KeepCache) and cache.method.recall.drafts):
        answer = generate(
            loaded.model, loaded.tokenizer, sequence, cache, max_new_tokens=new, interrupted=drops, ignore_eos=True
        )
    seconds = time.perf_counter() - start - (drops.seconds - apart)
    return answer, 1e3 * seconds / max(len(answer.tokens), 1)
