"""The requests of an agent's day."""

from __future__ import annotations

from collections import Counter

import pytest
from kvkeep_lab.agent_day.day import HEADER, MAIN, MIN_REQUESTS, Day, make_day


def count(text: str) -> int:
    return len(text.split())


def day(requests: int = 100, start: int = 20_000, seed: int = 0) -> Day:
    return make_day(count, start, requests, seed)


def test_a_full_day_has_what_its_page_says() -> None:
    full = day()
    assert len(full.requests) == 100 and full.killed == 50
    calls, results = (
        [one for one in full.requests if keep(one)]
        for keep in (lambda one: one.kind == "call", lambda one: one.is_result)
    )
    assert len(calls) == len(results) == 30
    sizes = sorted(count(one.text) for one in results)
    assert sizes[0] < 100 and 1900 < sizes[-1] < 2100
    main = full.conversations["first"]
    assert len(main.tools) == 15 and len({one["function"]["name"] for one in main.tools}) == 15
    assert 0.9 < (count(main.instructions) + sum(count(f"{one}") for one in main.tools)) / 20_000 < 1.1
    assert Counter(one.kind for one in full.requests)["title"] == 2
    assert {"explorer", "reviewer"} < {*full.conversations} and full.requests[50].conversation == "first"
    after = full.requests[full.killed]
    assert after.kind == "text" and not after.is_result and 200 <= count(after.text) < 230


def test_sessions_differ_in_the_first_line_and_subagents_in_everything_else() -> None:
    found = day().conversations
    first, second = (found[name] for name in MAIN)
    assert first.header != second.header and first.header.startswith(f"{HEADER}: ")
    assert (first.instructions, first.tools) == (second.instructions, second.tools)
    assert found["second explorer"].instructions == found["explorer"].instructions
    starts = {one.instructions for one in found.values()}
    assert len(starts) == 4  # with that of titles


@pytest.mark.parametrize("requests", [MIN_REQUESTS, 12, 40])
def test_a_small_day_has_all_conversations_and_as_many_requests(requests: int) -> None:
    small = day(requests, 500)
    assert [one.number for one in small.requests] == [*range(requests)]
    assert {one.conversation for one in small.requests} == {*small.conversations}
    assert 0 < small.killed < requests and day(requests, 500) == small != day(requests, 500, seed=1)
    for name in small.conversations:
        mine = [one for one in small.requests if one.conversation == name]
        assert [one.is_result for one in mine] == [False, *(one.kind == "call" for one in mine[:-1])]
        assert mine[-1].kind != "call"
