"""A session whose checksums hold is refused by one sentence when it is loaded, or does no harm."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, new_cache, pairs
from families import tiny
from helpers import prompt, step
from torch import Tensor
from typer.testing import CliRunner

from kvkeep import KeepCache, KvkeepError, Session, SessionError, load_session, save_session
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store
from kvkeep.cli.cache import app

Tensors = dict[str, Tensor]
NUMBERS = (-(2**31), -2, -1, 0, 1, 2, 5, 17, 60, 100, 1000, 2**31 - 1)
DTYPES = (torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64)


def saved(name: str, family: str, path: Path, rows: int = 2) -> None:
    cache, case = new_cache(name, family), CASES[name]
    ids = torch.randint(2, 97, (rows, case.length), generator=torch.Generator().manual_seed(1))
    step(cache.model, cache, ids)
    save_session(path, Session(cache, ids.tolist(), {"who": "me"}))


def use(session: Session, path: Path) -> None:
    """Do with a session whatever is done with one."""
    cache = session.cache
    rows = cache.rows or 1
    step(cache.model, cache, torch.full((rows, 3), 5))
    cache.memory(), cache.describe()
    try:
        cache.crop(-1)
    except (KvkeepError, RuntimeError) as error:
        assert isinstance(error, KvkeepError) or "record_past" in str(error) or "past states" in str(error), error
        step(cache.model, cache, torch.full((rows, 1), 7))
    cache.reorder_cache(torch.arange(rows).flip(0))
    for _ in range(3):
        step(cache.model, cache, torch.full((rows, 11), 9))
    save_session(path, Session(cache, [[1] * cache.get_seq_length()] * rows))


def opened(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors of a session's state, and its reference."""
    with StoredSession.at(path) as stored:
        assert stored.about is not None
        state = stored.store.blocks.read(stored.block(stored.about["state"]))
        return {name: tensor.clone() for name, tensor in state.items()}, stored.about


def write(path: Path, tensors: Tensors, about: dict[str, Any]) -> None:
    """Write a session with another state and another reference; its blocks of tokens are there."""
    with StoredSession.at(path, writing=True) as stored:
        key = f"x{stored.saves:031x}"
        stored.store.blocks.write(stored.block(key), tensors)
        stored.commit(about | ({"state": key} if "state" in about else {}))


def damage(tensors: Tensors, about: dict[str, Any], draw: random.Random) -> str:
    """Change one thing about a session; return what."""
    name = draw.choice([*tensors])
    own, other = tensors[name], draw.choice([*tensors])
    axis = draw.randrange(max(own.ndim, 1))
    kind = draw.choice("drop narrow widen axis dtype swap copy number number number about about".split())  # noqa: SIM905
    integers = [one for one, tensor in tensors.items() if not tensor.is_floating_point() and tensor.numel()]
    match kind:
        case "drop":
            del tensors[name]
        case "narrow" if own.ndim and own.shape[axis]:
            tensors[name] = own.narrow(axis, 0, own.shape[axis] - 1)
        case "widen" if own.ndim:
            tensors[name] = torch.cat([own, own.narrow(axis, 0, min(1, own.shape[axis]))], axis)
        case "axis":
            tensors[name] = own.unsqueeze(axis)
        case "dtype":
            tensors[name] = own.to(draw.choice(DTYPES))
        case "swap":
            tensors[name], tensors[other] = tensors[other], own
        case "copy":
            tensors[f"{name}{draw.choice(('', '0', '.0'))}"] = tensors[other]
        case "number" if integers:
            name = draw.choice(integers)
            flat = tensors[name].clone().view(-1)
            span = torch.iinfo(flat.dtype) if flat.dtype != torch.bool else None
            value = draw.choice(NUMBERS)
            place = draw.randrange(flat.numel())
            flat[place] = not flat[place] if span is None else min(max(value, span.min), span.max)
            tensors[name] = flat.view(tensors[name].shape)
            other = f"[{place}] {value}"
        case _:
            return _about(about, draw)
    return f"{kind} {name} {axis} {other}"


def _about(about: dict[str, Any], draw: random.Random) -> str:
    """Change one thing of a reference."""
    past, ids = about["past"], about["ids"]
    values = [None, 1, -1, 0, 2**40, 1.5, [], {}, "full", "h2o", "residual", True]
    table = draw.choice((about, past, past, about["options"], about["by_token"], ids))
    if isinstance(table, list):
        row = draw.choice(ids)
        row[draw.randrange(len(row))] = draw.choice([*values, 96, 97, 2**31])
        return f"ids {row}"
    name = draw.choice([name for name in table if name not in ("fingerprint", "family", "notes")] or ["budget"])
    before = table.get(name)
    near = [before + step for step in (-1, 1)] if type(before) is int else []
    if isinstance(before, list) and before and draw.random() < 0.7:
        before[draw.randrange(len(before))] = draw.choice([*values, 3, 5])
        return f"about {name} {before}"
    if isinstance(before, dict) and before and draw.random() < 0.7:
        own = draw.choice([*before])
        before[own] = draw.choice([*values, 3, 5])
        return f"about {name} {own} {before[own]}"
    if draw.random() < 0.2:
        table.pop(name, None)
        return f"about {name} gone"
    table[name] = draw.choice(near or values)
    return f"about {name} {before} {table[name]}"


ODD: dict[str, Callable[[dict[str, Any]], object]] = {
    "a time": lambda about: about.update(created=float("nan")),
    "rows": lambda about: about["past"].update(rows="3"),
    "a length": lambda about: about["past"].update(rows=10**3000, length=10**3000),
    "no past": lambda about: about.update(past={}),
    "no ids": lambda about: about.update(ids=[]),
    "an id": lambda about: about["ids"][0].__setitem__(5, 2**31 - 1),
    "a method": lambda about: about.update(method="[red]x[/blue]"),
    "an escape": lambda about: about.update(family="\x1b[2J"),
}
"""Changes of a reference by what they change."""


@pytest.mark.parametrize("what", ODD)
def test_an_odd_reference_is_one_sentence_for_every_command(what: str, tmp_path: Path) -> None:
    cache, ids, store = KeepCache(tiny("llama"), "full"), prompt(1, 20), Store(tmp_path / "store")
    step("llama", cache, ids)
    with StoredSession(store, "s", writing=True) as stored:
        stored.save(Session(cache, ids.tolist()))
        about = json.loads(json.dumps(stored.about))
        ODD[what](about)
        stored.commit(about)
    for given in (["list"], ["list", "--json"], ["show", "s"], ["check"]):
        found = CliRunner().invoke(app, [*given, "--sessions", str(tmp_path / "store")])
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
        assert "\x1b[2J" not in found.output
    with StoredSession(store, "s") as stored, pytest.raises(SessionError) as refused:
        load_session(stored, tiny("llama"))
    assert len(str(refused.value).splitlines()) == 1
    for name in [info.name for info in store.sessions()]:
        store.remove(name)
    assert not [*tmp_path.rglob("*.json")]


@pytest.mark.parametrize(("name", "family"), pairs(turn=1)[::4])
def test_what_was_never_saved_is_refused_or_harmless(tmp_path: Path, name: str, family: str) -> None:
    """A session whose checksums hold and whose content is no cache's: another program wrote it."""
    saved(name, family, tmp_path / "s")
    tensors, about = opened(tmp_path / "s")
    for number in range(8):
        damaged, told = dict(tensors), json.loads(json.dumps(about))
        print(number, damage(damaged, told, random.Random(f"{name}{family}0{number}")))
        write(tmp_path / "s", damaged, told)
        try:
            session = load_session(tmp_path / "s", tiny(family))
        except SessionError as error:
            assert len(str(error).splitlines()) == 1
        else:
            use(session, tmp_path / "again")
