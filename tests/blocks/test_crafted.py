"""A reference whose checksum holds and that kvkeep has not written is one sentence for every command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import tiny
from helpers import prompt, step
from typer.testing import CliRunner

from kvkeep import KeepCache, Session, SessionError, load_session
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store
from kvkeep.cli.cache import app

ODD: dict[str, Callable[[dict[str, Any]], object]] = {
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


@pytest.mark.parametrize("what", ["page", "ids"])
def test_numbers_that_no_cache_can_have_are_found_at_the_load(what: str, tmp_path: Path) -> None:
    """The ids that a checkpoint keeps of its text lie in a block, and are those that the model would read."""
    store, ids = Store(tmp_path / "store"), prompt(1, 40)
    cache = KeepCache(tiny("llama"), "kv-direct", 16, checkpoint="residual")
    step("llama", cache, ids)
    with StoredSession(store, "s", writing=True) as stored:
        if what == "ids":
            cache.ledger.ids.view()[0, 3] = 10**6
        stored.save(Session(cache, ids.tolist()))
        if what == "page":
            stored.commit(stored.about | {"options": stored.about["options"] | {"page": 2**63}})  # type: ignore[operator,index]
    with StoredSession(store, "s") as stored:
        if what == "page":
            with pytest.raises(SessionError, match="The page of a cache must be a whole number"):
                stored.load(tiny("llama"))
        else:
            assert not stored.load(tiny("llama")).cache.get_seq_length()  # it is read again
