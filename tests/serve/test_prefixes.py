"""What prompts begin with is read once and held once, by sessions of one owner, and no answer knows of it."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
from answering import Client, run, text
from conftest import tokenizer
from families import tiny

import kvkeep
from kvkeep import KeepCache
from kvkeep.models.loading import Loaded, load
from kvkeep.models.packed import row_independent
from kvkeep.serve.engine import Engine
from kvkeep.serve.session import peak_bytes, shared_parts

PLENTY, NEW = 10**9, 6
KINDS: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "paged"},
    *({"method": name, "budget": 24, "chunk": 16} for name in ("kv-direct", "snapkv+verified")),
]


def serving(family: str = "llama", folder: Path | None = None) -> Engine:
    """An engine; with a folder, one whose products and attention are the kernels'."""
    if folder is None:
        return Engine(Loaded(tiny(family), tokenizer(), "tiny", "tiny"), PLENTY)
    tiny(family, positions=2048).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    loaded = load(folder, weights="bfloat16", device="cpu")
    if not row_independent(loaded.model):
        pytest.skip("products of this machine depend on the number of rows")
    return Engine(loaded, PLENTY)


def in_memory(engine: Engine) -> int:
    """Bytes of memory of all caches."""
    kinds = engine.sessions.bytes_by_kind()
    return sum(kinds.values()) - kinds["checkpoint_disk"]


def alone(engine: Engine, ids: list[int], new: int = NEW, **cache: Any) -> list[int]:
    own = KeepCache(engine.model, **cache)
    return kvkeep.generate(engine.model, tokenizer(), ids, own, max_new_tokens=new).tokens


@pytest.mark.usefixtures("kernels")
def test_one_system_prompt_is_read_once_and_held_once(tmp_path: Path) -> None:
    engine, system = serving(folder=tmp_path), text(300, 0)
    prompts = [[*system, *text(8, 1 + number)] for number in range(6)]
    clients = [Client(engine, ids, NEW, owner="me") for ids in prompts]
    run(engine)
    assert [client.ended.read for client in clients] == [308, *[8] * 5]
    assert [client.ended.cached for client in clients] == [0, *[300] * 5]
    entries = 256 * (6 + 1) * engine.geometry.full_bytes_per_token  # a block of all, and one of each
    assert engine.sessions.bytes_by_kind()["resident"] == entries
    for ids, client in zip(prompts, clients, strict=True):
        assert [*client.ended.tokens] == alone(engine, ids, method="full")


@pytest.mark.usefixtures("kernels")
def test_what_is_granted_stays_within_the_memory_and_shared_blocks_count_once(tmp_path: Path) -> None:
    engine, system = serving(folder=tmp_path), text(600, 0)
    cache = KeepCache(engine.model, "full")
    engine.arbiter.total = int(2.5 * peak_bytes(cache, 616))
    clients = [Client(engine, [*system, *text(8, 1 + number)], 8, owner="me") for number in range(6)]
    most, single, engine.stopping = 0, 0, True
    while engine.step():
        assert engine.granted <= engine.arbiter.total
        most, single = max(most, len(engine.running)), max(single, sum(job.granted for job in engine.running))
    assert most > 2 and single > engine.arbiter.total, "together they fit because they share"
    assert all(client.ended.written == 8 for client in clients)


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["method"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_clients_without_sessions_find_their_conversations_again(family: str, kind: dict[str, Any]) -> None:
    """Each turn sends the whole text. Texts that begin alike, and those of other owners, change nothing."""
    engine, first = serving(family), text(60, 0)
    one = Client(engine, first, NEW, owner="me", **kind)
    run(engine)
    second = [*first, *one.ended.tokens, *text(9, 1)]
    again, branch, stranger, other = (
        Client(engine, second, NEW, owner="me", **kind),
        Client(engine, [*first, *text(5, 2)], NEW, owner="me", **kind),
        Client(engine, second, NEW, owner="you", **kind),
        Client(engine, second, NEW, owner="me", method="h2o", budget=24, chunk=16),
    )
    run(engine)
    assert again.ended.cached == 60 + NEW - 1 and stranger.ended.cached == other.ended.cached == 0
    cut = family == "llama" and "verified" not in kind["method"]  # windows cannot go back, nor can rounds be cut into
    assert branch.ended.cached == (60 if cut else 0)
    for client, ids in ((again, second), (branch, [*first, *text(5, 2)]), (stranger, second)):
        assert [*client.ended.tokens] == alone(engine, ids, **kind)


def test_a_conversation_beyond_its_exact_part_is_taken_over_by_its_next_turn() -> None:
    engine, first = serving(), text(60, 0)
    kind: dict[str, Any] = {"method": "endless+passages:count=2,size=16,exact=64", "budget": 24, "chunk": 16}
    one = Client(engine, first, 20, owner="me", **kind)
    run(engine)
    second = [*first, *one.ended.tokens, *text(9, 1)]
    stranger, other = Client(engine, second, NEW, owner="you", **kind), Client(engine, second, NEW, owner="me")
    run(engine)
    again, branch = (Client(engine, second, NEW, owner="me", **kind) for _ in range(2))
    run(engine)
    assert [client.ended.cached for client in (stranger, other, again, branch)] == [0, 0, 60 + 20 - 1, 0]
    assert again.ended.exact_tokens == 64
    third = [*second, *again.ended.tokens, *text(9, 2)]
    last = Client(engine, third, NEW, owner="me", **kind)
    run(engine)
    assert last.ended.cached == len(third) - 9 - 1


def test_an_answer_beyond_the_exact_part_does_not_depend_on_what_began_alike() -> None:
    kind: dict[str, Any] = {"method": "endless+passages:count=2,size=16,exact=200", "budget": 24, "chunk": 16}
    for more in (1, 2):
        found = list[list[int]]()
        for before in (False, True):
            engine, first = serving(), text(190, 0)
            if before:
                Client(engine, first, 1, owner="me", **kind)
                run(engine)
            one = Client(engine, [*first, *text(more, 1)], 60, owner="me", **kind)
            run(engine)
            assert one.ended.cached == (190 if before else 0)
            found.append([*one.ended.tokens])
        assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_answers_and_bytes_are_right_whatever_begins_alike(tmp_path: Path) -> None:
    """Owners, kinds, prefixes of any length, shorter prompts, cancelled answers, and little memory."""
    dice = random.Random(0)
    engine = serving(folder=tmp_path)
    engine.arbiter.total = int(3.5 * peak_bytes(KeepCache(engine.model, "full"), 700))
    stems, asked = [text(600, number) for number in range(2)], list[tuple[Client, list[int], dict[str, Any]]]()
    for number in range(24):
        ids = [*dice.choice(stems)[: dice.choice([40, 300, 600])], *text(dice.randint(1, 40), 10 + number)]
        if asked and dice.random() < 0.4:
            before, known, _ = dice.choice(asked)
            ids = [*known, *(t for e in before.events for t in getattr(e, "tokens", ())), *text(7, 10 + number)]
        kind = dice.choice([KINDS[0], KINDS[0], KINDS[2]])
        name: dict[str, Any] = (
            {"name": ("me", f"s{dice.randint(0, 2)}-{kind['method']}")} if dice.random() < 0.3 else {}
        )
        client = Client(engine, ids[:700], dice.randint(1, 12), owner=dice.choice(["me", "you"]), **kind, **name)
        asked.append((client, ids[:700], kind))
        for _ in range(dice.randint(0, 12)):
            engine.step()
            assert in_memory(engine) <= engine.arbiter.total
        if dice.random() < 0.2:
            client.job.cancel()
    engine.stopping = True
    while engine.step():
        assert in_memory(engine) <= engine.arbiter.total
    assert sum(client.ended.cached for client, _, _ in asked) > 1000
    for client, ids, kind in asked:
        if client.ended.reason != "cancelled":
            assert [*client.ended.tokens] == alone(engine, ids, len(client.ended.tokens), **kind)


def test_blocks_are_copied_where_no_kernel_attends_to_them_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each step of a session would copy all that it holds."""
    monkeypatch.setattr("kvkeep.step.native.entries.library", lambda: None)
    engine = Engine(Loaded(copy.deepcopy(tiny("llama")).bfloat16(), tokenizer(), "tiny", "tiny"), PLENTY)
    for number in range(2):
        client = Client(engine, [*text(300, 0), number], NEW, owner="me", method="full")
        run(engine)
    assert client.ended.cached == 300
    assert not any(shared_parts(session.cache) for session in engine.sessions.memory.values())
