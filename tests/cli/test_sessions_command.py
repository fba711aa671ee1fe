"""``kvkeep sessions``, and what ``kvkeep chat`` leaves for it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import kvkeep, started
from kvkeep.decode.journal import Journal

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(run: Run, model_folder: Path, tmp_path: Path) -> str:
    """A folder of sessions with one of two turns, "ann"."""
    common = ("chat", "-m", str(model_folder), "-n", "3", "--session", "ann", "--sessions", str(tmp_path / "sessions"))
    assert run(*common, "-b", "16", stdin="the of\n")[0] == 0
    code, _, err = run(*common, stdin="was it\n")
    assert code == 0 and "2 messages" in err
    return str(tmp_path / "sessions")


def test_they_are_listed_shown_moved_and_removed(run: Run, folder: str, tmp_path: Path) -> None:
    def sessions(*arguments: str, code: int = 0) -> str:
        got, out, err = run("sessions", *arguments, "--sessions", folder)
        assert got == code, err
        return out if code == 0 else err

    file = str(tmp_path / "file")
    assert "ann" in sessions("list") and "kv-direct" in sessions("list")
    assert "ann.session" in sessions("show", "ann")
    shown = json.loads(sessions("show", "ann", "--json"))
    assert (shown["name"], shown["turns"], shown["method"], shown["budget"]) == ("ann", 2, "kv-direct", "16")
    assert shown["tokens"] > 6 and shown["bytes"] == Path(shown["path"]).stat().st_size and not shown["held"]
    assert 0 <= shown["unused_s"] <= shown["age_s"] < 600
    assert json.loads(sessions("export", "ann", file, "--json")) == {"exported": "ann", "file": file}
    assert json.loads(sessions("show", file, "--json"))["turns"] == 2, "a file of its own"
    assert "no session at './none'" in sessions("show", "./none", code=1)
    sessions("import", file, "key/ben")
    names = [one["name"] for one in json.loads(sessions("list", "--json"))["sessions"]]
    assert sorted(names) == ["ann", "key/ben"]
    only = json.loads(sessions("list", "--owner", "key", "--json"))["sessions"]
    assert [(one["name"], one["turns"], one["tokens"]) for one in only] == [("key/ben", 2, shown["tokens"])]
    sessions("rm", "ann")
    assert "no session 'ann'" in sessions("show", "ann", code=1)
    assert "cannot be the name" in sessions("rm", "../file", code=2)
    assert "no such file" in sessions("import", file + "2", "ben", code=1)
    assert "already" in sessions("import", file, "key/ben", code=1)


def test_the_folder_is_the_users_unless_one_is_named(
    run: Run, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_DATA", str(tmp_path))
    assert "ann" in run("sessions", "list")[1]
    monkeypatch.delenv("KVKEEP_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "none"))
    assert json.loads(run("sessions", "list", "--json")[1]) == {"sessions": []}
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
    with Journal(tmp_path / "s") as journal:
        assert len(journal.turns) == 2
    assert run(*given, stdin="was it\n")[0] == 0


def test_what_is_no_session_ends_with_a_sentence(run: Run, folder: str, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("not a session")
    for given in (str(tmp_path / "note"), "../../../../../../../../../etc/passwd"):
        code, out, err = run("sessions", "show", given, "--sessions", folder)
        assert code == 1 and not out and "is not a session of kvkeep" in err
    code, _, err = run("sessions", "list", "--sessions", str(tmp_path / "missing"))
    assert code == 1 and "There is no folder" in err


def test_a_damaged_session_is_shown_and_the_exit_status_says_so(run: Run, folder: str) -> None:
    file = Path(folder) / "ann.session"
    file.write_bytes(file.read_bytes()[:100])
    code, out, _ = run("sessions", "show", "ann", "--sessions", folder)
    assert code == 1 and "problem" in out
