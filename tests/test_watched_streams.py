"""A race is found where a wait is missing, and only there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pretended_gpu import GPU, PretendedGpu
from watched_streams import watched_streams


@pytest.fixture
def races() -> Iterator[list[str]]:
    with PretendedGpu(), watched_streams() as found:
        yield found


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("race", ["written, then read", "read, then written", "written, then read by the host"])
def test_a_race_is_found_where_a_wait_is_missing(race: str, waits: bool, races: list[str]) -> None:
    host, there = torch.zeros(8, pin_memory=True), torch.zeros(2, 8, device=GPU)
    compute, copies, event = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Event()
    copies.wait_stream(compute)  # on which the memory is made

    def copy(to_device: bool) -> None:
        with torch.cuda.stream(copies):
            (there[0] if to_device else host).copy_(host if to_device else there[0], non_blocking=True)

    copy(True)
    event.record(copies)
    there[1].add_(1)  # other memory
    assert not races
    if waits or race != "written, then read":
        compute.wait_event(event)
    there[0] * 2
    if race == "read, then written":
        event.record(compute)
        if waits:
            copies.wait_event(event)
        copy(True)
    if race == "written, then read by the host":
        event.record(compute)
        copies.wait_event(event)
        copy(False)
        if waits:
            copies.synchronize()
        host + 1
    assert bool(races) != waits
