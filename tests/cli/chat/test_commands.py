"""A chat without a terminal: what is typed, and what comes of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import tokenizer
from families import tiny

from kvkeep import Conversation, EntryState, KeepCache, KvkeepError, UsageError, generate
from kvkeep.cli.cache_options import RequestedCache
from kvkeep.cli.chat import commands, long_reading, loop
from kvkeep.cli.chat.command import AtEnd, check_same
from kvkeep.cli.chat.context_limit import ASK, CONTINUATIONS, chosen
from kvkeep.cli.chat.saving import Saver
from kvkeep.cli.chat.signals import EndSignals
from kvkeep.cli.chat.state import Chat
from kvkeep.cli.chat.status import places, status
from kvkeep.decode.chat import SUMMARISED, whole_sentences
from kvkeep.memory.meter import Memory
from kvkeep.policies.request import Request
from kvkeep.stock import STOCK, new_cache
from kvkeep.units import size

PAGE = Path(__file__).parents[3] / "docs" / "chat.md"


class Lines:
    """A screen of lists: lines to type, answers, and notes."""

    interactive = silent = False
    write_error = None

    def __init__(self, *typed: str) -> None:
        self.rest, self.answers, self.notes = list(typed), [""], []  # type: list[str], list[str], list[str]

    def ask(self) -> str:
        if not self.rest:
            raise EOFError
        return self.rest.pop(0)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def table(self, rows: Any) -> None:
        self.notes += ["  ".join(row) for row in rows]

    @contextmanager
    def reading(self, tokens: int) -> Iterator[Callable[[int], None]]:
        told: list[int] = []
        yield told.append
        assert not told or told[-1] == tokens, "the bar ends with the prompt"

    @contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        def say(text: str) -> None:
            self.answers[-1] += text

        yield say
        self.answers.append("")


def chat(*typed: str, method: str = "kv-direct", budget: Any = 16, positions: int | None = None, **own: Any) -> Chat:
    """A chat in which this was typed."""
    model = tiny("llama", positions=positions)
    talk = Conversation(model, tokenizer(), new_cache(model, method, budget))
    made = Chat(talk, Lines(*typed), own.pop("saver", Saver()), EndSignals(), **{"max_tokens": 6} | own)  # type: ignore
    loop.run(made)
    return made


def notes_of(made: Chat) -> str:
    return "\n".join(made.screen.notes)  # type: ignore[attr-defined]


def said(made: Chat) -> list[str]:
    return [message["content"] for message in made.talk.messages]


def alone(messages: list[str], tokens: int) -> str:
    """The answer of the unbounded cache to the last of questions and answers."""
    model, talk = tiny("llama"), Conversation(tiny("llama"), tokenizer(), KeepCache(tiny("llama")))
    roles = ("user", "assistant")
    talk.messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(messages[:-1])]
    return generate(model, tokenizer(), talk.prompt(messages[-1]), KeepCache(model), max_new_tokens=tokens).text


@pytest.mark.parametrize("method", ["kv-direct", "snapkv:window=4,kernel=3+verified:5", STOCK])
def test_a_cut_answer_goes_on_as_if_it_had_not_been(method: str) -> None:
    made = chat("the of and", "/continue", "/continue", "was it", method=method, budget=None if method == STOCK else 16)
    first, _, second = said(made)[1:]
    assert first == alone(["the of and"], 18) and second == alone(["the of and", first, "was it"], 6)
    assert [turn["question"] for turn in made.turns] == ["the of and", "/continue", "/continue", "was it"]
    assert "".join(made.screen.answers[:3]) == first  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["kv-direct", "h2o"])
def test_what_is_undone_never_was(method: str) -> None:
    """Of a dropping method, too: what it keeps depends on all that it has read."""
    whole = chat("the of and to in", "was it", method=method)
    made = chat("the of and to in", "by from her", "/undo", "/retry 0", "was it", method=method)
    assert said(made) == said(whole)
    made = chat("the of and", "/retry 2.5", seed=3)
    assert len(said(made)) == 2 and said(made) != said(chat("the of and"))


def test_another_method_in_mid_conversation(tmp_path: Path) -> None:
    """A past that can be carried over is: no token of it is read twice; else a sentence says that it is."""
    session = tmp_path / "s"
    with Saver(str(session)) as saver:
        typed = ("the of and to", "/method full", "was it", "/budget 24", "by", "/method h2o", "and her",
                 "/method nope", "/method stock", "/budget none", "for")  # fmt: skip
        made = chat(*typed, saver=saver)
    notes = [note for note in made.screen.notes if "continues with" in note]  # type: ignore[attr-defined]
    assert ["nothing is read again" in note for note in notes] == [True, True, False, False]
    reason = "'h2o' ranks by attention scores, which only reading the text gives."
    assert notes[2].endswith(f"reads it again before its next answer: {reason}")
    read = [turn["timing"]["prefill_tokens"] for turn in made.turns if "error" not in turn]
    assert max(read[:3]) < 10 and read[4] > read[3] > 20
    assert said(made)[:6:2] == ["the of and to", "was it", "by"]
    assert said(made)[5] == alone(said(made)[:5], 6)
    errors = [note for note in made.screen.notes if "nope" in note or "cannot be saved" in note]  # type: ignore
    assert len(errors) == 2
    again = Conversation.resume(tiny("llama"), tokenizer(), session)
    assert again.messages == made.talk.messages and isinstance(again.cache, KeepCache)
    assert again.cache.method.name == "full" and again.ids == made.talk.ids
    assert again.continue_answer(max_new_tokens=3).tokens == made.talk.continue_answer(max_new_tokens=3).tokens


def test_a_reading_that_is_due_is_not_denied() -> None:
    made = chat("the of", "was it", "/budget 24", "/system by from", "/budget 16", "for", "/budget 24", "/undo",
                "/budget 16")  # fmt: skip
    notes = [note for note in made.screen.notes if "continues with" in note]  # type: ignore[attr-defined]
    due = ["nothing is read again" not in note for note in notes]
    assert due == [False, True, False, False], notes
    assert notes[1].endswith("16 entries per layer; the model reads it before its next answer.")
    assert [turn["timing"]["prefill_tokens"] > 12 for turn in made.turns] == [False, False, True]


def test_the_end_of_the_positions_is_an_offer() -> None:
    common: dict[str, Any] = {"method": "full", "budget": None, "positions": 72}
    long = [f"the of and to in was {word}" for word in ("it", "for", "on", "as", "with", "his")]
    made = chat(*long, **common)
    assert len(said(made)) == 2 * len(long) - 2 and made.pending == long[-1]
    offered = "\n".join(made.screen.notes)  # type: ignore[attr-defined]
    assert "The conversation with your question has 77 tokens, and the model's context only 72. To continue:" in offered
    for positions, left in ((77, "none"), (80, "3")):
        near = notes_of(chat(*long, **common | {"positions": positions}))
        assert f"Your question leaves {left} of {positions} tokens for an answer; at least 6 are needed." in near
    assert all(f"/context {name}" in offered for name in CONTINUATIONS)
    for name in ("drop", "summary"):
        one = chat(*long, f"/context {name}", "/continue", **common)
        assert one.pending is None and one.turns[-2]["question"] == long[-1], name
        assert (said(one)[0] == SUMMARISED) == (name == "summary") and said(one)[0] != long[0]
        assert one.talk.positions == 72
        told = chat(*long, at_end=name, **common)
        assert said(told)[-2:] == [long[-1], told.turns[-1]["text"]], "nobody has to be asked"
    alone = chat("the " * 100, "/context drop", **common).screen.notes[-1]  # type: ignore[attr-defined]
    assert alone.startswith("Even without the earlier turns, the conversation with your question has 102 tokens")
    new = chat("/context drop", "/context summary", **common)
    assert notes_of(new) == "\n".join(["The conversation is empty, so there is nothing to forget."] * 2)
    one = chat("the " * 40, "/context drop", "/context", **common)
    assert "The last turn takes" in notes_of(one) and "no earlier one to forget" in notes_of(one)


LONG = [f"{'the of and to in was it for ' * 14}{word}" for word in ("on", "as", "with", "his", "he")]
"""Questions of which four fill 512 positions."""


@pytest.mark.parametrize("method", ["full", "kv-direct", "snapkv:window=4,kernel=3+verified:5"])
def test_a_full_context_continues_by_endless_without_reading_again(method: str) -> None:
    common: dict[str, Any] = {"method": method, "budget": None if method == "full" else 32, "positions": 512}
    made = chat(*LONG, at_end="endless", **common)
    notes, cache = made.screen.notes, made.talk.cache  # type: ignore[attr-defined]
    assert not made.failed and said(made)[::2] == LONG
    assert isinstance(cache, KeepCache) and cache.method.recall.endless and made.talk.positions is None
    (switch,) = [note for note in notes if note.startswith("The context of 512 tokens is full, so the conversation")]
    kept = 64 if method == "full" else 32
    assert f"within {kept} entries per layer" in switch and switch.endswith("; nothing is read again.")
    assert all(turn["timing"]["prefill_tokens"] < 140 for turn in made.turns)
    (said_once,) = [note for note in notes if note.startswith("From here on answers are not exact")]
    assert said_once.endswith("because the conversation has more than 512 tokens.")
    lines = [note for note in notes if "tokens in memory" in note]
    exact = [line.startswith("exact: ") for line in lines]
    assert exact == sorted(exact, reverse=True) and exact[0] and not exact[-1]
    assert ["of recalled blocks and bookkeeping" in line for line in lines] == [not one for one in exact]
    assert lines[-1].startswith("exact up to 512 tokens: ") and lines.index(lines[-1]) == exact.index(False)
    assert notes.index(said_once) == notes.index(lines[exact.index(False)]) + 1
    asked = chat(*LONG, "/context endless", "/context", "/budget 40", **common)
    assert asked.talk.messages == made.talk.messages, "the offered way gives the same answers"
    *_, full, budget = asked.screen.notes  # type: ignore[attr-defined]
    assert full.endswith("tokens. This method has no context limit.") and budget.endswith("nothing is read again.")


def test_a_text_beyond_the_context_is_not_given_to_a_method_that_would_read_it_again() -> None:
    made = chat(*LONG, "/budget none", "/method kv-direct 40", budget=32, positions=512, at_end="endless")
    errors = [turn["error"] for turn in made.turns if "error" in turn]
    assert len(errors) == 2 and all("read it again" in one and "context has 512" in one for one in errors)
    assert isinstance(made.talk.cache, KeepCache) and made.talk.cache.method.recall.endless


def test_the_options_that_began_a_chat_continue_it_beyond_the_context() -> None:
    made = chat(*LONG, budget=32, positions=512, at_end="endless")
    present = made.talk.cache.request  # type: ignore[union-attr]
    check_same("talk", RequestedCache(Request.parse("kv-direct", 32, chunk=present.chunk)), made.talk, None)
    with pytest.raises(UsageError, match="continues with method 'endless.*', budget 32"):
        check_same("talk", RequestedCache(Request.parse("kv-direct", 40, chunk=present.chunk)), made.talk, None)


def test_the_context_is_said_to_be_full_only_where_it_is() -> None:
    made = chat(LONG[0], "/context endless", budget=32, positions=2048)
    assert made.screen.notes[-1].startswith("The conversation continues with endless")  # type: ignore[attr-defined]


def test_up_to_the_positions_the_answers_of_endless_are_those_of_another_exact_method() -> None:
    made = chat(*LONG[:3], budget=32, positions=512, at_end="endless", max_tokens=70)
    whole = chat(*LONG[:3], method="full", budget=None, positions=1024, max_tokens=70)
    assert made.talk.positions is None and said(made)[:-1] == said(whole)[:-1]
    (answer, other), prompt = (one.turns[-1]["tokens"] for one in (made, whole)), made.turns[-1]["prompt_tokens"]
    assert prompt + 6 < 512 < prompt + 70 == made.talk.used, "an answer that might be cut is not begun before"
    assert answer[: 512 - prompt] == other[: 512 - prompt]


def test_what_happens_at_the_end_is_chosen_by_the_method() -> None:
    def default(method: str, budget: Any, positions: int = 512) -> str:
        talk = chat(method=method, budget=budget, positions=positions).talk
        return chosen(None, talk)

    assert [default("full", None), default("kv-direct", 32)] == ["endless", "endless"]
    assert default("h2o", 32) == default(STOCK, None) == default("streaming-llm", 32) == ASK
    assert default("kv-direct", 32, positions=128) == ASK, "no block fits"
    for method, budget, positions, told in (
        ("h2o", 32, 512, "Method 'h2o' does not keep every entry"),
        ("streaming-llm", 32, 512, "Method 'streaming-llm' does not keep every entry"),
        ("kv-direct", 32, 128, "128 positions have no space"),
    ):
        talk = chat(method=method, budget=budget, positions=positions).talk
        with pytest.raises(KvkeepError, match=told):
            chosen("endless", talk)
    assert chosen("drop", chat(method="h2o", budget=32, positions=512).talk) == "drop"
    made = chat(*LONG, "/context endless", method="h2o", budget=32, positions=512)
    assert made.turns[-1]["error"].startswith("Method 'h2o' does not keep every entry")


def test_a_full_checkpoint_is_told_once_and_the_line_counts_what_was_dropped() -> None:
    model = tiny("llama", positions=512)
    cache = KeepCache(model, "endless+blocks:count=3,size=16", 32, capacity=512 + 1024 + 256)
    talk = Conversation(model, tokenizer(), cache)
    made = Chat(talk, Lines(*["the of and to in was it for " * 24] * 12), Saver(), EndSignals(), max_tokens=6)  # type: ignore
    loop.run(made)
    notes = made.screen.notes  # type: ignore[attr-defined]
    (said_once,) = [note for note in notes if note.startswith("The checkpoint is full (1,792 tokens, --capacity)")]
    lines = [note for note in notes if "tokens in memory" in note]
    dropped = ["dropped" in line for line in lines]
    assert dropped == sorted(dropped) and not dropped[0] and dropped[-1]
    assert notes[notes.index(said_once) - 1] == lines[dropped.index(True)]
    assert f"{cache.lost_tokens:,} dropped" in lines[-1]


def test_undo_after_the_end_leaves_what_was_before() -> None:
    common: dict[str, Any] = {"budget": 32, "positions": 512, "at_end": "endless"}
    made = chat(*LONG, "/undo", "/undo", LONG[3], LONG[4], **common)
    assert said(made) == said(chat(*LONG, **common))


def test_a_summary_is_whole_and_the_question_after_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "the of and to in was it for " * 5
    common: dict[str, Any] = {"method": "full", "budget": None, "positions": 128, "max_tokens": 4}
    made = chat(*[long] * 3, "by from", "and her " * 20, "/context summary", **common)
    assert len(said(made)[1].split()) > 4, "--max-tokens is of answers"
    assert f"Your last question: {' '.join(['and her'] * 20)[:57]}..." in notes_of(made) and made.pending is None
    for text, whole in (("They met. It was", "They met."), ("1. one 2", "1. one 2"), ("「は。」と", "「は。」")):
        assert whole_sentences(text) == whole
    monkeypatch.setattr(Conversation, "_generate", _without_text(Conversation._generate, "They met. It was"))
    made = chat(*[long] * 3, "/context summary", **common)
    assert said(made)[:2] == [SUMMARISED, "They met."] and "tokens; its whole sentences replace" in notes_of(made)


@pytest.mark.parametrize("method", ["full", "h2o"])
def test_a_summary_takes_no_more_than_there_is(method: str) -> None:
    """Neither the prompt that asks for it nor what is left with it; a summary is not summarised by itself."""
    common: dict[str, Any] = {"method": method, "budget": None if method == "full" else 16, "positions": 128}
    typed = "the of and to in was it for on as " * 5, "was it for on as with his he at by " * 3
    others = " or '/context endless'" if method == "full" else ""
    made = chat(*typed, *["/continue"] * 9, "/context", at_end="summary", max_tokens=12, **common)
    errors = [turn["error"] for turn in made.turns if "error" in turn]
    assert errors and {*errors} == {f"The conversation has only a summary left to forget. Use '/context drop'{others}."}
    assert notes_of(made).count("is summarised by the model") == 1 and said(made)[0] == SUMMARISED
    used = int(re.findall(r"(\d+) of 128 tokens are used", notes_of(made))[-1])
    assert 0 < used <= 128
    assert len(said(made)) == 4 and said(made)[-2] == typed[1]
    made = chat(typed[0], "by " * 110, at_end="summary", max_tokens=12, **common)
    assert made.turns[-1]["error"].startswith("A summary does not fit into the context of 128 tokens")
    assert said(made)[::2] == [typed[0]] and made.pending is not None


def test_a_file_goes_with_its_question_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = tmp_path / "c.txt", "was it for on as with his he at by " * 3
    path.write_text(text)
    common: dict[str, Any] = {"method": "full", "budget": None, "positions": 64}
    made = chat(f"/file {path}", "the of", f"/file {path} and to", "/undo", "and to", "/undo", "/undo", **common)
    asked = [turn["question"] for turn in made.turns if "error" not in turn]
    assert asked == ["the of", "and to"] and "context only 64" in made.turns[1]["error"]
    notes = notes_of(made)
    assert notes.count(f"Your next question will follow {path}; '/file none' removes it.") == 2
    assert "Forgotten: ... the of" in notes and "Forgotten: ... and to" in notes, "what was typed"
    made = chat(f"/file {path}", "/file none", "the of", **common)
    assert said(made)[0] == "the of"
    monkeypatch.setattr(Conversation, "answer", _stopped(Conversation.answer))
    made = chat(f"/file {path} the of", "and to", **common)
    assert said(made)[0] == "and to" and "nothing was changed" in made.turns[0]["error"]


@pytest.mark.parametrize(("reply", "read"), [("y", True), ("YES", True), ("", False), ("the of", False)])
def test_a_long_file_is_read_when_the_user_agrees(tmp_path: Path, reply: str, read: bool) -> None:
    path = tmp_path / "book.txt"
    path.write_text("the of and to " * 90)
    screen = Lines(f"/file {path} was it", reply, "by from")
    screen.interactive = True
    talk = Conversation(tiny("llama"), tokenizer(), new_cache(tiny("llama"), "kv-direct", 16))
    made = Chat(talk, screen, Saver(), EndSignals(), max_tokens=4, read_per_s=2.0)  # type: ignore[arg-type]
    loop.run(made)
    assert "Reading 364 tokens takes at least 3 minutes; 'y' reads them" in notes_of(made)
    assert [turn["question"] for turn in made.turns] == (["was it", "by from"] if read else ["by from"])
    assert ("Nothing was read." in notes_of(made)) != read and not made.attachments and made.pending is None


def test_without_a_terminal_a_long_file_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next line is the next question, not a reply. How long it takes is measured, and a short text needs no
    measuring."""
    path = tmp_path / "book.txt"
    path.write_text("the of and to " * 90)
    monkeypatch.setattr(long_reading, "LONG_S", 0.0)
    made = chat("the of", f"/file {path} was it", "by from", method="h2o")
    assert [turn["question"] for turn in made.turns] == ["the of", "was it", "by from"]
    assert notes_of(made).count("Reading 3") == 1 and "takes at least 0 minutes." in notes_of(made)
    assert made.read_per_s is not None


def test_a_cut_at_the_last_position_goes_on() -> None:
    common: dict[str, Any] = {"method": "full", "budget": None, "positions": 64}
    made = chat("the of and", "/continue", "/context drop", max_tokens=200, **common)
    assert made.turns[0]["stopped"] == "positions"
    notes = made.screen.notes  # type: ignore[attr-defined]
    assert "/context shows how" in "\n".join(notes) and "Even without the earlier turns" in notes[-1]
    common["positions"] = 512
    made = chat("the of and", "/context endless", "/continue", max_tokens=520, **common)
    assert made.turns[0]["stopped"] == "positions"
    assert len(made.turns[1]["tokens"]) == 520 and made.talk.turns == 1


def test_files_prompts_and_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a b.md").write_text("was it for")
    (tmp_path / "c.txt").write_text("on as with")
    made = chat(f"/file {tmp_path}/a b.md", f"/file {tmp_path}/c.txt the of", "/system by from", "and",
                f"/save {tmp_path}/talk.md", f"/save {tmp_path}/talk.md", "/system none", "/system", "/file",
                "/file nowhere", "/retry hot", "/contniue", "/etc/hosts is", "/save", "/context left", "/reset",
                "/undo", "/banana", "/exit", "never")  # fmt: skip
    assert [turn["question"] for turn in made.turns if "text" in turn] == ["the of", "and", "/etc/hosts is"]
    failed = [turn["question"].split()[0] for turn in made.turns if "error" in turn]
    assert failed == ["/save", "/file", "/file", "/retry", "/contniue", "/save", "/context", "/undo",
                      "/banana"] and made.failed  # fmt: skip
    written = (tmp_path / "talk.md").read_text()
    assert "was it for\n\non as with\n\nthe of" in written and written.startswith("**System**\n\nby from\n")
    notes = "\n".join(made.screen.notes)  # type: ignore[attr-defined]
    for sentence in ("give another name", "no system prompt.", "Name a file", "'nowhere' cannot be read", "'hot'",
                     "did you mean /continue or /context? /help lists all.", "'/save talk' to continue", "'left'",
                     "nothing to undo", "Unknown command '/banana': /help lists all."):  # fmt: skip
        assert sentence in notes, sentence
    assert not said(made) and made.screen.rest == ["never"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "method, options, there",
    [
        ("full", {}, "exact: all 245 tokens in memory ({0})"),
        ("kv-direct", {"checkpoint": "kv"}, "exact: 72 tokens in memory ({0}), 173 on disk ({disk})"),
        ("kv-direct", {"checkpoint": "residual", "where": "host"},
         "exact: 72 tokens in memory ({0}), 173 from {host} on host"),
        ("kv-direct", {"checkpoint": "tokens"}, "exact: 72 tokens in memory ({0}), 173 from token ids"),
        ("kv-direct", {"checkpoint": "kv", "where": "device"},
         "exact: 72 tokens in memory ({1}), 173 on device ({device})"),
        ("h2o", {}, "72 tokens in memory ({0}), 173 dropped"),
        ("kvslimmer", {}, "35 tokens and 210 merged in memory ({0})"),
        ("revive", {}, "21 tokens and 224 in fewer bits in memory ({0})"),
        ("h2o+drop+pages:2", {"checkpoint": "kv"}, "72 tokens in memory ({0}), 173 on disk ({disk})"),
    ],
)  # fmt: skip
def test_the_line_says_where_every_token_is(method: str, options: dict[str, Any], there: str) -> None:
    cache = KeepCache(tiny("llama"), method, None if method == "full" else 72, **options)
    talk = Conversation(tiny("llama"), tokenizer(), cache)
    result = talk.answer("the of and " * 80, max_new_tokens=4)
    memory = result.memory
    own = memory.resident_bytes + memory.compressed_bytes
    sizes = {place: size(count) for place, count in memory.checkpoint_bytes.items()}
    said = there.format(size(own + memory.checkpoint_bytes["device"]), size(own), **sizes)
    line = status(cache, result)
    assert line.startswith(said + ", ") and line.endswith(" tokens/s")
    numbers = "".join(re.sub(r"\(.*?\)|from .*? on", "", said))
    assert sum(map(int, re.findall(r"\d+", numbers))) == 245


@pytest.mark.parametrize("kind", ["kv", "residual"])
def test_the_line_fits_80_columns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many tokens as SmolLM2 has positions."""
    counts = {EntryState.RESIDENT: 256, EntryState.CHECKPOINTED: 7920}
    monkeypatch.setattr("kvkeep.cli.chat.status._counts", lambda cache, length: dict(counts))
    memory = Memory(5_900_000, checkpoint_bytes={"device": 0, "host": 0, "disk": 182_800_000})
    line = ", ".join(places(KeepCache(tiny("llama"), "kv-direct", 72, checkpoint=kind), memory))
    assert "7,920" in line and len(f"{line}, 8.5 tokens/s") <= 80


def test_an_empty_answer_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    first = chat("the of").turns[0]["tokens"][0]
    monkeypatch.setattr(tiny("llama", positions=None).generation_config, "eos_token_id", first)
    monkeypatch.setattr(Conversation, "_generate", _without_text(Conversation._generate))
    notes = chat("the of", "/continue").screen.notes  # type: ignore[attr-defined]
    assert "answer is empty" in notes[1] and "the model ended it" in notes[2]


def _stopped(answer: Any) -> Any:
    """As with Ctrl-C while the first prompt is read."""
    stops = iter([KeyboardInterrupt])

    def stopped(*given: Any, **options: Any) -> Any:
        for stop in stops:
            raise stop
        return answer(*given, **options)

    return stopped


def _without_text(generated: Any, text: str = "") -> Any:
    """As where the last token is a special one, of which a text has nothing; the tiny tokenizer has none. text: another
    that is written."""
    from dataclasses import replace

    return lambda *given, **options: replace(generated(*given, **options), text=text)


def test_completions_and_the_page() -> None:
    assert [word for word, _ in commands.completions("/me")] == ["/method", "/memory"]
    assert {"h2o", "h2o-fisher"} <= dict(commands.completions("/method h2")).keys()
    assert dict(commands.completions("/context d")) == {"drop": ""} and not list(commands.completions("what /me"))
    assert {way.value for way in AtEnd} == {ASK, *CONTINUATIONS}
    rows = [f"| `{command.usage}` | {command.help} |" for command in commands.COMMANDS.values()]
    table = re.search(r"\| command \| .*?\n\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert table is not None and table[0].split("\n")[2:-2] == rows
    with pytest.raises(UsageError, match="did you mean /undo"):
        commands.run(chat(), "/undoo")
