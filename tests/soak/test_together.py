"""Answers together: those of each alone, faster, and none that waits for another's long prompt."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest
from answering import Client, alone, mixed, run, small, text
from families import FAMILIES
from running import TEXT, Program, bearer, program

from kvkeep.serve import batch
from kvkeep.serve.engine import Engine


@pytest.mark.soak(10)
def test_sessions_of_every_method_and_family_come_and_go(say: Any) -> None:
    """Eight at a time; one in four is cancelled at some step."""
    whole = cut = tokens = 0
    names = set[str]()
    for place, family in enumerate(FAMILIES):
        dice = random.Random(f"soak {family}")
        asked = mixed(family, dice, 10**6)
        engine, here, clients = Engine(small(family), 10**9), list[Client](), list[Client]()
        for name, ids, new, cache in asked:
            while len([one for one in here if not one.done]) >= 8 or dice.random() < 0.6:
                engine.step()
                if here and dice.random() < 0.05:
                    dice.choice(here).job.cancel()
            here = [one for one in here if not one.done]
            here.append(Client(engine, ids, new, **cache))
            clients.append(here[-1])
            names.add(name)
        run(engine)
        for client, (name, ids, new, cache) in zip(clients, asked, strict=True):
            found = [*client.ended.tokens]
            assert found == alone(family, ids, new, **cache)[: len(found)], (family, name)
            assert client.ended.reason == "cancelled" or len(found) == new
            whole, cut = whole + (len(found) == new), cut + (len(found) < new)
            tokens += len(found)
        say.progress(f"{place + 1} of {len(FAMILIES)} families, {whole + cut} answers")
    say(
        f"{whole + cut} sessions of {len(names)} methods on {len(FAMILIES)} families, 8 at a time, joining at random, "
        f"{cut} cancelled: all {tokens:,} tokens as generate alone"
    )


ROUNDS, SESSIONS, NEW = 3, 8, 64


@pytest.mark.real
@pytest.mark.soak(11)
def test_eight_together_are_faster_and_short_prompts_pass_long_ones(
    say: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "CHUNK", 16)
    waits = Counter[int]()
    for before in range(1, 28):  # chunks of a prompt of 29 that are read when the short one comes
        engine = Engine(small(), 10**9)
        Client(engine, text(460, 1), 4)
        for _ in range(before):
            engine.step()
        short, steps = Client(engine, text(9, 2), 4), 0
        while not short.job.writes and not short.events:
            engine.step()
            steps += 1
        waits[steps] += 1
        run(engine)
    assert max(waits) <= 2, waits
    say.progress(f"a short prompt beside a long one waits {max(waits)} chunks at most")
    ratios: dict[str, list[float]] = {}
    with program("--memory", "1GB", "-x", "full", "--sessions", str(tmp_path)) as running:
        asyncio.run(answers(running, SESSIONS, 4, 0))
        for number in range(ROUNDS):
            for method in ("full", "h2o"):
                together = asyncio.run(answers(running, SESSIONS, NEW, number, method))
                one_by_one = sum(asyncio.run(answers(running, 1, NEW, number, method)) for _ in range(SESSIONS))
                ratios.setdefault(method, []).append(one_by_one / together)
                say.progress(f"round {number + 1} of {ROUNDS}, {method}: {ratios[method][-1]:.2f} ×")
    middle = {method: median(own) for method, own in ratios.items()}
    assert min(middle.values()) >= 3, ratios
    told = ", ".join(
        f"{method} {middle[method]:.2f} × ({min(own):.2f} to {max(own):.2f})" for method, own in ratios.items()
    )
    say(
        f"{SESSIONS} sessions of {NEW} tokens together beside one by one, median of {ROUNDS} rounds: {told} as fast; a "
        f"short prompt beside one of 29 chunks waits for {max(waits)} chunks at most, at whichever it comes"
    )


async def answers(running: Program, count: int, new: int, seed: int, method: str = "full") -> float:
    """Seconds that so many answers at once take."""
    kind = {"method": method} if method == "full" else {"method": method, "budget": 128}

    async def one(client: httpx.AsyncClient, number: int) -> None:
        asked = {"model": running.model, "prompt": [500 + number, 900 + seed, 1300], "max_tokens": new, "kvkeep": kind}
        found = await client.post(running.address + TEXT, json=asked)
        assert found.json()["usage"]["completion_tokens"] == new, found.text

    async with httpx.AsyncClient(headers=bearer(), timeout=120) as client:
        start = time.perf_counter()
        await asyncio.gather(*(one(client, number) for number in range(count)))
        return time.perf_counter() - start
