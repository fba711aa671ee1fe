"""The capacity of a machine: sessions that fit its memory, their shared steps, and when fetching pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import SMOLLM2, tiny
from kvkeep_lab.capacity import Capacity, balance, rebuilding
from kvkeep_lab.capacity import capacities as carried
from kvkeep_lab.cli.capacity import CACHES

from kvkeep import KeepCache
from kvkeep.errors import UsageError
from kvkeep.plan.candidates import Candidate
from kvkeep.plan.costs import cost
from kvkeep.plan.machine import Machine
from kvkeep.plan.shape import Shape, shape_of
from kvkeep.plan.sizes import sizes
from kvkeep.serve.arbiter import Arbiter, peak_bytes

H100 = Machine.load(Path(__file__).parents[2] / "docs" / "machines" / "h100-sxm.json")
MEMORY = 10**9

parse = Candidate.parse


def capacities(
    shape: Shape,
    machine: Machine,
    memory: int,
    context: int,
    names: Sequence[str] = CACHES,
    budget: int = 1024,
    **given: Any,
) -> Iterator[Capacity]:
    return carried(shape, machine, memory, context, f"{budget}", [parse(name) for name in names], **given)


@pytest.fixture(scope="module")
def shape() -> Shape:
    return shape_of(SMOLLM2, 2)


def test_sessions_fill_the_memory_and_share_the_weights(shape: Shape) -> None:
    found = {str(one.candidate): one for one in capacities(shape, H100, MEMORY, 8192)}
    assert tuple(found) == CACHES
    for name, one in found.items():
        assert one.idle < one.granted, name
        assert one.sessions * one.granted <= MEMORY < (one.sessions + 1) * one.granted, name
        assert one.shared is not None and one.rate > 1 / one.single.step
        assert one.shared.step >= one.single.step and 0 < one.shared.fixed < one.shared.step
        assert one.fetched(one.pays_from) == pytest.approx(one.single.prefill)
        if not one.single.drafts:  # what is not the pasts' is paid once, the pasts as often as there are sessions
            pasts = [each.step - each.fixed for each in (one.single, one.shared)]
            assert pasts[1] == pytest.approx(one.sessions * pasts[0])
    assert found["full"].sessions < found["h2o"].sessions and found["full"].sizes.total == found["full"].idle
    token = shape.geometry.full_bytes_per_token
    assert found["kv-direct kv@host"].single.moved == token * (8192 - 1024)
    assert 0 < found["snapkv+verified kv@host"].single.moved < token * 8192  # a round yields more than one token
    assert not found["full"].single.moved and not found["kv-direct residual@device"].single.moved
    (few,) = capacities(shape, H100, 10**6, 8192, ["full"])
    assert few.sessions == few.rate == 0 and few.shared is None and few.fixed_share is None
    messages: list[str] = []
    names = [str(one.candidate) for one in capacities(shape, H100, MEMORY, 512, tell=messages.append)]
    assert names == ["full"] and len(messages) == len(CACHES) - 1  # others need no budget of 1,024 for 512 tokens
    assert all("left out at 512 tokens: a budget of 1,024 entries holds every token" in line for line in messages)


@pytest.mark.parametrize("name", [*CACHES, "quest", "kv-direct kv@disk", "kvzip+checkpoint"])
def test_capacity_equals_what_the_servers_arbiter_admits(name: str) -> None:
    model, here = tiny("llama"), replace(H100, link=None)
    shape, candidate = shape_of(model.config, next(model.parameters()).dtype.itemsize), parse(name)
    (one,) = capacities(shape, here, 10**7, 400, [name], 200, answer=16)
    cache = KeepCache(model, candidate.spec, one.sizes.budget, checkpoint=candidate.checkpoint, where=candidate.where)
    assert one.sessions == Arbiter(10**7).fitting(cache, 400) > 5 and one.granted == peak_bytes(cache, 400)


def test_host_checkpoints_count_where_the_host_shares_the_devices_memory(shape: Shape) -> None:
    names, token = ["full", "kv-direct kv@host", "kv-direct kv@disk"], shape.geometry.full_bytes_per_token
    full, host, disk = capacities(shape, replace(H100, link=None), MEMORY, 8192, names)
    assert host.granted > host.idle == host.sizes.total == disk.sizes.total > 8192 * token
    assert disk.idle < 0.2 * disk.sizes.total and full.idle == full.sizes.total
    away = [one.idle for one in capacities(shape, H100, MEMORY, 8192, names)]
    assert away == [full.idle, disk.idle, disk.idle]


def test_break_even_points_balance_entries_with_weights_and_links_with_projections(shape: Shape) -> None:
    for sessions in (1, 16):
        tokens = round(balance(shape, H100, parse("full"), sessions))
        planned = sizes(shape.geometry, parse("full"), tokens, None, shared=False)
        one = cost(shape, parse("full"), planned, H100, 1.0, sessions)
        assert one.step == pytest.approx(2 * one.fixed, rel=1e-3)
    short, long = (rebuilding(shape, H100, parse("kv-direct residual@device"), tokens) for tokens in (1024, 4096))
    assert long.seconds == pytest.approx(4 * short.seconds) and long.pays_below == pytest.approx(short.pays_below)
    assert long.entries == 4096 * shape.geometry.full_bytes_per_token < long.residuals


def test_cache_names_are_parsed_as_by_the_planner(shape: Shape) -> None:
    assert [str(parse(name)) for name in CACHES] == list(CACHES)
    assert str(parse("kv-direct")) == "kv-direct kv@host" and str(parse("kv-direct residual:4@disk")).endswith("@disk")
    for name, sentence in (("h2o kv@host", "no checkpoints"), ("h3o", "h2o"), ("kv-direct kv@moon", "place")):
        with pytest.raises(UsageError, match=sentence):
            parse(name)
    with pytest.raises(UsageError, match="8,192 positions"):
        list(capacities(shape, H100, MEMORY, 10000))
    with pytest.raises(UsageError, match="too short for a prompt"):
        list(capacities(shape, H100, MEMORY, 256))
