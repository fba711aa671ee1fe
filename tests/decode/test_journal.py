"""The journal keeps the last turn whatever happens to the process, notices any damage, and has one writer."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvkeep.decode.journal import Journal, Writer, digest_of, open_for_writing

from kvkeep import SessionError
from kvkeep.decode import journal

Turn = list[bytes]  # pages, the last of which is the turn's own payload


def write(path: Path, *turns: Turn) -> list[int]:
    """Write turns, by a writer each; return where each ends."""
    ends = []
    for *pages, payload in turns:
        with Writer(path) as writer:
            for page in pages:
                writer.add([page], digest_of([page]))
            writer.commit(payload)
            ends.append(writer.end)
    return ends


def content(path: Path) -> tuple[list[bytes], list[bytes]]:
    with Journal(path) as read:
        return read.turns, [read.page(place) for place in read.pages]


@pytest.fixture
def _no_sync() -> Iterator[None]:
    """What a disk keeps is not what this is about, and costs a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.mark.usefixtures("_no_sync")
@settings(max_examples=6, deadline=None)
@given(turns=st.lists(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4), min_size=1, max_size=4))
def test_cut_at_any_byte_the_last_turn_comes_back(turns: list[Turn], tmp_path_factory: pytest.TempPathFactory) -> None:
    """The files that a kill can leave: the first bytes of what would have been written."""
    path = tmp_path_factory.mktemp("j") / "whole"
    ends, whole, cut = write(path, *turns), path.read_bytes(), path.with_name("cut")
    for size in range(len(whole) + 1):
        cut.write_bytes(whole[:size])
        known = sum(end <= size for end in ends)
        pages = list(dict.fromkeys(page for *own, _ in turns[:known] for page in own))
        assert content(cut) == ([own[-1] for own in turns[:known]], pages)
        if size % 31 == 0 or size in ends:  # and goes on from there, as if nothing had been behind it
            write(cut, [b"new", b"next"])
            assert content(cut)[0] == [*(own[-1] for own in turns[:known]), b"next"]


def test_a_flipped_bit_of_any_byte_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "j", [b"a" * 30, b"one"], [b"b" * 30, b"c", b"two"])
    whole = (tmp_path / "j").read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        (tmp_path / "s").write_bytes(data)
        with pytest.raises(SessionError):
            content(tmp_path / "s")


def test_room_without_bytes_after_a_power_cut_is_no_damage(tmp_path: Path) -> None:
    write(tmp_path / "j", [b"a", b"one"])
    with open(tmp_path / "j", "ab") as file:
        file.write(bytes(5000))
    assert content(tmp_path / "j") == ([b"one"], [b"a"])


def test_a_second_writer_is_refused_and_readers_are_not(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Writer(path) as writer:
        writer.commit(b"one")
        with pytest.raises(SessionError, match="in use by another program"):
            Writer(path)
        code = "import sys; from kvkeep.decode.journal import Writer; Writer(sys.argv[1])"
        other = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
        assert other.returncode == 1 and "in use by another program" in other.stderr
        assert content(path)[0] == [b"one"] and open_for_writing(path)
        writer.commit(b"two")
    assert not open_for_writing(path) and content(path)[0] == [b"one", b"two"]


@pytest.mark.parametrize("saves", [0, 1])
@pytest.mark.parametrize("after", ["lease", "turn", "rewrite", "removal"])
def test_a_writer_that_another_one_followed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str, saves: int
) -> None:
    """Where locks reach no further than a machine, the lease does."""
    monkeypatch.setattr(journal, "lock", lambda file, shared=False: None)
    path = tmp_path / "j"
    write(path, [b"a", b"one"])
    stale = Writer(path)
    for _ in range(saves):
        stale.commit(b"stale, before")
    with Writer(path) as new:
        if after == "rewrite":
            new.rewrite(lambda fresh: fresh.commit(b"new"))
        elif after == "removal":
            new.remove()
        elif after == "turn":
            new.commit(b"new")
        before = path.read_bytes() if path.exists() else None
        with pytest.raises(SessionError, match="taken over by another program"):
            stale.add([b"b"], digest_of([b"b"]))
        with pytest.raises(SessionError, match="taken over by another program"):
            stale.commit(b"stale")
        stale.undo()
        stale.close()
        assert (path.read_bytes() if path.exists() else None) == before
        if after != "removal":
            new.commit(b"newest")
            assert b"stale" not in content(path)[0] and content(path)[0][-1] == b"newest"


def test_a_turn_of_an_older_lease_is_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the stale writer write between another's lease and its own check of it."""
    monkeypatch.setattr(journal, "lock", lambda file, shared=False: None)
    write(tmp_path / "j", [b"one"])
    stale = Writer(tmp_path / "j")
    stale.commit(b"two")
    new = Writer(tmp_path / "j")
    monkeypatch.setattr(Writer, "_check_lease", lambda self, **_: None)
    stale._place = new._place
    stale.commit(b"stale")
    assert content(tmp_path / "j")[0] == [b"one", b"two"]


@pytest.mark.parametrize("fails", [1, 2])
def test_a_turn_that_failed_leaves_nothing_and_the_next_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    with Writer(tmp_path / "j") as writer:
        writer.add([b"a"], digest_of([b"a"]))
        writer.commit(b"one")
        before, sync, count = (tmp_path / "j").read_bytes(), os.fsync, iter(range(1, 9))

        def full(handle: int) -> None:
            if next(count) == fails:
                raise OSError(28, "No space left on device")
            sync(handle)

        monkeypatch.setattr(os, "fsync", full)
        writer.add([b"b"], digest_of([b"b"]))
        with pytest.raises(OSError, match="No space"):
            writer.commit(b"two")
        writer.undo()
        assert (tmp_path / "j").read_bytes() == before
        writer.add([b"b"], digest_of([b"b"]))
        writer.commit(b"two")
    assert content(tmp_path / "j") == ([b"one", b"two"], [b"a", b"b"])


def test_a_file_that_is_rewritten_stays_locked_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, [b"a" * 1000, b"one"])
    path.chmod(0o640)
    with Writer(path) as writer:
        lease = writer.lease
        writer.rewrite(lambda fresh: fresh.commit(b"rewritten"))
        assert writer.lease > lease and path.stat().st_mode & 0o777 == 0o640 and path.stat().st_size < 200
        with pytest.raises(SessionError, match="in use"):
            Writer(path)
        writer.commit(b"next")
        with pytest.raises(ZeroDivisionError):
            writer.rewrite(lambda fresh: fresh.commit(b"%d" % (1 // 0)))
        writer.commit(b"last")
    assert content(path)[0] == [b"rewritten", b"next", b"last"] and os.listdir(tmp_path) == ["j"]


def test_what_was_never_saved_leaves_no_file(tmp_path: Path) -> None:
    Writer(tmp_path / "j").close()
    assert not (tmp_path / "j").exists()
    (tmp_path / "other").write_text("what another program wrote")
    with pytest.raises(SessionError, match="not a session"):
        Writer(tmp_path / "other")
    assert (tmp_path / "other").read_text() == "what another program wrote"


def test_bytes_of_anything_are_one_sentence_or_a_journal(tmp_path: Path) -> None:
    draw = random.Random(1)
    write(tmp_path / "j", [b"page", b"one"], [b"two"])
    whole = (tmp_path / "j").read_bytes()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(data))
            data[at : at + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
        (tmp_path / "s").write_bytes(data)
        try:
            turns, _ = content(tmp_path / "s")
        except SessionError as error:
            assert len(str(error).splitlines()) == 1
        else:
            assert turns in ([], [b"one"], [b"one", b"two"])
