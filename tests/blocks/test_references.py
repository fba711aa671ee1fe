"""A reference is whole or absent, has one writer, and a writer that another one followed is refused."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import exit_codes

from kvkeep import SessionError
from kvkeep.blocks.references import Reference, in_use, remove_folder
from kvkeep.errors import SessionBusy, SessionDamaged, SessionUnwritable


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def write(folder: Path, *turns: int, shared: bool = False) -> None:
    with Reference(folder, writing=True, shared=shared) as reference:
        for turn in turns:
            reference.commit({"turn": turn})


def content(folder: Path) -> Any:
    with Reference(folder) as reference:
        return reference.about


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


def test_a_second_writer_is_refused_and_readers_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with Reference(folder, writing=True) as writer:
        writer.commit({"turn": 1})
        with pytest.raises(SessionBusy, match="in use by another program"):
            Reference(folder, writing=True)
        assert exit_codes(lambda: sys.exit(not in_use(folder))) == [0]  # another process sees it
        assert content(folder) == {"turn": 1} and in_use(folder)
        writer.commit({"turn": 2})
    assert not in_use(folder) and content(folder) == {"turn": 2}


@pytest.mark.parametrize("saves", [0, 1])
@pytest.mark.parametrize("after", ["turn", "turns", "removal", "removal and turn", "removal and turns"])
def test_a_writer_that_another_one_followed_is_refused(tmp_path: Path, after: str, saves: int) -> None:
    """Where locks reach no further than a machine, the number of the generation does."""
    folder = tmp_path / "s"
    write(folder, 1)
    stale = Reference(folder, writing=True, shared=True)
    for number in range(saves):
        stale.commit({"turn": number})
    if "removal" in after:
        remove_folder(folder)
    if "turn" in after:
        write(folder, *range(10, 15 if after.endswith("turns") else 11), shared=True)
    if after == "removal and turn" and saves:
        write(folder, 11, shared=True)  # the same generation
    before = {path.name: path.read_bytes() for path in folder.glob("*")}
    with pytest.raises(SessionBusy, match="continued or removed by another program"):
        stale.commit({"turn": "stale"})
    stale.close()
    assert {path.name: path.read_bytes() for path in folder.glob("*")} == before
    assert folder.exists() == bool(before)


def test_a_first_save_with_a_later_number_does_not_replace_a_session_that_is_created_meanwhile(tmp_path: Path) -> None:
    """A fork or an import has the number of saves of its original."""
    fork = Reference(tmp_path / "s", writing=True, shared=True)
    write(tmp_path / "s", 1, shared=True)
    fork.saves = 4
    with pytest.raises(SessionBusy, match="continued or removed by another program"):
        fork.commit({"turn": "fork"})
    fork.discard()
    fork.close()
    assert content(tmp_path / "s") == {"turn": 1}


@pytest.mark.parametrize("shared", [True, False])
def test_a_file_system_without_links_serves_one_machine(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    if shared:
        with pytest.raises(SessionUnwritable, match="operation not permitted"):
            write(tmp_path / "s", 1, shared=True)
        assert not (tmp_path / "s").exists()
    else:
        write(tmp_path / "s", 1, 2)
        assert content(tmp_path / "s") == {"turn": 2}


def test_a_link_whose_answer_was_lost_is_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system asks again, and hears that the name exists."""
    link: Callable[..., None] = os.link

    def twice(*given: Any) -> None:
        link(*given)
        link(*given)

    monkeypatch.setattr(os, "link", twice)
    write(tmp_path / "s", 1, 2)
    assert content(tmp_path / "s") == {"turn": 2} and len(os.listdir(tmp_path / "s")) == 2


def test_a_folder_that_cannot_be_listed_is_no_new_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "s", 1, 2)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        for writing in (True, False):
            with pytest.raises(SessionError, match="cannot be read: input/output error"):
                Reference(tmp_path / "s", writing=writing)
    assert content(tmp_path / "s") == {"turn": 2}


def test_what_was_never_saved_leaves_nothing(tmp_path: Path) -> None:
    Reference(tmp_path / "a" / "s", writing=True).close()
    assert not (tmp_path / "a" / "s").exists()
    with pytest.raises(SessionError, match="There is no session"):
        Reference(tmp_path / "a" / "s")


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
    with Reference(tmp_path / "s", writing=True) as first:
        assert done and (tmp_path / "s" / "lock").exists()
        with pytest.raises(SessionBusy):
            Reference(tmp_path / "s", writing=True)
        first.commit({"turn": 1})
    assert content(tmp_path / "s") == {"turn": 1}


def test_a_save_that_finds_no_memory_as_it_is_compared_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Reference(tmp_path / "talk", writing=True) as reference:
        with monkeypatch.context() as patch:

            def failing(*_: object) -> bool:
                raise MemoryError

            patch.setattr(Reference, "_overtaken", failing)
            with pytest.raises(MemoryError):
                reference.commit({"turn": 1})
        reference.commit({"turn": 2})
    with Reference(tmp_path / "talk") as reference:
        assert reference.about == {"turn": 2}
