"""What a step of one session costs, a token of a prompt, and what sessions wait for (docs/serving.md, Speed).

python tools/serving_pace.py [THREADS]

To compare two versions, run it with either's src in PYTHONPATH in turn: the machine's other work counts as well.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import kvkeep
from kvkeep.engine.answer import Answer, Ask
from kvkeep.engine.batch import Read, forward
from kvkeep.models.loading import Loaded
from kvkeep.serve.engine import Engine

CONTEXT, STEPS, SESSIONS, WRITTEN = 512, 120, 8, 32


def ids(seed: int = 0) -> list[int]:
    """Return random ids of a prompt."""
    numbers: list[int] = torch.randint(5, 40000, (CONTEXT,), generator=torch.Generator().manual_seed(seed)).tolist()
    return numbers


def read(model: Any, *reads: Read) -> None:
    """Run one pass."""
    for one in forward(model, reads):
        if isinstance(one, Exception):
            raise one


def filled(model: Any, rows: int, beside: Sequence[kvkeep.KeepCache] = ()) -> kvkeep.KeepCache:
    """Return a cache that has read a prompt in chunks of ``rows``, each beside a token of other caches."""
    cache, prompt = kvkeep.KeepCache(model, "full"), ids()
    for start in range(0, CONTEXT, rows):
        read(model, *(Read(one, [5]) for one in beside), Read(cache, prompt[start : start + rows], 0))
    return cache


def steps(model: Any) -> None:
    """Print the milliseconds of a step of one session."""
    cache, found = filled(model, 256), []
    for _ in range(STEPS):
        wall, spent = time.perf_counter(), time.process_time()
        read(model, Read(cache, [1000]))
        found.append((time.perf_counter() - wall, time.process_time() - spent))
    wall, spent = (statistics.quantiles(part[STEPS // 10 :], n=5)[0] * 1e3 for part in zip(*found, strict=True))
    print(f"a step of one session, 20th percentile: {wall:.1f} ms, processor time {spent:.1f} ms", flush=True)


def chunks(model: Any) -> None:
    """Print the processor time of a prompt's token by rows."""
    for rows in (512, 256, 128, 64, 32):
        began = time.process_time()
        filled(model, rows)
        print(f"a token of a prompt in {rows} rows: {(time.process_time() - began) / CONTEXT * 1e3:.2f} ms", flush=True)


def gaps(loaded: Loaded) -> None:
    """Print what sessions wait for that come at once, in processor time."""
    engine = Engine(loaded, 10**9)
    engine.ends = []
    began = time.process_time()
    jobs = [engine.submit(Ask(ids(seed), WRITTEN), lambda event: None, method="full") for seed in range(SESSIONS)]
    times: list[list[float]] = [[] for _ in jobs]
    answers: list[Answer | None] = [None] * SESSIONS
    while any(len(own) < WRITTEN for own in times):
        engine.step()
        answers = [job.answer or answer for job, answer in zip(jobs, answers, strict=True)]
        for own, job, answer in zip(times, jobs, answers, strict=True):
            written = WRITTEN if answer is not None and job.answer is None else len(answer.tokens) if answer else 0
            own += [time.process_time() - began] * (written - len(own))
    engine.close()
    waits = [after - before for own in times for before, after in itertools.pairwise(own)]
    first = statistics.median(own[0] for own in times)
    print(
        f"{SESSIONS} prompts of {CONTEXT} at once: 95th percentile between tokens "
        f"{statistics.quantiles(waits, n=20)[-1] * 1e3:.0f} ms, median to the first {first:.1f} s",
        flush=True,
    )


def apart(work: Callable[[], None]) -> None:
    """Run it in a thread of its own, as an engine runs beside the thread that loaded the model."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]) if sys.argv[1:] else 1)
    smollm2 = kvkeep.load("smollm2")
    filled(smollm2.model, 256)  # this thread has helpers of its own from now on
    for part in (lambda: steps(smollm2.model), lambda: chunks(smollm2.model), lambda: gaps(smollm2)):
        apart(part)
