"""A server that is disturbed in every way at once gives right answers, or a sentence, and goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disturbed import DISTURBANCES, world

from kvkeep.blocks.store import Store
from kvkeep.blocks.verify import verify

MINUTES = float(os.environ.get("MINUTES", "10"))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("seconds", "seed"),
    [pytest.param(20, 1, marks=pytest.mark.slow), pytest.param(60 * MINUTES, 2, marks=pytest.mark.soak(15))],
)
def test_no_disturbance_gives_wrong_bits_or_ends_the_server(
    seconds: float, seed: int, long_model_folder: Path, tmp_path: Path, say: Any
) -> None:
    folder = tmp_path / "store"
    with world(long_model_folder, folder, seed) as disturbed:
        progress: Callable[[str], None] = say.progress
        disturbed.run(seconds, 6, progress)
    assert not disturbed.problems, "\n".join(disturbed.problems[:5])
    assert not disturbed.deaths and not disturbed.ended["wrong"] and disturbed.ended["right"] > seconds / 2
    assert all("Traceback" not in one for one in disturbed.said), disturbed.said
    if folder.exists():
        verify(Store(folder))
    assert {*disturbed.done} > {*DISTURBANCES} - {
        "SIGTERM",
        "kill -9",
        "checkpoint that cannot be read",
    } or seconds < 60
    done = ", ".join(f"{count} × {name}" for name, count in sorted(disturbed.done.items()))
    ended = ", ".join(f"{count} {how}" for how, count in sorted(disturbed.ended.items()))
    say(f"done to it: {done}; requests: {ended}; deaths {disturbed.deaths}")
