"""What a machine carries: sessions fill its memory, share its steps, and are worth fetching from some rate on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from families import SMOLLM2, tiny

from kvkeep import KeepCache
from kvkeep.errors import UsageError
from kvkeep.plan.capacity import METHODS, balance, capacities, parse, rebuilding
from kvkeep.plan.costs import cost
from kvkeep.plan.machine import Machine
from kvkeep.plan.shape import Shape, shape_of
from kvkeep.plan.sizes import sizes
from kvkeep.serve.arbiter import Arbiter, peak_bytes

H100 = Machine.load(Path(__file__).parents[2] / "docs" / "machines" / "h100-sxm.json")
MEMORY = 10**9


@pytest.fixture(scope="module")
def shape() -> Shape:
    return shape_of(SMOLLM2, 2)


def test_sessions_fill_the_memory_and_share_the_weights(shape: Shape) -> None:
    found = {str(one.candidate): one for one in capacities(shape, H100, MEMORY, 8192, "1024")}
    assert tuple(found) == METHODS
    for name, one in found.items():
        assert one.held < one.granted, name
        assert one.sessions * one.granted <= MEMORY < (one.sessions + 1) * one.granted, name
        assert one.together is not None and one.rate > 1 / one.alone.step
        assert one.together.step >= one.alone.step and 0 < one.together.own < one.together.step
        assert one.fetched(one.pays_from) == pytest.approx(one.alone.prefill)
        if not one.alone.drafts:  # what is not the pasts' is paid once, the pasts as often as there are sessions
            pasts = [each.step - each.own for each in (one.alone, one.together)]
            assert pasts[1] == pytest.approx(one.sessions * pasts[0])
    assert found["full"].sessions < found["h2o"].sessions and found["full"].stored == found["full"].held
    token = shape.geometry.full_bytes_per_token
    assert found["kv-direct kv@host"].alone.moved == token * (8192 - 1024)
    assert 0 < found["snapkv+pages kv@host"].alone.moved < token * 8192
    assert 0 < found["snapkv+verified kv@host"].alone.moved < token * 8192  # a round yields more than one token
    assert not found["full"].alone.moved and not found["kv-direct residual@device"].alone.moved
    (few,) = capacities(shape, H100, 10**6, 8192, "1024", ["full"])
    assert few.sessions == few.rate == 0 and few.together is None and few.own_share is None
    told: list[str] = []
    names = [str(one.candidate) for one in capacities(shape, H100, MEMORY, 512, "1024", tell=told.append)]
    assert names == ["full"] and len(told) == len(METHODS) - 1  # others need no budget of 1,024 for 512 tokens
    assert all("left out at 512 tokens: 1,024 entries hold them" in line for line in told)


@pytest.mark.parametrize("name", [*METHODS, "static", "quest", "kv-direct kv@disk", "kvzip+checkpoint"])
def test_a_server_lets_in_as_many(name: str) -> None:
    """The sessions of ``kvkeep capacity`` are those that the server's arbiter grants memory to."""
    model, here = tiny("llama"), replace(H100, link=None)
    shape, candidate = shape_of(model.config, next(model.parameters()).dtype.itemsize), parse(name)
    (one,) = capacities(shape, here, 10**7, 400, "200", [name], answer=16)
    budget = 400 if name == "static" else one.sizes.budget
    cache = KeepCache(model, candidate.spec, budget, checkpoint=candidate.checkpoint, where=candidate.where)
    assert one.sessions == Arbiter(10**7).fitting(cache, 400) > 5 and one.granted == peak_bytes(cache, 400)


def test_what_the_host_holds_is_held_where_it_is_the_same_memory(shape: Shape) -> None:
    names, token = ["full", "kv-direct kv@host", "kv-direct kv@disk"], shape.geometry.full_bytes_per_token
    full, host, disk = capacities(shape, replace(H100, link=None), MEMORY, 8192, "1024", names)
    assert host.granted > host.held == host.stored == disk.stored > 8192 * token
    assert disk.held < 0.2 * disk.stored and full.held == full.stored
    away = [one.held for one in capacities(shape, H100, MEMORY, 8192, "1024", names)]
    assert away == [full.held, disk.held, disk.held]


def test_where_entries_outweigh_weights_and_links_outrun_projections(shape: Shape) -> None:
    for sessions in (1, 16):
        tokens = round(balance(shape, H100, sessions))
        held = sizes(shape.geometry, parse("full"), tokens, None, shared=False)
        one = cost(shape, parse("full"), held, H100, 1.0, sessions)
        assert one.step == pytest.approx(2 * one.own, rel=1e-3)
    short, long = (rebuilding(shape, H100, tokens) for tokens in (1024, 4096))
    assert long.seconds == pytest.approx(4 * short.seconds) and long.pays_below == pytest.approx(short.pays_below)
    assert long.entries == 4096 * shape.geometry.full_bytes_per_token < long.residuals


def test_caches_are_named_as_the_planner_names_them(shape: Shape) -> None:
    assert [str(parse(name)) for name in METHODS] == list(METHODS)
    assert str(parse("kv-direct")) == "kv-direct kv@host" and str(parse("kv-direct residual:4@disk")).endswith("@disk")
    for name, sentence in (("h2o kv@host", "no checkpoints"), ("h3o", "h2o"), ("kv-direct kv@moon", "place")):
        with pytest.raises(UsageError, match=sentence):
            parse(name)
    with pytest.raises(UsageError, match="8,192 positions"):
        list(capacities(shape, H100, MEMORY, 10000, "1024"))
    with pytest.raises(UsageError, match="no room"):
        list(capacities(shape, H100, MEMORY, 256, "1024"))
