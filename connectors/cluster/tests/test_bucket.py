"""A store in a bucket, used by several machines. ``KVKEEP_S3`` names the address of a server with the protocol of S3
(``moto_server``); without it a folder takes the place of the bucket."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny

from kvkeep import KeepCache, UsageError
from kvkeep.blocks import beginnings
from kvkeep.blocks.folder import BlockName
from kvkeep.blocks.sessions import Session, StoredSession
from kvkeep.errors import BlockMissing, SessionBusy, SessionDamaged, SessionError, SessionUnwritable, StoreError

pytest.importorskip("fsspec")
bucket = pytest.importorskip("kvkeep_cluster.bucket")
BucketStore = bucket.BucketStore
SERVER = os.environ.get("KVKEEP_S3")
Made = Callable[..., Any]


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.skipif(not SERVER, reason="no KVKEEP_S3"))])
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Makes the store as a machine with another folder sees it."""
    url = f"file://{tmp_path}/bucket"
    if request.param == "s3":
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in (keys | {"AWS_ENDPOINT_URL": SERVER or ""}).items():
            monkeypatch.setenv(name, value)
        url = f"s3://test-{uuid.uuid4().hex}/some/prefix"
        with pytest.raises(UsageError, match="Nothing can be stored"):
            BucketStore(tmp_path, url)
        bucket.fsspec.filesystem("s3").mkdir(url.split("/")[2])

    def make(machine: str, quota: int | None = None) -> Any:
        (store := BucketStore(tmp_path / machine, url, quota=quota)).create()
        return store

    return make


def name(number: int) -> BlockName:
    return BlockName("owner", number.to_bytes(16, "big").hex())


def put(store: Any, number: int) -> None:
    store.blocks.write(name(number), {"keys": torch.full((4, 8), float(number))})


def has(store: Any, number: int) -> bool:
    return torch.equal(store.blocks.read(name(number))["keys"], torch.full((4, 8), float(number)))


def test_of_many_that_create_an_object_one_succeeds(made: Made) -> None:
    objects = made("here").bucket
    path = objects.root / "n" / "1"
    # The folder that stands in for a bucket looks before it creates, so only a bucket is tried with several at once.
    with ThreadPoolExecutor(1 if "file" in objects.files.protocol else 8) as pool:
        made = [pool.submit(objects.create, path, bytes([number])) for number in range(8)]
    assert [error for one in made if not isinstance(error := one.exception(), FileExistsError)] == [None]
    objects.create(path, objects.read(path))  # as a request does that is repeated after a lost answer


def test_blocks_are_found_from_another_machine_and_stay_when_a_folder_is_full(made: Made) -> None:
    here, there = made("here", 4 * 512), made("there")
    for number in range(9):
        put(here, number)
    assert here.blocks.count()[0] < 9 and all(has(here, number) for number in range(9))
    assert here.blocks.count()[1] <= 4 * 512
    assert there.blocks.use([name(number) for number in (3, 4, 99, 5)]) == 2 and there.blocks.count()[0] == 2
    assert has(there, 8)
    there.blocks._in_memory.clear()
    there.blocks.path(name(8)).write_bytes(b"damaged")
    assert has(there, 8)  # from the bucket
    there.bucket.write(there.blocks.object(name(7)), b"damaged")
    for _ in range(2):
        with pytest.raises(BlockMissing):
            there.blocks.read(name(7))
    there.blocks.remove(name(8))
    assert made("third").blocks.use([name(8)]) == 0


def test_without_the_bucket_nothing_is_stored_and_nothing_is_lost(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    store = made("here")
    put(store, 1)
    with store.open("talk") as reference:
        reference.commit({"turn": 1})

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("no network")

    with monkeypatch.context() as patch, store.open("talk") as reference:
        for operation in ("cat_file", "pipe_file", "find", "rm_file"):
            patch.setattr(store.bucket.files, operation, fails)
        with pytest.raises(StoreError, match="cannot be used: no network"):
            put(store, 2)
        assert has(store, 1) and store.blocks.use([name(1), name(2)]) == 1
        with pytest.raises(SessionUnwritable, match="cannot be used"):
            reference.commit({"turn": 2})
        with pytest.raises(SessionUnwritable, match="cannot be used"):
            store.open("talk")
        with pytest.raises(SessionError, match="cannot be used"):
            store.sessions()
    with pytest.raises(StoreError, match="a moment ago"):
        put(store, 2)
    monkeypatch.setattr(store.blocks, "_paused", 0.0)
    put(store, 2)
    assert store.read("talk").about == {"turn": 1}


def test_of_two_machines_that_continue_a_session_one_is_refused(made: Made) -> None:
    here, there = made("here"), made("there")
    with here.open("owner/talk") as one, there.open("owner/talk") as other:
        one.commit({"turn": 1})
        with pytest.raises(SessionBusy, match="was continued by another program"):
            other.commit({"turn": "another"})
        for turn in range(2, 5):
            one.commit({"turn": turn})
        with pytest.raises(SessionBusy):
            other.commit({"turn": "another"})  # its number is free again
        with pytest.raises(SessionBusy):
            other.renew()
    with there.open("owner/talk") as other, here.read("owner/talk") as one:
        assert other.about == one.about == {"turn": 4} and other.saves == 4
    there.remove("owner/talk")
    assert here.sessions() == [] and not here.bucket.list(here.bucket.root / "sessions")
    here.bucket.write(here.bucket.root / "sessions" / "owner" / "talk.session" / "3.json", b"damaged")
    with pytest.raises(SessionDamaged):
        there.open("owner/talk")
    aside = there.set_aside("owner/talk")
    assert [info.name for info in here.sessions("owner")] == [aside] == [info.name for info in there.sessions()]


def test_a_session_goes_on_on_another_machine_to_the_bit(made: Made) -> None:
    model, ids = tiny("llama", positions=1024), torch.arange(3, 603)[None] % 90
    here, there = made("here"), made("there")
    for method in ("full", "kv-direct"):
        cache = KeepCache(model, method, budget=None if method == "full" else 64)
        with torch.no_grad():
            model(ids, cache=cache)
        for _ in range(2):
            with StoredSession(here, f"owner/{method}", writing=True) as session:
                session.save(Session(cache, ids.tolist()))
        with StoredSession(there, f"owner/{method}", writing=True) as session:
            found = session.load(model)
        assert found.cache.get_seq_length() == 600
        with torch.no_grad():
            ours, theirs = (model(torch.tensor([[7]]), cache=one).logits for one in (cache, found.cache))
        assert torch.equal(ours, theirs), method
    new = KeepCache(model, "full")
    prompt = [*ids[0].tolist(), 1]
    third = made("third").blocks
    assert beginnings.begin(third, new, beginnings.find(third, "owner", new, prompt), prompt) == 512
    there.remove("owner/full")
    there.remove("owner/kv-direct")
    assert not here.bucket.list(here.bucket.root / "blocks")  # what is forgotten is in no object


def test_a_url_of_something_else_is_refused(tmp_path: Path) -> None:
    for url in ("odd://here", "s3:/x", "s3://", "bucket", "file://x"):
        with pytest.raises(UsageError, match="is not a bucket"):
            BucketStore(tmp_path, url)
