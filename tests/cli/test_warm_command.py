"""``kvkeep warm``: a text is read once, whatever ends the reading, and a server begins with it, here or elsewhere."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answering import Client
from answering import run as steps
from conftest import WORDS
from running import BODY, KEYS

from kvkeep.blocks.store import Store
from kvkeep.engine.answer import Scheduler
from kvkeep.models.loading import load
from kvkeep.serve import warm
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.completions import ChatRequest
from kvkeep.serve.http.keys import digest_of, owner_of
from kvkeep.serve.http.protocol import encoded
from kvkeep.serve.session import Job

Run = Callable[..., tuple[int, str, str]]
SAID = " ".join(WORDS[(7 * number) % len(WORDS)] for number in range(900))
REQUEST = BODY | {"messages": [{"role": "system", "content": SAID}, {"role": "user", "content": "the river"}]}


@pytest.fixture
def command(run: Run, long_model_folder: Path, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """``kvkeep warm`` of the request, which a store in the folder "store" gets."""
    (tmp_path / "request.json").write_text(json.dumps(REQUEST))

    def call(*options: str, file: str = "request.json") -> tuple[int, str, str]:
        common = ("-m", str(long_model_folder), "-x", "full", "--sessions", str(tmp_path / "store"))
        return run("warm", str(tmp_path / file), *common, *options)

    return call


def first_cached(folder: Path, model: Path, owner: str = "local") -> tuple[int, int]:
    """Tokens of the request, and those of them that a new server does not read."""
    loaded = load(str(model))
    ids = encoded(ChatRequest.model_validate(REQUEST).given(), loaded.tokenizer, 10**6).ids
    engine = Engine(loaded, 10**9, store=Store(folder), method="full")
    client = Client(engine, ids, 1, owner=owner)
    steps(engine)
    engine.close()
    return len(ids), client.ended.cached


def test_a_server_begins_with_what_was_read_ahead(
    command: Run, long_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "PART", 300)  # of about a thousand tokens
    code, _, err = command()
    assert code == 0 and "tokens are stored in" in err and "were read at" in err, err
    tokens, cached = first_cached(tmp_path / "store", long_model_folder)
    assert tokens > 900 and cached == tokens - 1
    monkeypatch.setattr(Scheduler, "step", None)  # nothing is read
    code, _, err = command()
    assert code == 0 and "nothing had to be read" in err
    found = json.loads(command("--json")[1])
    assert (found["tokens"], found["read"]) == (tokens, 0) and found["bytes"] > 0


def test_ctrl_c_stores_what_was_read_and_the_same_command_reads_the_rest(
    command: Run, long_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkeep.engine.answer.CHUNK", 100)
    monkeypatch.setattr(warm, "POLL_S", 0.001)
    step, cancel, cancelled, seen = Scheduler.step, Job.cancel, threading.Event(), list[int]()

    def interrupting(self: Scheduler) -> Any:
        results = step(self)
        seen.append(1)
        if len(seen) == 6:
            os.kill(os.getpid(), signal.SIGINT)
            cancelled.wait(60)
        return results

    monkeypatch.setattr(Scheduler, "step", interrupting)
    monkeypatch.setattr(Job, "cancel", lambda self: (cancel(self), cancelled.set()))
    code, _, err = command()
    assert code == 130 and "tokens are stored, and the same command reads the rest" in err, err
    monkeypatch.setattr(Scheduler, "step", step)
    stored = int(err.partition("Interrupted; ")[2].split()[0].replace(",", ""))
    assert stored >= 256
    found = json.loads(command("--json")[1])
    assert found["read"] == found["tokens"] - stored


def test_what_cannot_be_read_ahead_is_one_sentence(command: Run, tmp_path: Path) -> None:
    for name, body, sentence in (
        ("a.json", "no json", "is not valid JSON"),
        ("b.json", "[1]", "has no 'messages', 'input' or 'prompt'"),
        ("c.json", json.dumps(REQUEST | {"temperature": "hot"}), "would refuse the request"),
        ("d.json", json.dumps(REQUEST | {"messages": [{"role": "x", "content": SAID}]}), "would refuse the request"),
        ("e.txt", SAID * 10, "and the model's context 2,048; shorten it"),
    ):
        (tmp_path / name).write_text(body)
        code, out, err = command(file=name)
        assert code in (1, 2) and sentence in err and not out and "Traceback" not in err, err
    assert "There is already something" in command("--export", str(tmp_path / "e.txt"))[2]
    assert "is not exact, so" in command("-x", "h2o", "-b", "64")[2]
    code, _, err = command("--quota", "200KB")
    assert code == 1 and "fit into the quota of 200.0 KB" in err


def test_one_key_owns_the_text(
    command: Run, long_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_API_KEYS", ",".join(KEYS))
    assert "There are 2 keys" in command()[2]
    monkeypatch.setenv("KVKEEP_API_KEYS", KEYS[0])
    assert command()[0] == 0
    tokens, cached = first_cached(tmp_path / "store", long_model_folder, owner_of(digest_of(KEYS[0])))
    assert cached == tokens - 1
    assert first_cached(tmp_path / "store", long_model_folder)[1] == 0


def test_an_exported_text_continues_elsewhere_and_counts(
    command: Run, run: Run, long_model_folder: Path, tmp_path: Path
) -> None:
    file, there = str(tmp_path / "file"), str(tmp_path / "there")
    assert command("--export", file)[0] == 0 and Path(file).stat().st_mode & 0o077 == 0
    code, out, err = run("cache", "import", file, "--sessions", there, "--json")
    assert code == 0 and json.loads(out)["missing"] == 0, err
    blocks = {path.relative_to(tmp_path / "store"): path.read_bytes() for path in (tmp_path / "store").rglob("*.block")}
    assert blocks == {name: Path(there, name).read_bytes() for name in blocks}
    tokens, cached = first_cached(Path(there), long_model_folder)
    assert cached == tokens - 1
    listed = json.loads(run("cache", "list", "--sessions", str(tmp_path / "store"), "--json")[1])
    assert listed["beginnings"] == {"tokens": tokens, "bytes": listed["bytes"]} and not listed["sessions"]
    assert f"Prompts can begin with {tokens:,} stored tokens" in run("cache", "list", "--sessions", there)[2]
    assert run("cache", "import", file, "other", "--sessions", there)[0] == 0
    assert first_cached(Path(there), long_model_folder, "other")[1] == tokens - 1


@pytest.mark.parametrize("place", [3, 20, 2000, -5])
def test_a_file_that_has_changed_leaves_nothing(command: Run, run: Run, tmp_path: Path, place: int) -> None:
    file, there = tmp_path / "file", tmp_path / "there"
    assert command("--export", str(file))[0] == 0
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    code, _, err = run("cache", "import", str(file), "--sessions", str(there))
    assert code and len(err.splitlines()) == 1 and not [*there.rglob("*.block")]
