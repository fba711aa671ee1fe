"""A reference is whole or absent, and has one writer."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvkeep import SessionError
from kvkeep.blocks.references import Reference, SessionFiles, encode
from kvkeep.errors import SessionBusy, SessionDamaged


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def reference(folder: Path, *, writing: bool = False) -> Reference:
    return Reference(SessionFiles(folder), writing=writing)


def write(folder: Path, *turns: int) -> None:
    with reference(folder, writing=True) as writer:
        for turn in turns:
            writer.commit({"turn": turn})


def content(folder: Path) -> Any:
    return reference(folder).about


def test_a_flipped_bit_of_any_byte_is_noticed_and_so_is_any_length(tmp_path: Path) -> None:
    write(tmp_path / "s", 1, 2)
    [path] = (tmp_path / "s").glob("*.json")
    whole, draw = path.read_bytes(), random.Random(1)
    damaged = [whole[:place] + bytes([byte ^ 1 << place % 8]) + whole[place + 1 :] for place, byte in enumerate(whole)]
    damaged += [whole[:place] for place in range(len(whole))] + [whole + b"x", whole + whole]
    for _ in range(100):
        place = draw.randrange(len(whole))
        damaged.append(whole[:place] + draw.randbytes(draw.randrange(9)) + whole[place + draw.randrange(9) :])
    for data in damaged:
        path.write_bytes(data)
        if data != whole:
            with pytest.raises(SessionDamaged) as refused:
                content(tmp_path / "s")
            assert len(str(refused.value).splitlines()) == 1


def test_the_file_of_another_session_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "me" / "a", 1)
    write(tmp_path / "me" / "b", 2)
    write(tmp_path / "you" / "a", 3)
    for other in ("me/b", "you/a"):
        shutil.copy(tmp_path / other / "1.json", tmp_path / "me" / "a")
        with pytest.raises(SessionDamaged):
            content(tmp_path / "me" / "a")
    shutil.move(tmp_path / "you", tmp_path / "elsewhere" / "you")  # with its store
    assert content(tmp_path / "elsewhere" / "you" / "a") == {"turn": 3}


def test_a_file_system_without_links_has_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    write(tmp_path / "s", 1, 2)
    assert content(tmp_path / "s") == {"turn": 2}


def test_what_another_program_has_saved_in_spite_of_the_lock_counts(tmp_path: Path) -> None:
    """Where the file system has no locks, or somebody has copied a session into its folder."""
    with reference(tmp_path / "s", writing=True) as writer:
        writer.commit({"turn": 1})
        data = encode({"turn": "another", "folder": "/".join((tmp_path / "s").parts[-2:])})
        (tmp_path / "s" / "2.json").write_bytes(data)
        with pytest.raises(SessionBusy, match="was continued by another program"):
            writer.renew()
    assert content(tmp_path / "s") == {"turn": "another"}


def test_what_was_never_saved_leaves_nothing(tmp_path: Path) -> None:
    reference(tmp_path / "a" / "s", writing=True).close()
    assert not (tmp_path / "a" / "s").exists()
    with pytest.raises(SessionError, match="There is no session"):
        reference(tmp_path / "a" / "s")


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program opened the session and closed it without a save while this one opened it."""
    opened, done = os.open, list[Path]()

    def and_removed(path: Any, *given: Any) -> int:
        handle = opened(path, *given)
        if Path(path).name == "lock" and not done:
            done.append(Path(path))
            os.unlink(path)
            os.rmdir(Path(path).parent)
        return handle

    monkeypatch.setattr(os, "open", and_removed)
    with reference(tmp_path / "s", writing=True) as first:
        assert done and (tmp_path / "s" / "lock").exists()
        with pytest.raises(SessionBusy):
            reference(tmp_path / "s", writing=True)
        first.commit({"turn": 1})
    assert content(tmp_path / "s") == {"turn": 1}
