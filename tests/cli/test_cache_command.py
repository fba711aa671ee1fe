"""``kvkeep cache``, and what ``kvkeep chat`` leaves for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import kvkeep, started

from kvkeep.blocks import archive
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store
from kvkeep.errors import KvkeepError, SessionError

Run = Callable[..., tuple[int, str, str]]
LONG = " ".join(["the of and to in was it for"] * 40)
"""More than a block of tokens."""


@pytest.fixture
def folder(run: Run, model_folder: Path, tmp_path: Path) -> str:
    """A folder of sessions with one of two turns, "ann"."""
    common = ("chat", "-m", str(model_folder), "-n", "3", "--session", "ann", "--sessions", str(tmp_path / "sessions"))
    assert run(*common, "-b", "16", stdin=f"{LONG}\n")[0] == 0
    code, _, err = run(*common, stdin="was it\n")
    assert code == 0 and "2 messages" in err
    return str(tmp_path / "sessions")


def files(folder: str | Path) -> list[Path]:
    """The files of all blocks, in order of their names."""
    return sorted(Path(folder).rglob("*.block"))


def flip(path: Path, place: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    path.write_bytes(data)


def test_sessions_are_listed_shown_moved_and_removed(run: Run, folder: str, tmp_path: Path) -> None:
    def cache(*arguments: str, code: int = 0) -> str:
        got, out, err = run("cache", *arguments, "--sessions", folder)
        assert got == code, err
        assert not code or len(err.splitlines()) == 1, err
        return out if code == 0 else err

    file = tmp_path / "file"
    assert "kv-direct" in cache("list") and "tiny-llama" in cache("list"), "the model has its name"
    assert "ann.session" in "".join(cache("show", "ann").split())
    shown = json.loads(cache("show", "ann", "--json"))
    assert (shown["name"], shown["saves"], shown["method"], shown["budget"]) == ("ann", 2, "kv-direct", "16")
    size = sum(path.stat().st_size for path in files(folder))
    assert shown["tokens"] > 256 and shown["bytes"] == size and not shown["in_use"] and not shown["missing"]
    assert 0 <= shown["unused_s"] <= shown["age_s"] < 600
    exported = json.loads(cache("export", "ann", str(file), "--json"))
    assert exported == {"exported": "ann", "file": str(file), "missing": 0}
    assert file.stat().st_mode & 0o077 == 0 and "already" in cache("export", "ann", str(file), code=2)
    assert "no session at './none'" in run("cache", "show", "./none")[2]
    cache("import", str(file), "key/ben")
    whole = json.loads(cache("list", "--json"))
    assert sorted(one["name"] for one in whole["sessions"]) == ["ann", "key/ben"]
    assert (whole["blocks"], whole["bytes"], whole["quota"]) == (len(files(folder)), 2 * size, None)
    cache("delete", "ann")
    assert sum(path.stat().st_size for path in files(folder)) == size, "of the other owner"
    assert "no session 'ann'" in cache("show", "ann", code=1)
    assert "cannot be the name" in cache("delete", "../file", code=2)
    assert "no file" in cache("import", f"{file}2", "ben", code=1)
    assert "already" in cache("import", str(file), "key/ben", code=2)
    cache("delete", "key/ben")
    assert not files(folder)


def test_a_session_at_a_path(run: Run, folder: str, model_folder: Path, tmp_path: Path) -> None:
    file, path = str(tmp_path / "file"), str(tmp_path / "moved.session")
    assert run("cache", "export", "ann", file, "--sessions", folder)[0] == 0
    assert run("cache", "import", file, path)[0] == 0
    shown = json.loads(run("cache", "show", path, "--json")[1])
    assert (shown["name"], shown["saves"], shown["missing"]) == (path, 2, 0)
    assert run("cache", "export", path, f"{file}2")[0] == 0
    assert Path(file).read_bytes() == Path(f"{file}2").read_bytes()
    code, _, err = run("chat", "-m", str(model_folder), "-n", "3", "--session", path, stdin="by\n")
    assert code == 0 and f"Continuing with {shown['tokens']} tokens" in err


def test_an_import_that_fails_midway_leaves_nothing(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, target, calls, sync = tmp_path / "file", tmp_path / "target", list[int](), os.fsync
    archive.export(Store(folder), "ann", file)

    def stopped(handle: int) -> None:
        calls.append(1)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")
        sync(handle)

    for failing in range(1, 30):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", stopped)
            try:
                archive.add(file, Store(target), "ann")
            except SessionError as error:
                assert "no space left" in str(error)
                assert not files(target) and not Store(target).sessions()
            else:
                if len(calls) < failing:
                    break
                shutil.rmtree(target)
    assert failing > len(files(folder))
    with pytest.raises(KvkeepError, match="quota"):
        archive.add(file, Store(tmp_path / "small", quota=1000), "ann")
    assert not (tmp_path / "small").exists()


def test_the_folder_is_the_users_unless_one_is_named(
    run: Run, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_DATA", str(tmp_path))
    Path(folder).rename(tmp_path / "store")
    assert "ann" in run("cache")[1] and run("cache") == run("cache", "list")
    monkeypatch.delenv("KVKEEP_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "none"))
    empty = json.loads(run("cache", "list", "--json")[1])
    where = str(tmp_path / "none" / "kvkeep" / "store")
    assert empty.pop("beginnings") == {"tokens": 0, "bytes": 0}
    assert empty == {"sessions": [], "blocks": 0, "bytes": 0, "quota": 2 * 10**9, "folder": where}
    code, _, err = run("chat", "--sessions", folder)
    assert code == 2 and "--session NAME" in err


def test_two_chats_cannot_write_one_session(run: Run, model_folder: Path, tmp_path: Path) -> None:
    """Two processes: the second is refused before a model is loaded, the first goes on."""
    given, pipe = ["chat", "-m", str(model_folder), "-n", "3", "--session", str(tmp_path / "s")], subprocess.PIPE
    with started(kvkeep(*given), stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None and process.stderr is not None
        print("the of", file=process.stdin, flush=True)
        next(line for line in process.stderr if "exact: all" in line)
        code, out, err = run(*given, stdin="was it\n")
        assert (code, out, len(err.splitlines())) == (1, "", 1) and "in use by another program" in err
        process.communicate("and her\n", timeout=60)
        assert process.returncode == 0
    with StoredSession.at(tmp_path / "s") as session:
        assert session.saves == 2
    assert run(*given, stdin="was it\n")[0] == 0


def test_what_is_no_session_ends_with_a_sentence(run: Run, folder: str, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("not a session")
    for given in (str(tmp_path / "note"), "../../../../../../../../../etc/passwd"):
        code, out, err = run("cache", "show", given)
        assert code == 2 and not out and "is a file, not a folder of kvkeep" in err and len(err.splitlines()) == 1
    for command in ("list", "check"):
        code, _, err = run("cache", command, "--sessions", str(tmp_path / "missing"))
        assert code == 1 and "There is no folder" in err and len(err.splitlines()) == 1
        code, _, err = run("cache", command, "--sessions", str(tmp_path))
        assert code == 2 and "it holds other files" in err and len(err.splitlines()) == 1


def test_a_damaged_session_is_shown_and_the_exit_status_says_so(run: Run, folder: str) -> None:
    (file,) = (Path(folder) / "sessions" / "ann.session").glob("*.json")
    file.write_bytes(file.read_bytes()[:100])
    code, out, _ = run("cache", "show", "ann", "--sessions", folder)
    assert code == 1 and "problem" in out
    code, _, err = run("cache", "check", "--sessions", folder)
    assert code == 1 and "damaged" in err
    code, _, err = run("cache", "export", "ann", f"{folder}2", "--sessions", folder)
    assert code == 1 and "damaged" in err and not Path(f"{folder}2").exists()
    assert run("cache", "delete", "ann", "--sessions", folder)[0] == 0


def test_a_check_finds_and_removes_what_is_damaged(run: Run, folder: str, tmp_path: Path) -> None:
    code, _, err = run("cache", "check", "--sessions", folder)
    assert code == 0 and "are undamaged" in err
    damaged = max(files(folder), key=lambda path: path.stat().st_mtime_ns)
    flip(damaged)
    code, _, err = run("cache", "check", "--sessions", folder)
    assert code == 1 and str(damaged) in err and "lacks 1 block" in err and not damaged.exists()
    code, out, _ = run("cache", "check", "--sessions", folder, "--json")
    found = json.loads(out)
    assert code == 0 and (found["blocks"], found["incomplete"]) == (len(files(folder)), {"ann": 1})
    code, _, err = run("cache", "export", "ann", str(tmp_path / "file"), "--sessions", folder)
    assert code == 0 and "without 1 block" in err
    assert archive.add(tmp_path / "file", Store(tmp_path / "other"), "ann") == 1


def test_unused_blocks_are_deleted(run: Run, folder: str) -> None:
    count, (extra, *_) = len(files(folder)), files(folder)
    other = extra.parents[1] / "00" / f"{'0' * 32}.block"
    other.parent.mkdir()
    shutil.copy(extra, other)
    code, out, err = run("cache", "delete", "--unused", "--sessions", folder, "--json")
    assert code == 0 and json.loads(out)["blocks"] == 1, err
    assert not other.exists() and len(files(folder)) == count
    code, out, err = run("cache", "delete", "--sessions", folder)
    assert (code, out) == (2, "") and "Name the sessions to delete" in err


@pytest.mark.turns(2)
@pytest.mark.parametrize("damage", ["flipped", "pruned"])
@pytest.mark.parametrize("method", ["kv-direct", "h2o"])
def test_a_chat_without_its_blocks_reads_its_text_again(
    run: Run, model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, method: str
) -> None:
    """It keeps its messages, says why in one sentence, and an exact one answers as it would have."""
    common = ("chat", "-m", str(model_folder), "-n", "6", "--sessions", str(tmp_path / "s"))
    assert run(*common, "--session", "ann", "-x", method, "-b", "16", stdin=f"{LONG}\nwas it\n")[0] == 0
    good = shutil.copytree(tmp_path / "s", tmp_path / "good")
    whole = run(*common[:-1], str(good), "--session", "ann", stdin="by from\n/undo\nand her\n")[1]
    for path in files(tmp_path / "s"):
        flip(path) if damage == "flipped" else path.unlink()
    caplog.clear()
    code, out, err = run(*common, "--session", "ann", stdin="by from\n/undo\nand her\n")
    assert code == 0 and "Continuing with 0 tokens in the cache, 4 messages" in err
    (said,) = [record.getMessage() for record in caplog.records]
    assert "is read again: The block" in said
    if method == "kv-direct":
        assert out == whole
    assert json.loads(run("cache", "show", "ann", "--sessions", str(tmp_path / "s"), "--json")[1])["missing"] == 0
