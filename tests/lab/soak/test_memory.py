"""Many conversations in memory for a few."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from answering import Alone
from kvkeep_lab.process_rollup import process_memory_of
from running import TEXT, Program, bearer, figures, program

from kvkeep import KeepCache
from kvkeep.models.loading import Loaded
from kvkeep.serve.session import peak_bytes

SESSIONS, FIT, TURNS, NEW = 100, 10, 3, 8
AT_ONCE = 32
"""Clients that ask at the same time."""
PROMPT, MORE = 60, 20
"""Tokens of a first prompt, and what each turn says more."""
METHODS: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "kv-direct", "budget": 48},
    {"method": "h2o", "budget": 48},
    {"method": "snapkv+verified", "budget": 48},
]


class Watch:
    """What a server's caches and its process hold, at every scrape of a turn."""

    def __init__(self, running: Program) -> None:
        self.running, self.cache, self.process, self.limit = running, list[float](), list[int](), 0.0

    def scrape(self) -> None:
        """Scrape once."""
        found = figures(self.running.address)
        kinds = {name: value for name, value in found.items() if name.startswith("kvkeep_cache_bytes")}
        self.cache.append(sum(value for name, value in kinds.items() if "checkpoint_disk" not in name))
        self.limit = found["kvkeep_cache_limit_bytes"]
        self.process.append(process_memory_of(Path(f"/proc/{self.running.process.pid}/smaps_rollup")).anonymous)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Scrape all the time, for the block."""
        over = threading.Event()

        def looks() -> None:
            while not over.wait(0.1):
                self.scrape()

        thread = threading.Thread(target=looks)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.mark.real
@pytest.mark.soak(2)
def test_a_hundred_sessions_run_in_memory_for_ten(real: Loaded, say: Any, tmp_path: Path) -> None:
    kinds = [kind for kind, _ in zip(itertools.cycle(METHODS), range(SESSIONS), strict=False)]
    tokens = PROMPT + (TURNS - 1) * MORE + TURNS * NEW
    each = [peak_bytes(KeepCache(real.model, **kind), tokens) for kind in METHODS]
    memory = FIT * sum(each) // len(each) // 10**6 + 1  # MB
    prompts, wanted = [], []
    for number, kind in enumerate(kinds):
        single, ids = Alone(real, **kind), list[int]()
        for turn in range(TURNS):
            dice = random.Random(f"{number} {turn}")
            ids = [*ids, *dice.choices(range(1000, 20_000), k=MORE if turn else PROMPT)]
            prompts.append(ids)
            ids = [*ids, *single.answer(ids, NEW)]
            wanted.append(single.text)
        if number % 10 == 9:
            say.progress(f"{number + 1} of {SESSIONS} alone")
    options = ["--memory", f"{memory}MB", "--waiting", str(SESSIONS), "-x", "full", "--sessions", str(tmp_path)]
    with program(*options) as running:
        turns = [Watch(running) for _ in range(TURNS)]
        for turn, watch in enumerate(turns):
            with watch.looking():
                found = asyncio.run(answers_of(running, prompts[turn::TURNS], kinds if turn == 0 else None))
            for number, (text, cached) in enumerate(found):
                assert text == wanted[number * TURNS + turn], (number, turn, kinds[number])
                assert turn == 0 or cached == len(prompts[number * TURNS + turn - 1]) + NEW - 1, (number, turn, cached)
            say.progress(f"turn {turn + 1} of {TURNS}, at most {max(watch.cache) / 1e6:.1f} MB")
        counts = figures(running.address)
    peaks = [max(watch.process) for watch in turns]
    limit, most_held = turns[0].limit, max(max(watch.cache) for watch in turns)
    assert limit == memory * 10**6 and limit / 4 < most_held <= limit
    grown = (peaks[-1] - peaks[0]) / 1e6
    assert grown < 16, peaks
    parked, restored = (int(counts[f'kvkeep_session_files_total{{how="{how}"}}']) for how in ("parked", "restored"))
    assert parked >= SESSIONS and restored >= SESSIONS
    say(
        f"{SESSIONS} sessions of {TURNS} turns in memory for {FIT}: {SESSIONS * TURNS} answers as alone, caches at "
        f"most {most_held / 1e6:.1f} of {limit / 1e6:.1f} MB at {sum(len(watch.cache) for watch in turns)} scrapes, "
        f"process {grown:+.1f} MB from the first turn to the last; parked {parked} times, restored {restored}, never "
        "read again"
    )


async def answers_of(
    running: Program, prompts: list[list[int]], kinds: list[dict[str, Any]] | None
) -> list[tuple[str, int]]:
    """Ask for one turn of every session; return texts, and the tokens that were not read again."""
    free = asyncio.Semaphore(AT_ONCE)

    async def one(client: httpx.AsyncClient, number: int) -> tuple[str, int]:
        body = {"model": running.model, "prompt": prompts[number], "max_tokens": NEW, "temperature": 0}
        session = {"session": f"talk-{number}", **({} if kinds is None else kinds[number])}
        async with free:
            found = (await client.post(running.address + TEXT, json={**body, "kvkeep": session})).json()
        return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with httpx.AsyncClient(headers=bearer(), timeout=600) as client:
        return await asyncio.gather(*(one(client, number) for number in range(len(prompts))))
