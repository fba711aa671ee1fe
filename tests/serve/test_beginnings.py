"""Any client's conversation outlives the server: its beginning is stored, and found by its text, within one owner."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from answering import NEW, Client, alone, run, small, text
from conftest import WORDS, saved, tokenizer
from families import tiny
from running import KEYS, Program, program, within

import kvkeep
from kvkeep import KeepCache
from kvkeep.blocks import beginnings
from kvkeep.blocks.folder import BlockFolder
from kvkeep.blocks.store import Store
from kvkeep.errors import StoreError
from kvkeep.serve.engine import Engine

FULL: dict[str, Any] = {"method": "full"}
LONG = text(300, 1)


def serving(folder: Path, positions: int | None = None, **store: Any) -> Engine:
    return Engine(small(positions=positions), 10**9, store=Store(folder, **store), **FULL)


def told(engine: Engine, ids: list[int], owner: str = "me", **options: Any) -> Client:
    client = Client(engine, ids, owner=owner, **options)
    run(engine)
    return client


def test_a_conversation_without_a_name_goes_on_after_a_restart(tmp_path: Path) -> None:
    engine = serving(tmp_path)
    one = told(engine, LONG)
    engine.close()
    ids = [*LONG, *one.ended.tokens, 3, 4, 5]
    for cached in (len(ids) - 4, len(ids) - 1):  # the second time, all of the prompt was read before
        engine = serving(tmp_path)
        two = told(engine, ids)
        assert two.ended.cached == cached and [*two.ended.tokens] == alone("llama", ids, **FULL)
        engine.close()


def test_storing_ends_when_the_server_has_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, begun = serving(tmp_path, 1024), threading.Event()
    honest = BlockFolder.write

    def waiting(self: BlockFolder, *arguments: Any, **options: Any) -> int:
        begun.set()
        for _ in range(500):
            if engine.sessions.beginnings.ending:
                break
            time.sleep(0.01)
        return honest(self, *arguments, **options)

    monkeypatch.setattr(BlockFolder, "write", waiting)
    client = Client(engine, text(500, 1), 300, owner="me")  # three blocks
    engine.start()
    assert begun.wait(60)
    engine.stop(grace=0)
    assert client.ended.written == 300 and engine.fault is None
    assert Store(tmp_path).blocks.count()[0] == 1


def test_nothing_of_another_owner_is_used_or_touched(tmp_path: Path) -> None:
    engine = serving(tmp_path)
    told(engine, LONG, "me")
    used = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.block")}
    other = told(engine, LONG, "you")
    assert other.ended.cached == 0 and used
    assert used == {path: path.stat().st_mtime_ns for path in (tmp_path / "blocks" / "me").rglob("*.block")}
    engine.close()
    engine = serving(tmp_path)
    assert told(engine, LONG, "they").ended.cached == told(engine, LONG, "").ended.cached == 0
    engine.close()


def test_the_client_has_its_answer_before_anything_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever continues the conversation meanwhile waits for one block at most, and reads nothing again."""
    engine, gate, write = serving(tmp_path), threading.Event(), BlockFolder.write

    def slow(*given: Any, **own: Any) -> int:
        assert gate.wait(30)
        return write(*given, **own)

    monkeypatch.setattr(BlockFolder, "write", slow)
    one = Client(engine, LONG, owner="me")
    while not one.done:
        engine.step()
    (session,) = engine.sessions.memory.values()
    assert session.busy and not [*tmp_path.rglob("*.block")]
    ids = [*LONG, *one.ended.tokens, 3]
    two = Client(engine, ids, owner="me")
    threading.Timer(0.1, gate.set).start()
    run(engine)
    assert two.ended.read == 2 and [*two.ended.tokens] == alone("llama", ids, **FULL)
    assert len([*tmp_path.rglob("*.block")]) == 2  # a block and a tail, by the second turn
    engine.close()


@pytest.mark.parametrize("family", ["gemma3", "lfm2", "qwen3_next"])
def test_with_windows_or_recurrent_states_a_prompt_begins_at_a_blocks_end(family: str, tmp_path: Path) -> None:
    ids = text(600, 1)
    other = [*ids[:530], *text(20, 2)]
    for kind in (FULL, {"method": "kv-direct", "budget": 64, "chunk": 64, "checkpoint": "kv"}):
        for folder, prompt, cached in (("one", other, 512), ("two", [*ids, 5, 6], 600)):
            for turn in (ids, prompt):
                engine = Engine(small(family, 2048), 10**9, store=Store(tmp_path / kind["method"] / folder), **kind)
                client = told(engine, turn, most=1)
                engine.close()
            assert client.ended.cached == cached
            cache = KeepCache(tiny(family, positions=2048), **kind)
            wanted = kvkeep.generate(tiny(family, positions=2048), tokenizer(), prompt, cache, max_new_tokens=1)
            assert [*client.ended.tokens] == wanted.tokens


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", ["gemma3", "lfm2", "qwen3_next"])
@pytest.mark.parametrize("place", ["memory", "memory and store", "store"])
def test_an_answer_that_comes_back_in_another_form_costs_no_message_before_it(
    family: str, place: str, tmp_path: Path
) -> None:
    """As with templates that drop the reasoning of an answer. Windows and states are kept at the message's end."""

    def started() -> Engine:
        engine = Engine(small(family, 2048), 10**9, store=None if place == "memory" else Store(tmp_path), **FULL)
        engine.ends = [end]
        return engine

    end = 3
    engine = started()
    read, known = [*text(300, 1), end], 0
    for turn in range(3):
        if place == "store":
            engine.close()
            engine = started()
        client = told(engine, [*read, 5, 6, 7], most=20)
        assert client.ended.cached == known
        known = len(read)
        read += [5, 6, *text(7, 10 + turn), *text(30, 20 + turn), end]
    prompt = [*read, 5, 6, 7]
    cache = KeepCache(tiny(family, positions=2048), **FULL)
    wanted = kvkeep.generate(tiny(family, positions=2048), tokenizer(), prompt, cache, max_new_tokens=9)
    if place == "store":
        engine.close()
        engine = started()
    client = told(engine, prompt, most=9)
    count = len(client.ended.tokens)  # it may have ended
    assert client.ended.cached == known and [*client.ended.tokens] == wanted.tokens[:count]
    engine.close()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "swap"])
def test_damaged_blocks_are_read_again(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = serving(tmp_path)
    told(engine, LONG)
    engine.close()
    block, tail = sorted(tmp_path.rglob("*.block"), key=lambda path: -path.stat().st_size)
    if damage == "flip":
        data = bytearray(block.read_bytes())
        data[len(data) // 2] ^= 1
        block.write_bytes(data)
    elif damage == "truncate":
        block.write_bytes(block.read_bytes()[:-1])
    elif damage == "remove":
        block.unlink()
    else:
        first, second = block.read_bytes(), tail.read_bytes()
        block.write_bytes(second)
        tail.write_bytes(first)
    engine = serving(tmp_path)
    client = told(engine, LONG)
    assert client.ended.cached == 0 and [*client.ended.tokens] == alone("llama", LONG, **FULL)
    assert damage == "remove" or "is read from token 0 on" in caplog.text
    engine.close()


def test_a_disk_that_fails_costs_the_cache_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it is full or cannot be read; afterwards it is used again."""
    engine = serving(tmp_path)

    def failing(*given: Any, **own: Any) -> Any:
        raise StoreError("'x' cannot be written: no space left on device.")

    with monkeypatch.context() as patch:
        patch.setattr(BlockFolder, "write", failing)
        one = told(engine, LONG)
        told(engine, text(300, 2))
        assert caplog.text.count("no space left") == 1  # said once
        patch.setattr(beginnings, "find", lambda *given: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        engine.close()
        engine = serving(tmp_path)
        assert told(engine, LONG).ended.tokens == one.ended.tokens
        engine.close()
    engine = serving(tmp_path)
    told(engine, LONG)
    engine.close()
    engine = serving(tmp_path)
    assert told(engine, LONG).ended.cached == len(LONG) - 1
    engine.close()


@pytest.mark.slow
def test_after_a_kill_the_next_turn_of_any_client_skips_the_prefill(tmp_path: Path) -> None:
    model = saved(tiny("llama", positions=8192), tmp_path / "model")
    options = ["--model", str(model), "--memory", "200MB", "-x", "full"]
    said = [" ".join(WORDS[(number * step) % len(WORDS)] for number in range(1300)) for step in (3, 5, 7)]
    messages: list[Any] = [
        {"role": "user", "content": said[0]},
        {"role": "assistant", "content": said[1]},
        {"role": "user", "content": said[2]},
    ]

    def asked(running: Program, given: list[Any], key: str = KEYS[0]) -> tuple[str, Any]:
        client = openai.OpenAI(base_url=f"{running.address}/v1", api_key=key, max_retries=0)
        found = client.chat.completions.create(model=running.model, messages=given, max_tokens=NEW, temperature=0)
        assert found.usage is not None and found.usage.prompt_tokens_details is not None
        return str(found.choices[0].message.content), found.usage

    turn: list[Any] = []
    answers = []
    for private in (True, False):
        store = ["--private"] if private else ["--sessions", str(tmp_path / "store")]
        with program(*options, *store, fork=True) as running:
            content, usage = asked(running, messages)
            assert 3900 <= usage.prompt_tokens < 4096 and usage.prompt_tokens_details.cached_tokens == 0
            turn = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": "the river"}]
            if private:
                answers.append(asked(running, turn)[0])  # without a restart
                assert "in memory only" in running.said() and not (tmp_path / "store").exists()
            else:
                assert f"stored in {tmp_path / 'store'}, at most 2.0 GB" in running.said()
                assert within(20, lambda: len([*tmp_path.rglob("*.block")]) > 3900 // 256)
                running.process.kill()
    with program(*options, "--sessions", str(tmp_path / "store"), fork=True) as running:
        content, other = asked(running, turn, KEYS[1])
        assert other.prompt_tokens_details.cached_tokens == 0  # of another key
        mine, usage = asked(running, turn)
        assert usage.prompt_tokens >= 3904 and usage.prompt_tokens_details.cached_tokens >= 3840
        assert mine == content == answers[0]
