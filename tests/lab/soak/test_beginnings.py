"""Many clients with one system prompt."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from answering import Alone
from running import TEXT, Program, bearer, figures, program

from kvkeep.models.loading import Loaded

CLIENTS, SYSTEM, SUFFIX, NEW = 20, 1000, 12, 16


@pytest.mark.real
@pytest.mark.soak(9)
@pytest.mark.parametrize("kind", [{"method": "full"}, {"method": "kv-direct", "budget": 256}], ids=str)
def test_a_shared_system_prompt_is_read_once(kind: dict[str, Any], real: Loaded, say: Any, tmp_path: Path) -> None:
    dice = random.Random(0)
    system = dice.choices(range(1000, 20_000), k=SYSTEM)
    prompts = [[*system, *dice.choices(range(1000, 20_000), k=SUFFIX)] for _ in range(CLIENTS)]
    wanted = []
    for number, prompt in enumerate(prompts):
        single = Alone(real, **kind)
        single.answer(prompt, NEW)
        wanted.append(single.text)
        say.progress(f"{number + 1} of {CLIENTS} alone")
    with program("--memory", "512MB", "-x", "full", "--sessions", str(tmp_path)) as running:
        found = asyncio.run(answers_of(running, prompts, kind))
        counts = figures(running.address)
    assert [text for text, _ in found] == wanted
    assert sorted(cached for _, cached in found) == [0, *[SYSTEM] * (CLIENTS - 1)]
    memory = [name for name in counts if name.startswith("kvkeep_cache_bytes") and "disk" not in name]
    cache_bytes = sum(counts[name] for name in memory)
    say(
        f"{CLIENTS} clients at once with {SYSTEM} tokens of system prompt and {SUFFIX} of their own, {kind['method']}: "
        f"{SYSTEM + CLIENTS * SUFFIX} tokens read of {CLIENTS * (SYSTEM + SUFFIX)}, answers as alone, "
        f"{cache_bytes / 1e6:.0f} MB"
    )


async def answers_of(running: Program, prompts: list[list[int]], kind: dict[str, Any]) -> list[tuple[str, int]]:
    """Ask all at once; return texts, and the tokens that were not read again."""

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> tuple[str, int]:
        body = {"model": running.model, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "kvkeep": kind}
        found = (await client.post(running.address + TEXT, json=body)).json()
        return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with httpx.AsyncClient(headers=bearer(), timeout=600) as client:
        return await asyncio.gather(*(one(client, prompt) for prompt in prompts))
