"""Processes that share a store, in a folder or in a bucket, continue each other's sessions."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from answering import NEW, Alone, Client, run, small, text
from fastapi.testclient import TestClient
from kvkeep_cluster.bucket import BucketStore
from kvkeep_cluster.options import ClusterOptions
from kvkeep_cluster.replicas import OPTIONS
from kvkeep_cluster.service import SharedPool

from kvkeep import plugins
from kvkeep.blocks.store import Store
from kvkeep.cli.serve.server_options import (
    CLUSTER,
    LimitOptions,
    MemoryOptions,
    NetworkOptions,
    StoreOptions,
    process_options,
)
from kvkeep.errors import UsageError
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.app import application
from kvkeep.serve.session_pool import SessionPool


def body(prompt: Any, new: int, session: str = "talk", **own: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": new, "temperature": 0}
    return {**asked, "kvkeep": {"session": session}, **own}


def test_servers_that_share_a_folder_go_on_with_each_others_sessions(tmp_path: Path) -> None:
    """Also with what they have in memory, and never with what another one has followed."""
    store = Store(tmp_path)
    servers = [Engine(small(), 10**8, store=store, pool=SharedPool, method="h2o", budget=24) for _ in range(2)]
    alone, ids, read = Alone(small(), method="h2o", budget=24), text(40, 1), 0
    for turn, server in enumerate([servers[number] for number in (0, 0, 1, 1, 0, 1, 0)]):
        client = Client(server, ids, name=("me", "talk"))
        run(server)
        assert client.ended.cached == read and [*client.ended.tokens] == alone.answer(ids, NEW), turn
        assert not store.info("me/talk").in_use
        read, ids = len(ids) + NEW - 1, [*ids, *client.ended.tokens, *text(5, turn)]
    first, second = servers
    assert (
        first.sessions.storage.counts["restored"] == second.sessions.storage.counts["restored"] == 2
    )  # else what is in memory counts

    begun = Client(first, ids, name=("me", "talk"))
    while not begun.events:
        first.step()
    client = Client(second, ids, name=("me", "talk"))  # at the same time
    run(second)
    assert "in use by another program" in str(client.events[-1]) and str(tmp_path) not in str(client.events[-1])
    run(first)
    assert [*begun.ended.tokens] == alone.answer(ids, NEW)
    info = store.info("me/talk")
    assert (info.saves, info.tokens, info.problem) == (8, len(ids) + NEW - 1, None)
    ids = [*ids, *begun.ended.tokens, 7]
    after = Client(second, ids, name=("me", "talk"))  # it goes on from the turn that is saved
    run(second)
    assert after.ended.read == 2 and [*after.ended.tokens] == alone.answer(ids, NEW)
    for server in servers:
        server.close()
    (block,) = tmp_path.rglob("*.block")  # of the last turn
    assert block.stem == json.loads(next(tmp_path.rglob("*.json")).read_bytes().splitlines()[0])["state"]


def test_of_servers_that_share_a_bucket_one_saves_its_turn(tmp_path: Path) -> None:
    stores = [BucketStore(tmp_path / name, f"file://{tmp_path}/bucket") for name in "ab"]
    for store in stores:
        store.create()
    first, second = (Engine(small(), 10**8, store=one, pool=SharedPool, method="h2o", budget=24) for one in stores)
    alone, ids = Alone(small(), method="h2o", budget=24), text(40, 1)
    begun = Client(first, ids, name=("me", "talk"))
    while not begun.events:
        first.step()
    session = first.sessions.memory[("me", "talk")]
    client = Client(second, ids, name=("me", "talk"))  # at the same time
    run(second)
    run(first)
    assert [*begun.ended.tokens] == [*client.ended.tokens] == alone.answer(ids, NEW)
    assert session.followed and "was continued by another program" in str(session.unsaved)
    assert str(tmp_path) not in str(session.unsaved) and not first.sessions.memory
    ids = [*ids, *client.ended.tokens, 7]
    after = Client(first, ids, name=("me", "talk"))  # it goes on from the turn that is saved
    run(first)
    assert after.ended.read == 2 and [*after.ended.tokens] == alone.answer(ids, NEW)
    assert stores[1].info("me/talk").saves == 2
    for server in (first, second):
        server.close()


def test_of_servers_that_share_a_folder_each_tells_what_the_file_has(tmp_path: Path) -> None:
    engines = [Engine(small(), 10**8, store=Store(tmp_path), pool=SharedPool) for _ in range(2)]
    apps = [application(engine, small(), []) for engine in engines]
    one, two = (TestClient(app, base_url="http://localhost") for app in apps)
    for engine in engines:
        engine.start()

    def ask(client: TestClient, prompt: str) -> None:
        assert client.post("/v1/completions", json=body(prompt, 4)).status_code == 200

    def told(client: TestClient) -> list[tuple[int, int, str]]:
        listed = client.get("/v1/sessions").json()["data"]
        (facts,) = listed or [None]
        single = client.get("/v1/sessions/talk")
        assert single.json() == facts if facts else single.status_code == 404
        return [(facts["saves"], facts["tokens"], facts["state"])] if facts else []

    ask(one, "the river")
    ((_, first, _),) = told(one)
    assert told(one) == told(two) == [(1, first, "parked")]
    ask(two, "the river and the stone")
    ((turns, second, _),) = told(two)
    assert turns == 2 and second > first and told(one) == told(two)
    assert two.delete("/v1/sessions/talk").status_code == 200 and told(one) == told(two) == []
    ask(one, "the river")
    assert told(two) == [(1, first, "parked")]
    ask(two, "the river")
    assert two.delete("/v1/sessions/talk").status_code == 200 and one.delete("/v1/sessions/talk").status_code == 404
    for engine in engines:
        engine.stop(0)


def test_without_the_bucket_sessions_are_a_503_and_answers_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, store = small(), BucketStore(tmp_path / "here", f"file://{tmp_path}/bucket")
    store.create()
    engine = Engine(loaded, 10**8, store=store)
    engine.start()
    client = TestClient(application(engine, loaded, []), base_url="http://localhost")

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("http://10.0.0.1 does not answer")

    answers = [client.post("/v1/completions", json=body("the river", 4)).json()["choices"][0]["text"]]
    with monkeypatch.context() as patch:
        for operation in ("cat_file", "pipe_file", "find", "rm_file", "modified"):
            patch.setattr(store.bucket.files, operation, fails)
        for verb, path in (("GET", ""), ("GET", "/talk"), ("DELETE", "/talk")):
            found = client.request(verb, f"/v1/sessions{path}")
            assert found.status_code == 503 and "Retry-After" in found.headers
            error = found.json()["error"]
            assert error["message"] == "The store of sessions cannot be used now; retry later."
            assert error["code"] == "store_unavailable"
        for name in ("talk", "new"):
            found = client.post("/v1/completions", json=body("the river", 4, name))
            answers.append(found.json()["choices"][0]["text"])
        del (asked := body("the river", 4))["kvkeep"]
        answers.append(client.post("/v1/completions", json=asked).json()["choices"][0]["text"])
    assert len({*answers}) == 1
    assert [one["name"] for one in client.get("/v1/sessions").json()["data"]] == ["new", "talk"]
    engine.stop(0)


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    def check(store: StoreOptions, **given: Any) -> None:
        ClusterOptions(**given).check(MemoryOptions(), NetworkOptions(), LimitOptions(), store)

    with pytest.raises(UsageError, match="leave it or --bucket out"):
        check(StoreOptions(private=True), bucket="s3://talks/here")
    with pytest.raises(UsageError, match="name one with --sessions"):
        check(StoreOptions(), bucket="s3://talks/here")
    check(StoreOptions(sessions=str(tmp_path)), bucket="s3://talks/here")
    service = ClusterOptions(bucket="talks").service(
        OPTIONS | {"memory": "50MB", "sessions": str(tmp_path)}, {"method": "full"}, ()
    )
    with pytest.raises(UsageError, match="is not a bucket"):
        service.store()


def test_a_single_server_keeps_the_locks_of_its_sessions() -> None:
    """The installed connector changes nothing of a server without replicas and bucket."""

    def pool(**given: str) -> type[SessionPool]:
        return (
            ClusterOptions(**given).service(OPTIONS | {"memory": "50MB", "sessions": None}, {"method": "full"}, ()).pool
        )

    assert pool() is SessionPool
    assert pool(replicas="2") is pool(bucket="s3://talks/here") is SharedPool


def test_kvkeep_finds_the_options_by_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"][CLUSTER].items()
    monkeypatch.setattr(plugins, "points", lambda group: [EntryPoint(*entry, group)])
    assert process_options() is ClusterOptions
