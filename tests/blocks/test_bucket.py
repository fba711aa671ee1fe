"""A bucket behind the folders of several machines. ``KVKEEP_S3`` names the address of a server with the protocol of S3
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
from kvkeep.blocks import bucket as module
from kvkeep.blocks.bucket import Bucket, BucketFolder
from kvkeep.blocks.folder import BlockName
from kvkeep.blocks.sessions import Session, StoredSession
from kvkeep.blocks.store import Store
from kvkeep.errors import BlockMissing, SessionBusy, SessionError, SessionUnwritable

SERVER = os.environ.get("KVKEEP_S3")
Made = Callable[[], Bucket]


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.skipif(not SERVER, reason="no KVKEEP_S3"))])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    """Makes the bucket as another machine sees it."""
    if request.param == "folder":
        return lambda: Bucket(f"file://{tmp_path}/bucket")
    address = {"key": "x", "secret": "x", "client_kwargs": {"endpoint_url": SERVER, "region_name": "eu-central-1"}}
    name = f"test-{uuid.uuid4().hex}"
    Bucket(f"s3://{name}", **address)._files.mkdir(name)
    return lambda: Bucket(f"s3://{name}/some/prefix", **address)


def block(number: int) -> dict[str, torch.Tensor]:
    return {"keys": torch.full((4, 8), float(number))}


def name(number: int) -> BlockName:
    return BlockName("owner", number.to_bytes(16, "big").hex())


def same(folder: BucketFolder, number: int) -> bool:
    return torch.equal(folder.read(name(number))["keys"], block(number)["keys"])


def test_objects_are_created_once_listed_and_removed(made: Made) -> None:
    one, other = made(), made()
    assert one.get("a/1") is None and one.keys("a") == [] and one.remove("a/1") is None
    one.create("a/1", b"first")
    with pytest.raises(FileExistsError):
        other.create("a/1", b"second")
    other.put("a/b/2", b"2")
    other.create("a/1", b"first")  # as a request does that is repeated after a lost answer
    assert one.get("a/1") == b"first" and one.keys("a") == ["1", "b/2"]
    one.remove("a/1")
    assert other.keys("a") == ["b/2"]
    with ThreadPoolExecutor(8) as pool:  # of many that want a number one gets it
        won = [pool.submit(made().create, "n/1", bytes([number])) for number in range(8)]
    assert sum(future.exception() is None for future in won) == 1
    assert {type(error) for future in won if (error := future.exception())} == {FileExistsError}


def test_blocks_are_found_from_another_machine_and_stay_when_a_folder_is_full(made: Made, tmp_path: Path) -> None:
    here = BucketFolder(tmp_path / "here", 4 * 512, made())
    for number in range(9):
        here.write(name(number), block(number))
        here.flush()
    assert here.count()[0] < 9 and all(same(here, number) for number in range(9)) and here.count()[1] <= 4 * 512
    there = BucketFolder(tmp_path / "there", None, made())
    assert there.use([name(number) for number in (3, 4, 99, 5)]) == 2 and there.count()[0] == 2
    assert there.has(name(0)) and not there.has(name(99)) and same(there, 8)
    there.path(name(8)).write_bytes(b"damaged")
    assert same(there, 8)  # from the bucket
    there.bucket.put(there._key(name(7)), b"damaged")
    with pytest.raises(BlockMissing):
        there.read(name(7))
    assert there.bucket.get(there._key(name(7))) is None
    there.remove(name(8))
    with pytest.raises(BlockMissing):
        BucketFolder(tmp_path / "third", None, made()).read(name(8))


def test_what_a_killed_program_did_not_copy_is_copied_by_the_next(made: Made, tmp_path: Path) -> None:
    killed = BucketFolder(tmp_path / "here", None, made())
    super(BucketFolder, killed).write(name(1), block(1))
    later = BucketFolder(tmp_path / "here", None, made())
    later.write(name(2), block(2))
    later.flush()
    assert BucketFolder(tmp_path / "there", None, made()).use([name(1), name(2)]) == 2


def test_without_the_bucket_the_folder_goes_on(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = BucketFolder(tmp_path / "here", None, made())

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("no network")

    with monkeypatch.context() as patch:
        for operation in ("cat_file", "pipe_file", "find", "rm_file"):
            patch.setattr(folder.bucket._files, operation, fails)
        folder.write(name(1), block(1))
        folder.flush()
        assert same(folder, 1) and not folder.has(name(2)) and "does not answer (no network)" in caplog.text
        store = Store(tmp_path / "store", bucket=folder.bucket)
        with pytest.raises(SessionError, match="does not answer"):
            store.open("talk")
        with pytest.raises(SessionError, match="does not answer"):
            store.sessions()
    with store.open("talk") as reference, monkeypatch.context() as patch:
        patch.setattr(folder.bucket._files, "pipe_file", fails)
        with pytest.raises(SessionUnwritable, match="does not answer"):
            reference.commit({})
        assert reference.generation == 0
    assert module.PAUSE_S >= 1


def test_of_two_machines_that_continue_a_session_one_is_refused(made: Made, tmp_path: Path) -> None:
    here, there = (Store(tmp_path / place, bucket=made()) for place in ("here", "there"))
    with here.open("owner/talk") as one, there.open("owner/talk") as other:
        one.commit({"turn": 1})
        with pytest.raises(SessionBusy, match="was continued by another program"):
            other.commit({"turn": "another"})
        one.commit({"turn": 2})
        for turn in range(3, 5):
            one.commit({"turn": turn})
        with pytest.raises(SessionBusy):
            other.commit({"turn": "another"})  # its number is free again
    with there.open("owner/talk") as other:
        assert other.about == {"turn": 4} and other.generation == 4
        other.commit({"turn": 5})
    with here.read("owner/talk") as one:
        assert one.about == {"turn": 5}
    assert made().keys("sessions") == ["owner/talk.session/5.json"]
    new = there.set_aside("owner/talk")
    assert [info.name for info in here.sessions()] == [new] == [info.name for info in there.sessions()]
    here.remove(new)
    assert there.sessions() == [] and made().keys("sessions") == []
    with pytest.raises(SessionError, match="There is no session"):
        there.read(new)


def test_a_session_goes_on_on_another_machine_to_the_bit(made: Made, tmp_path: Path) -> None:
    model, ids = tiny("llama"), torch.arange(3, 603)[None] % 90
    here, there = (Store(tmp_path / place, bucket=made()) for place in ("here", "there"))
    for method in ("full", "kv-direct"):
        cache = KeepCache(model, method, budget=None if method == "full" else 64)
        with torch.no_grad():
            model(ids, cache=cache)
        with StoredSession(here, f"owner/{method}", writing=True) as session:
            session.save(Session(cache, ids.tolist()))
        here.blocks.flush()
        with StoredSession(there, f"owner/{method}", writing=True) as session:
            found = session.load(model)
        assert found.cache.get_seq_length() == 600
        with torch.no_grad():
            ours, theirs = (model(torch.tensor([[7]]), cache=one).logits for one in (cache, found.cache))
        assert torch.equal(ours, theirs), method


def test_a_bucket_that_is_none_is_refused() -> None:
    for url in ("odd://here", "nothing-known:x://y"):
        with pytest.raises(UsageError, match="is not a bucket that kvkeep knows"):
            Bucket(url)
