"""What another version of kvkeep has saved is refused or missed by one sentence, and stays as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from storing import TURNS, check_whole, files, kept, model, session, store_text
from typer.testing import CliRunner

from kvkeep import SessionError, UsageError, save_session
from kvkeep.blocks import archive
from kvkeep.blocks.references import decode, encode
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import MARKER, Store
from kvkeep.blocks.verify import verify
from kvkeep.cli.cache import app
from kvkeep.errors import SessionUnwritable, SessionVersion

pytestmark = pytest.mark.usefixtures("kernels")
NAME = "me/talk"
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a new field": lambda about: about.update(speed=1),
    "an old field": lambda about: about.update(layers=[{"kind": "full"}]),
    "no chunk": lambda about: about.pop("chunk"),
    "no folder": lambda about: about.pop("folder"),
    "other fields": lambda about: (about.clear(), about.update(version=7, blocks=["0" * 32])),
}


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in files(folder) if path.name not in ("lock", "bytes")}


def change(store: Store, what: str) -> None:
    """Make the reference of a session one of another version."""
    [path] = store.path(NAME).glob("*.json")
    data, _ = decode(path.read_bytes())
    CHANGES[what](data)
    path.write_bytes(encode(data))


@pytest.mark.parametrize("version", ["0", "2", "1.5", "x" * 500, ""])
def test_a_store_of_another_version_is_refused_also_under_a_program(version: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store_text(store, NAME, "h2o", TURNS[0])
    with StoredSession(store, NAME, writing=True) as stored:
        (tmp_path / MARKER).unlink()
        (tmp_path / MARKER).write_text(f"{version}\n")
        before = content(tmp_path)
        with pytest.raises(SessionUnwritable, match="is of another version of kvkeep"):
            stored.save(session(kept("h2o"), length=TURNS[1]))
        for work in (Store(tmp_path).create, Store(tmp_path).evict, lambda: verify(Store(tmp_path))):
            with pytest.raises(UsageError, match="is of another version of kvkeep") as refused:
                work()
            assert len(str(refused.value).splitlines()) == 1
        with pytest.raises(SessionUnwritable):
            store.evict()
        assert content(tmp_path) == before
        (tmp_path / MARKER).write_text("1\n")
        stored.save(session(kept("h2o"), length=TURNS[1]))
    assert check_whole(Store(tmp_path), NAME, "h2o") == TURNS[1]


@pytest.mark.parametrize("what", CHANGES)
def test_a_session_of_another_version_is_refused_and_stays(what: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store_text(store, NAME, "h2o")
    [reference] = store.path(NAME).glob("*.json")
    own = reference.read_bytes()
    change(store, what)
    before = content(store.folder)
    works: tuple[Callable[[], object], ...] = (
        lambda: check_whole(store, NAME, "h2o"),
        lambda: store_text(store, NAME, "h2o"),
        lambda: archive.export(store, NAME, tmp_path / "talk.tar"),
        lambda: store.open(NAME).close() or StoredSession(store, NAME, writing=True).request(model()),
    )
    for work in works:
        with pytest.raises(SessionVersion, match="another version of kvkeep") as refused:
            work()
        assert len(str(refused.value).splitlines()) == 1
    found = verify(store)
    assert not found.damaged and len(found.other_version) == 1 and "another version" in found.other_version[0]
    listed = CliRunner().invoke(app, ["list", "--sessions", str(store.folder)])
    assert listed.exit_code == 0 and "of another version" in listed.output
    assert CliRunner().invoke(app, ["check", "--sessions", str(store.folder)]).exit_code == 0
    store.evict()
    assert content(store.folder) == before and [info.name for info in store.sessions()] == [NAME]
    reference.write_bytes(own)  # the other version
    assert check_whole(store, NAME, "h2o") == TURNS[1]


def test_a_session_at_a_path_is_not_overwritten(tmp_path: Path) -> None:
    save_session(tmp_path / "s", session(kept("h2o")))
    [path] = (tmp_path / "s").rglob("*.json")
    data, _ = decode(path.read_bytes())
    path.write_bytes(encode(data | {"new": 1}))
    before = content(tmp_path)
    with pytest.raises(SessionVersion, match="cannot be saved: it was saved by another version"):
        save_session(tmp_path / "s", session(kept("h2o")))
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["full", "h2o"])
def test_blocks_of_another_version_are_missed_and_stay(name: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store_text(store, NAME, name)
    paths = [path for path in files(tmp_path) if path.suffix == ".block"]
    for path in paths:
        path.write_bytes(b"kvblock2" + path.read_bytes()[8:])
    before = content(tmp_path)
    with StoredSession(store, NAME) as stored:
        assert stored.load(model(), "tokenizer").cache.get_seq_length() == 0
    found = verify(store)
    assert not found.damaged and not found.blocks and len(found.other_version) == len(paths)
    assert "Another version of kvkeep has written it (kvblock2)." in found.other_version[0]
    assert content(tmp_path) == before
    for path in paths:
        path.write_bytes(b"kvblock3" + path.read_bytes()[8:])
    assert check_whole(Store(tmp_path), NAME, name) == TURNS[1]


def test_an_archive_of_another_version_is_a_sentence(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store_text(store, NAME, "h2o")
    assert archive.export(store, NAME, tmp_path / "talk.tar") == 0
    data = (tmp_path / "talk.tar").read_bytes()
    text = data[archive.HEAD.size : data.index(b"\n")].replace(b'"chunk":', b'"chink":')
    head = encode(json.loads(text))
    other = archive.HEAD.pack(archive.MAGIC, len(head)) + head + data[data.index(b"\n") + 33 : -32]
    for changed in (b"kvsess99" + data[8:], other + blake2b(other, digest_size=32).digest()):
        (tmp_path / "talk.tar").write_bytes(changed)
        with pytest.raises(SessionError, match="cannot be imported: it (is of|was saved by) another version of kvkeep"):
            archive.add(tmp_path / "talk.tar", store, "me/again")
