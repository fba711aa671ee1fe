"""Servers that are killed during answers, and servers that end by SIGTERM."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from answering import Alone
from running import TEXT, Program, bearer, figures, post, program, streamed

import kvkeep
from kvkeep.blocks.store import Store
from kvkeep.models.loading import Loaded

KINDS: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "kv-direct", "budget": 24},
    {"method": "h2o", "budget": 24},
    {"method": "snapkv+verified", "budget": 24},
]
POSITIONS = 440
"""Tokens after which a conversation of the tiny model ends, and another begins."""

LOCK = threading.RLock()
"""Of the model by which clients know what they should hear."""


@dataclass
class Talk:
    """One client's conversation with a server that may be gone at any time."""

    number: int
    loaded: Loaded
    reference: Alone | None = None
    name: str = ""
    ids: list[int] = field(default_factory=list)  # prompt and answer of all turns that are known to have ended
    begun: int = 0
    turns: int = 0  # in all
    saved: int = 0  # tokens that the server has of the session, as far as is known
    went_on: int = 0  # tokens of turns before a kill that were not read again after it

    @property
    def kind(self) -> dict[str, Any]:
        return KINDS[self.number % len(KINDS)]

    def found_again(self, running: Program) -> None:
        """Look what the server has after its restart: all turns of which the end was told, and at most one more."""
        if not self.ids and not self.name:
            return
        found = httpx.get(f"{running.address}/v1/sessions/{self.name}", headers=bearer())
        tokens = found.json()["tokens"] if found.status_code == 200 else 0
        assert tokens >= self.saved, (self.name, tokens, self.saved)
        if tokens > self.saved:  # it was saved, and the server killed before it could say so
            self.heard(None)
            assert tokens == self.saved, (self.name, tokens, self.saved)
        self.went_on += tokens

    def next(self) -> tuple[list[int], int]:
        """What is asked next: the prompt, and the tokens of its answer. The same again for a turn that was lost."""
        if not self.name or len(self.ids) > POSITIONS:
            self.begun += 1
            self.name, self.ids, self.saved = f"talk-{self.number}-{self.begun}", [], 0
            with LOCK:
                self.reference = Alone(self.loaded, **self.kind)
        dice = random.Random(f"{self.name} {len(self.ids)}")
        return [*self.ids, *dice.choices(range(5, 97), k=dice.randint(3, 30))], dice.randint(4, 24)

    def heard(self, text: str | None) -> None:
        """A turn has ended, with this text where it was heard."""
        prompt, new = self.next()
        assert self.reference is not None
        with LOCK:
            self.ids = [*prompt, *self.reference.answer(prompt, new)]
        self.saved, self.turns = len(self.ids) - 1, self.turns + 1
        assert text in (None, self.reference.text), self.name

    def continue_until_gone(self, running: Program, on_event: Callable[[], None]) -> None:
        """Ask for turn after turn, until the server is gone."""
        with suppress(httpx.TransportError):
            while True:
                prompt, new = self.next()
                kind = {"session": self.name, **({} if self.saved else self.kind)}
                body = {"model": running.model, "prompt": prompt, "max_tokens": new, "temperature": 0, "kvkeep": kind}
                text, reason = "", None
                options = {"stream_options": {"include_usage": True}}
                with streamed(running.address, body | options, TEXT, timeout=120) as found:
                    for line in found.iter_lines():
                        if line.startswith("data: {"):
                            event = json.loads(line[6:])
                            assert "error" not in event, event
                            if event["choices"]:
                                text += event["choices"][0]["text"]
                                reason = event["choices"][0]["finish_reason"] or reason
                            else:
                                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
                                assert cached == self.saved, (self.name, cached, self.saved)
                            on_event()
                if reason is None:
                    raise httpx.ReadError("the stream broke off")
                self.heard(text)


@pytest.mark.soak(3)
def test_kills_during_answers_lose_no_finished_turn(model_folder: Path, tmp_path: Path, say: Any) -> None:
    folder, loaded, kills = tmp_path / "s", kvkeep.load(str(model_folder)), 20
    options = ["--model", str(model_folder), "--memory", "8MB", "-x", "full", "--sessions", str(folder)]
    talks, dice, answering = [Talk(number, loaded) for number in range(8)], random.Random(3), 0
    for kill in range(kills):
        with program(*options, fork=True) as running:
            for talk in talks:
                talk.found_again(running)
            pieces, enough = [0], dice.randint(20, 400)
            reached = threading.Event()

            def on_event(pieces: list[int] = pieces, enough: int = enough, reached: threading.Event = reached) -> None:
                pieces[0] += 1
                if pieces[0] >= enough:
                    reached.set()

            faults: list[BaseException] = []

            def talking(talk: Talk, running: Program = running, on_event: Any = on_event, faults: Any = faults) -> None:
                try:
                    talk.continue_until_gone(running, on_event)
                except BaseException as error:
                    faults.append(error)

            threads = [threading.Thread(target=talking, args=(talk,)) for talk in talks]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 60
            while not reached.wait(0.05) and not faults and time.monotonic() < deadline:
                pass
            running_now = 0 if faults else int(figures(running.address)["kvkeep_requests_running"])
            answering += running_now
            os.kill(running.process.pid, signal.SIGKILL)
            for thread in threads:
                thread.join(60)
            assert not faults, faults
        say.progress(f"{kill + 1} of {kills} kills, {sum(talk.turns for talk in talks)} turns")
    with program(*options, fork=True) as running:
        for talk in talks:
            talk.found_again(running)
    turns, went_on = sum(talk.turns for talk in talks), sum(talk.went_on for talk in talks)
    orphans = [path for path in folder.rglob("*") if ".saving-" in path.name]
    checkpoints = [path for path in Path(os.environ["KVKEEP_CACHE"], "checkpoints").rglob("*") if path.is_file()]
    problems = [one for one in Store(folder).sessions() if one.problem or one.in_use]
    assert not orphans and not checkpoints and not problems, (orphans, checkpoints, problems)
    assert answering >= kills and turns > kills and went_on > 0
    say(
        f"{kills} times kill -9 with {answering} answers under way in 8 sessions of {len(KINDS)} methods: all {turns} "
        f"turns that had ended were there after it and went on ({went_on:,} tokens not read again), answers as alone, "
        "no file left over"
    )


# -- SIGTERM ----------------------------------------------------------------------------------------------

SESSIONS, GRACE = 8, 3


@pytest.mark.real
@pytest.mark.soak(4)
def test_sigterm_ends_in_time_and_saves_everything(real: Loaded, say: Any, tmp_path: Path) -> None:
    options = ["--memory", "600MB", "-x", "full", "--sessions", str(tmp_path), "--grace", str(GRACE)]
    kinds = [KINDS[number % len(KINDS)] for number in range(SESSIONS)]
    references = [Alone(real, **kind) for kind in kinds]
    first = [random.Random(number).choices(range(1000, 20_000), k=80) for number in range(SESSIONS)]
    heard: list[str] = ["" for _ in range(SESSIONS)]
    reasons: list[str | None] = [None] * SESSIONS
    begun = threading.Barrier(SESSIONS + 1, timeout=120)

    def listens(running: Program, number: int) -> None:
        body = {"model": running.model, "prompt": first[number], "max_tokens": 2000, "seed": number}
        body["kvkeep"] = {"session": f"talk-{number}", **kinds[number]}
        with streamed(running.address, body | {"temperature": 0}, TEXT, timeout=120) as found:
            for count, line in enumerate(line for line in found.iter_lines() if line.startswith("data: {")):
                choice = json.loads(line[6:])["choices"][0]
                heard[number] += choice["text"]
                reasons[number] = choice["finish_reason"]
                if count == 5:
                    begun.wait()

    with program(*options) as running:
        threads = [threading.Thread(target=listens, args=(running, number)) for number in range(SESSIONS)]
        for thread in threads:
            thread.start()
        begun.wait()
        start = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0
        elapsed = time.monotonic() - start
        for thread in threads:
            thread.join(30)
    assert elapsed < 10 and set(reasons) == {"length"}, (elapsed, reasons)
    say.progress(f"gone within {elapsed:.1f} s")
    known = {}
    for info in Store(tmp_path).sessions():
        assert not info.problem and not info.in_use and info.saves == 1
        with Store(tmp_path).read(info.name) as stored:
            known[int(info.name.rpartition("-")[2])] = stored.about["ids"][0]  # type: ignore[index]
    assert len(known) == SESSIONS
    cut = read = 0
    with program(*options) as running:
        for number, reference in enumerate(references):
            ids = known[number]
            new = len(ids) - len(first[number]) + 1  # the last token was told, and not read
            answer = reference.answer(first[number], new)
            assert ids == [*first[number], *answer[:-1]] and reference.text == heard[number], number
            prompt = [*first[number], *answer, 2000, 3000, 4000]
            body = {"model": running.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
            found = post(running.address, {**body, "kvkeep": {"session": f"talk-{number}"}}, path=TEXT).json()
            reference.answer(prompt, 8)
            assert found["choices"][0]["text"] == reference.text, number
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids)
            cut, read = cut + new, read + len(prompt) - len(ids)
            say.progress(f"{number + 1} of {SESSIONS} go on")
    say(
        f"SIGTERM with --grace {GRACE} beside {SESSIONS} answers of 2,000 tokens: gone within {elapsed:.1f} s, all "
        f"{cut:,} tokens told are saved; after a restart the next turns read their own {read} tokens only, answers as "
        "alone"
    )
