"""Many sessions at once give what each gives alone, within the memory, whatever comes and goes beside them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from answering import NEW, Alone, Client, alone, mixed, run, small, text
from cases import CASES, new_cache, taken
from families import FAMILIES
from helpers import prompt, step

from kvkeep.blocks.store import Store
from kvkeep.engine import answer as scheduling
from kvkeep.engine.pieces import TextPiece
from kvkeep.engine.sampling import Sampling
from kvkeep.errors import EngineStopping, KvkeepError, PromptTooLong, UsageError
from kvkeep.serve import service
from kvkeep.serve.engine import Engine
from kvkeep.serve.service import warm_up
from kvkeep.serve.session import peak_bytes

PLENTY = 10**9


def serving(family: str = "llama", memory: int = PLENTY, **options: Any) -> Engine:
    return Engine(small(family), memory, **options)


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_sessions_of_any_method_answer_as_alone(family: str) -> None:
    """They join one after the other, so that prompts are read beside answers."""
    dice = random.Random(family)
    asked = mixed(family, dice, 6)
    engine = serving(family)
    clients = []
    for _, ids, new, cache in asked:
        clients.append(Client(engine, ids, new, **cache))
        for _ in range(dice.randint(0, 2)):
            engine.step()
    run(engine)
    for client, (name, ids, new, cache) in zip(clients, asked, strict=True):
        assert [*client.ended.tokens] == alone(family, ids, new, **cache), name


@pytest.mark.parametrize("spec", ["full", "h2o", "snapkv+verified"])
def test_samples_are_those_of_the_seed_whatever_else_runs(spec: str) -> None:
    cache: dict[str, Any] = {"method": spec} | ({} if spec == "full" else {"budget": 24, "chunk": 16})
    engine, ids = serving(), text(40, 3)
    sampling = Sampling(temperature=1.3, top_k=50, seed=11)  # as transformers has it
    clients = [Client(engine, ids, 10, sampling=sampling, **cache)]
    clients += [Client(engine, text(30, seed), 10, sampling=Sampling(temperature=1.0)) for seed in range(3)]
    run(engine)
    wanted = alone("llama", ids, 10, sampling, **cache)
    assert [*clients[0].ended.tokens] == wanted
    again = Client(engine, ids, 10, sampling=sampling, **cache)
    run(engine)
    assert [*again.ended.tokens] == wanted


@pytest.mark.turns(2)
@pytest.mark.parametrize("spec", ["full", "kv-direct", "h2o", "revive", "snapkv+verified", "kvreviver", "window+merge"])
def test_a_session_goes_on_and_reads_only_what_is_new(spec: str) -> None:
    cache: dict[str, Any] = {"method": spec} | ({} if spec == "full" else {"budget": 60, "chunk": 16})
    engine, first = serving(), text(70, 1)
    one = Client(engine, first, name=("me", "talk"), **cache)
    run(engine)
    second = [*first, *one.ended.tokens, *text(20, 2)]
    two = Client(engine, second, name=("me", "talk"))
    three = Client(engine, second, name=("me", "talk"), method="tova", budget=99)
    other = Client(engine, second, name=("you", "talk"), **cache)
    run(engine)
    assert isinstance(three.events[-1], UsageError) and "cannot be changed" in str(three.events[-1])
    assert two.ended.cached == len(first) + NEW - 1 and two.ended.read == len(second) - two.ended.cached
    assert other.ended.cached == 0  # another's name
    own = Alone(small(), **cache)
    own.answer(first, NEW)
    assert [*two.ended.tokens] == own.answer(second, NEW)


def test_stops_are_no_part_of_an_answer_and_nothing_is_told_twice() -> None:
    engine, ids = serving(), text(30, 5)
    whole = Client(engine, ids, 12)
    run(engine)
    assert whole.text == whole.ended.text and whole.ended.reason == "length"
    words = whole.ended.text.split(" ")
    stop = words[4][1:] + " " + words[5][:2]  # begins and ends within words
    cut = Client(engine, ids, 12, stops=[stop, "never"])
    run(engine)
    assert cut.ended.text == whole.ended.text.partition(stop)[0] == cut.text
    assert cut.ended.reason == "stop" and cut.ended.written < 12


@pytest.mark.parametrize("spec", ["full", "snapkv+verified"])
def test_probabilities_are_told_once_for_each_token(spec: str) -> None:
    cache: dict[str, Any] = {"method": spec} | ({} if spec == "full" else {"budget": 24, "chunk": 16})
    engine = serving()
    client = Client(engine, text(30, 5), top_logprobs=2, **cache)
    run(engine)
    told = [one for event in client.events if isinstance(event, TextPiece) for one in event.logprobs]
    assert [one.token for one in told] == [*client.ended.tokens]
    for one in told:
        best, _ = one.top
        assert best == (one.token, one.data or b" <unk>", pytest.approx(one.logprob))


def test_prompts_are_read_in_turn_and_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exact method's by few tokens a step, another's as it is cut alone; and each has its turn."""
    monkeypatch.setattr(scheduling, "SHORT_CHUNK", 16)
    monkeypatch.setattr(scheduling, "CHUNK", 48)
    engine, steps = serving(), list[int]()
    step_of = engine.scheduler.step

    def counted() -> Any:
        results = step_of()
        steps.append(sum(len(one.read.ids) for one in results) - len(results) + 1)
        return results

    monkeypatch.setattr(engine.scheduler, "step", counted)
    kinds: list[dict[str, Any]] = [{"method": "full"}, {"method": "h2o", "budget": 40, "chunk": 32}]
    asked = [(text(20, 0), 60, kinds[0]), *((text(length, length), 4, kinds[0]) for length in (90, 70))]
    clients = [Client(engine, ids, new, **cache) for ids, new, cache in asked[:1]]
    engine.step()
    engine.step()
    clients += [Client(engine, ids, new, **cache) for ids, new, cache in asked[1:]]
    turns, read = list[int](), [0, 0]
    while any(count < len(ids) for count, (ids, *_) in zip(read, asked[1:], strict=True)):
        engine.step()
        for number, client in enumerate(clients[1:]):
            now = 0 if client.job.session is None else client.job.session.past.cache.get_seq_length()
            if read[number] < now <= len(asked[1 + number][0]):  # of its prompt
                turns += [number] if turns[-1:] != [number] else []
                read[number] = now
    assert turns == [0, 1, 0, 1] and max(steps[2:]) == 16
    asked.append((text(100, 3), 4, kinds[1]))
    clients.append(Client(engine, *asked[-1][:2], **kinds[1]))
    run(engine)
    assert max(steps[2:]) == 32
    for client, (ids, new, cache) in zip(clients, asked, strict=True):
        assert [*client.ended.tokens] == alone("llama", ids, new, **cache)


def test_a_cancelled_answer_ends_at_the_next_token_and_its_session_stays() -> None:
    engine, ids = serving(), text(40, 1)
    client = Client(engine, ids, 50, name=("me", "talk"))
    for _ in range(4):
        engine.step()
    client.job.cancel()
    engine.step()
    assert client.ended.reason == "cancelled" and 0 < client.ended.written < 6 and not engine.running
    again = Client(engine, [*ids, *client.ended.tokens, 7], 5, name=("me", "talk"))
    run(engine)
    assert again.ended.cached >= len(ids)
    waiting = Client(engine, ids, 5)
    waiting.job.cancel()
    engine.step()
    assert waiting.ended.reason == "cancelled" and waiting.ended.written == 0


def test_a_session_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ids = serving(), text(40, 1)
    good = Client(engine, ids, 10)
    bad = Client(engine, text(40, 2), 10, name=("me", "bad"), method="h2o", budget=16, chunk=16)
    for _ in range(6):
        engine.step()
    assert bad.job.session is not None
    stream = bad.job.session.past.cache.stream

    def broken(*given: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(stream, "attend", broken)
    monkeypatch.setattr(stream, "plan", lambda *given: {})  # all of its layers attend so
    run(engine)
    error = bad.events[-1]
    assert isinstance(error, KvkeepError) and "(RuntimeError)" in str(error)
    assert "luck" in str(error.__cause__) and "luck" not in str(error)  # words may be those of a prompt
    assert [*good.ended.tokens] == alone("llama", ids, 10, method="full")
    monkeypatch.undo()
    again = Client(engine, text(40, 2), 10, name=("me", "bad"))
    run(engine)
    assert [*again.ended.tokens] == alone("llama", text(40, 2), 10, method="h2o", budget=16, chunk=16)


def test_too_long_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serving()
    with pytest.raises(UsageError, match="context has"):
        Client(engine, [5] * 600)
    with pytest.raises(UsageError, match="empty"):
        Client(engine, [])
    endless: dict[str, Any] = {"method": "streaming-llm", "budget": 24, "chunk": 16}  # positions are within the cache
    client = Client(engine, text(600, 1), 10, **endless)
    run(engine)
    assert [*client.ended.tokens] == alone("llama", text(600, 1), 10, **endless)
    engine.stop()
    with pytest.raises(EngineStopping):
        Client(engine, text(20, 3))


def test_an_exact_session_ends_at_the_positions_where_new_ones_go_on() -> None:
    """The model has 512 positions, and the server continues new sessions with "endless"."""
    endless: dict[str, Any] = {"method": "endless+passages:count=2,size=16", "budget": 32, "chunk": 32}
    engine, first = serving(**endless), text(400, 1)
    one = Client(engine, first, 4, name=("me", "talk"), method="kv-direct", budget=32)
    run(engine)
    begun = [*first, *one.ended.tokens]
    cut = Client(engine, [*begun, *text(104, 2)], 30, name=("me", "talk"))
    refused = Client(engine, [*begun, *text(120, 2)], 4, name=("me", "talk"))
    new = Client(engine, [*begun, *text(120, 2)], 4, name=("me", "other"))
    run(engine)
    assert len(cut.ended.tokens) == 4 and len(new.ended.tokens) == 4
    assert isinstance(refused.events[-1], PromptTooLong) and "context has 512" in str(refused.events[-1])


@pytest.mark.slow
def test_sessions_of_endless_store_no_more_than_the_capacity(tmp_path: Path) -> None:
    """Their oldest blocks are dropped, after a restart of the server, too; a changed end is not read from the
    beginning."""
    capacity, ids = 1400, text(1500, 1)
    endless: dict[str, Any] = {"method": "endless+passages:count=2,size=16,exact=64", "budget": 24}
    answers = list[list[int]]()
    for restarts in (False, True):
        folder = tmp_path / str(restarts)
        engine = serving(memory=600_000, capacity=capacity, store=Store(folder), **endless)
        one = Client(engine, ids, 4, name=("me", "talk"))
        run(engine)
        assert one.ended.lost_tokens and one.ended.exact_tokens == 64
        if restarts:
            engine.close()
            engine = serving(memory=600_000, store=Store(folder), method="full")  # the session keeps its own
        longer = [*ids, *one.ended.tokens[:-1], *text(400, 2)]
        two = Client(engine, longer, 4, name=("me", "talk"), **endless)
        run(engine)
        assert two.ended.cached == len(ids) + 3 and two.ended.lost_tokens > one.ended.lost_tokens + 300
        assert capacity / 2 < len(longer) + 4 - two.ended.lost_tokens <= capacity
        answers.append([*two.ended.tokens])
        engine.close()
    assert answers[0] == answers[1]


def test_a_capacity_that_sessions_could_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="capacity of 1,000 entries is too small .* give at least 1,792"):
        serving(capacity=1000, method="full")
    with pytest.raises(UsageError, match="'h2o' does not keep every entry"):
        serving(capacity=2000, method="h2o", budget=24)
    assert serving(capacity=2000, method="kv-direct", budget=24).options({}) == {"method": "kv-direct", "budget": 24}


@pytest.mark.slow
def test_no_method_holds_more_than_what_it_may() -> None:
    """Every case, bookkeeping included, after a prompt and a step."""
    for name in [name for name in CASES if taken(name, "llama")]:
        length, cache = CASES[name].length, new_cache(name, "llama")
        ids, granted = prompt(1, length + 1, 3), peak_bytes(cache, length + 1)
        for part in ids.split(length, 1):
            step("llama", cache, part)
            assert cache.memory().bytes <= granted, name


def test_an_engine_that_fails_tells_everybody_and_takes_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = serving()
    one = Client(engine, text(30, 1), 50)

    def broken(*given: Any) -> Any:
        raise TypeError("a mistake")

    monkeypatch.setattr(scheduling, "forward", broken)
    engine._run()
    assert "TypeError at " in caplog.text and "mistake" not in caplog.text
    assert isinstance(one.events[-1], KvkeepError) and isinstance(engine.fault, TypeError)
    with pytest.raises(EngineStopping):
        Client(engine, text(30, 2))


def test_its_thread_answers_questions_between_steps_and_none_after_its_end() -> None:
    engine = serving()
    before = engine.call(lambda: len(engine.sessions.memory))
    engine.start()
    assert before.result(10) == 0
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 // 0).result(10)
    client = Client(engine, text(30, 1), name=("me", "talk"))
    late = engine.call(lambda: 1)
    assert late.cancel() or late.done()  # whoever does not wait any more does no harm
    engine.stop(grace=30)
    assert client.ended.written == NEW and engine.fault is None
    with pytest.raises(EngineStopping):
        engine.call(lambda: 1)


def test_an_engine_warms_up_before_its_first_request_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step_of = [], scheduling.Scheduler.step

    def counted(scheduler: Any) -> Any:
        steps.append(scheduler)
        return step_of(scheduler)

    monkeypatch.setattr(scheduling.Scheduler, "step", counted)
    engine = serving(store=Store(tmp_path))
    warm_up(engine)
    engine.step()
    assert steps and not engine.sessions.memory and not [*tmp_path.rglob("*.block")]
    steps.clear()
    warm_up(engine)
    client = Client(engine, text(20, 1))
    engine._take_in(False)
    assert not steps  # the request does not wait for it
    run(engine)
    assert [*client.ended.tokens] == alone("llama", text(20, 1), method="full")
    with monkeypatch.context() as patch:
        patch.setattr(service, "encode", lambda *given: 1 / 0)
        warm_up(engine)
        run(engine)
    again = Client(engine, text(20, 1))
    run(engine)
    assert again.ended.tokens == client.ended.tokens
    engine.close()
