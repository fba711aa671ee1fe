"""``kvkeep chat``: what was said is on disk before anything else can happen to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tokenizer
from families import tiny
from forked import kvkeep, started

from kvkeep import Conversation, KeepCache, Session, save_session
from kvkeep.blocks.sessions import StoredSession
from kvkeep.blocks.store import Store, user_store
from kvkeep.cli.options import ModelOptions
from kvkeep.errors import StoreError

Run = Callable[..., tuple[int, str, str]]


def questions(session: Path) -> list[str]:
    talk = Conversation.resume(tiny("llama"), tokenizer(), session)
    return [message["content"] for message in talk.messages if message["role"] == "user"]


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("number", "when"), [("SIGHUP", "answering"), ("SIGTERM", "waiting"), ("SIGKILL", "answering")]
)
def test_a_signal_loses_nothing_that_was_said(model_folder: Path, tmp_path: Path, number: str, when: str) -> None:
    """A process of its own, whose questions come by a pipe; one of them with an interpreter of its own, and its end."""
    session, own = tmp_path / "session", getattr(signal, number)
    given = ["chat", "-m", str(model_folder), "-b", "16", "-n", "100", "--session", str(session)]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | {"text": True}
    command = [sys.executable, "-u", "-m", "kvkeep", *given]
    with subprocess.Popen(command, **pipes) if number == "SIGTERM" else started(kvkeep(*given), **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        print("the of and", file=process.stdin, flush=True)
        next(line for line in process.stderr if "16 tokens in memory" in line)
        if when == "answering":
            print("was it for", file=process.stdin, flush=True)
            assert process.stdout.readline() and process.stdout.read(2)  # the first answer, and of the second
        time.sleep(0.05)
        process.send_signal(own)
        errors = process.communicate(timeout=60)[1]
    expected = -own if number == "SIGKILL" else 128 + own
    assert process.returncode == expected and "Traceback" not in errors
    assert questions(session)[0] == "the of and"
    assert os.listdir(tmp_path) == ["session"]


def test_every_turn_is_saved_and_a_full_disk_ends_nothing(
    run: Run, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    save, sync = Conversation.save, os.fsync

    def counted(self: Conversation, path: str) -> None:
        saved.append(len(self.messages))
        save(self, path)

    def full(handle: int) -> None:
        if len(saved) == 1:
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(Conversation, "save", counted)
    monkeypatch.setattr(os, "fsync", full)
    session = tmp_path / "session"
    common = ("chat", "-m", str(model_folder), "-b", "16", "-n", "3", "--session", str(session))
    code, _, err = run(*common, stdin="the of\n")
    assert code == 1 and "no space left" in err and not session.exists()
    saved.clear()
    code, _, err = run(*common, stdin="the of\nwas it\n")
    assert code == 0 and saved == [2, 4] and err.count("cannot be written") == 1 and "Saved to" in err
    assert questions(session) == ["the of", "was it"]
    assert run(*common, stdin="and her\n")[0] == 0  # the same line another day
    code, _, err = run(*common, "-x", "h2o", stdin="by\n/method\n")
    assert code == 0 and "The session keeps its method" in err and "kv-direct within 16" in err


def test_a_session_is_a_name_in_the_users_store(
    run: Run, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ("chat", "-m", str(model_folder), "-n", "3")
    code, _, err = run(*common, "--session", "work/ann", stdin="the of\n")
    assert code == 0 and "Saved as 'work/ann'." in err and not os.listdir(tmp_path)
    code, _, err = run(*common, "--session", "work/ann", stdin="was it\n/save\n/save work/ann\n/save ben\nby\n")
    assert code == 0 and "2 messages" in err and err.count("Saved as 'work/ann', as after every answer.") == 2
    assert "Saved as 'ben', and again after every answer." in err and err.endswith("Saved as 'ben'.\n")
    for name, count in (("work/ann", 2), ("ben", 3)):
        with StoredSession(user_store(), name) as session:
            assert Conversation.resume(tiny("llama"), tokenizer(), session).turns == count
    code, _, err = run(*common, stdin="the of\n/save ben\n")
    assert code == 1 and "There is a session 'ben' already; give another name." in err


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("a/../b", "cannot be the name of a session"),
        ("./a\0b", "cannot have a NUL character"),
        ("a" * 300, "cannot be the name of a session"),
        ("./note/s", "is a file, not a folder"),
        ("./missing/s", "its folder is missing"),
        ("./other", "it holds other files"),
        ("./newer", "is of another version of kvkeep (2; this one reads 1)"),
        ("./readonly/s", "cannot be written to"),
        ("readonly: ann", "cannot be saved: permission denied"),
    ],
)
def test_a_name_that_cannot_be_saved_is_refused_before_the_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str
) -> None:
    for folder in ("other", "newer", "readonly"):
        (tmp_path / folder).mkdir()
    (tmp_path / "note").write_text("mine")
    (tmp_path / "other" / "note").write_text("mine")
    (tmp_path / "newer" / "kvkeep-store").write_text("2\n")
    (tmp_path / "file.session").write_bytes(b"what another program wrote")
    if "readonly" in name:
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        Store(tmp_path / "readonly").create()
        (tmp_path / "readonly").chmod(0o500)

    def load(self: ModelOptions) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(ModelOptions, "load", load)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    folder, _, word = name.rpartition(": ")
    code, out, err = run("chat", "--session", word, *(("--sessions", folder) if folder else ()), stdin="the of\n")
    assert code in (1, 2) and not out and sentence in " ".join(err.split()) and len(err.splitlines()) == 1, err
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_forgotten_is_forgotten_on_disk(run: Run, model_folder: Path, tmp_path: Path) -> None:
    session = tmp_path / "session"
    common = ("chat", "-m", str(model_folder), "-n", "3", "--session", str(session))
    assert run(*common, stdin="the of\n/reset\n")[0] == 0
    assert questions(session) == []
    code, _, err = run(*common, stdin="was it\n")
    assert code == 0 and "0 tokens in the cache, 0 messages" in err and questions(session) == ["was it"]


def test_a_pipe_tells_what_failed(run: Run, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the exit status and a sentence, and with no line on standard output; nothing commands the terminal."""
    answer = Conversation.answer

    def failing(self: Conversation, question: str, *given: Any, **options: Any) -> Any:
        if question == "by":
            raise StoreError("Checkpoints cannot be kept.")
        return answer(self, question, *given, **options)

    monkeypatch.setattr(Conversation, "answer", failing)
    common, typed = ("chat", "-m", str(model_folder), "-n", "3"), "the \u202eof\n/undo\nby\n/nope\n\udcff\n"
    code, out, err = run(*common, stdin=typed)
    assert code == 1 and len(out.splitlines()) == 1 and "Forgotten: the of\n" in err
    assert all(
        told in err for told in ("Checkpoints cannot be kept.", "Unknown command '/nope'", "The text of that line")
    )


def test_an_end_that_cannot_be_is_refused_in_a_sentence(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the method before the model is loaded, by the model before anything is said."""
    tiny("gpt2").save_pretrained(tmp_path / "gpt2")
    tokenizer().save_pretrained(tmp_path / "gpt2")
    common = ("chat", "-m", str(tmp_path / "gpt2"), "-b", "64")
    with monkeypatch.context() as patch:
        patch.delattr(ModelOptions, "load")
        code, out, err = run(*common, "-x", "h2o", "--at-end", "endless")
    assert (code, out) == (2, "") and "Traceback" not in err
    assert "Method 'h2o' does not keep every entry, so 'endless' could not recall the older ones" in err
    code, out, err = run(*common, "--at-end", "endless", stdin="the of\n")
    assert (code, out) == (1, "") and "Traceback" not in err and "their keys cannot be rotated" in err
    assert run(*common, "-n", "3", stdin="the of\n")[0] == 0, "by default it asks"


def test_a_session_that_cannot_be_saved_is_refused_before_anything_is_said(
    run: Run, model_folder: Path, tmp_path: Path
) -> None:
    common = ("chat", "-m", str(model_folder), "--session", str(tmp_path / "session"))
    code, out, err = run(*common, "-x", "stock", stdin="the of\n")
    sentence = "kvkeep: A session with transformers' own cache cannot be saved; use method 'full'.\n"
    assert (code, out, err) == (1, "", sentence)
    code, _, err = run("chat", "-m", str(model_folder), "-x", "stock", "-n", "3", stdin="the of\n/memory\n")
    assert code == 0 and "exact: all" in err and "resident" in err


@pytest.mark.parametrize("kind", ["without messages", "odd messages", "a batch"])
def test_a_session_that_is_no_conversation_is_one_sentence(
    run: Run, model_folder: Path, tmp_path: Path, kind: str
) -> None:
    model, rows = tiny("llama"), 2 if kind == "a batch" else 1
    cache, ids = KeepCache(model, "full"), torch.randint(2, 97, (rows, 7))
    with torch.no_grad():
        model(ids, cache=cache)
    notes = {"without messages": {}, "odd messages": {"messages": [{"role": 1}]}, "a batch": {"messages": []}}[kind]
    save_session(tmp_path / "s", Session(cache, ids.tolist(), notes))
    code, out, err = run("chat", "-m", str(model_folder), "--session", str(tmp_path / "s"), stdin="the of\n")
    assert code == 1 and out == "" and "conversation" in err and len(err.splitlines()) == 1
