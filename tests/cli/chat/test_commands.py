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

from kvkeep import Conversation, KeepCache, KvkeepError, UsageError, generate
from kvkeep.budget import size
from kvkeep.cli.chat import commands
from kvkeep.cli.chat.answering import status
from kvkeep.cli.chat.command import AtEnd
from kvkeep.cli.chat.context_limit import ASK, CONTINUATIONS, chosen
from kvkeep.cli.chat.state import Chat, Saver
from kvkeep.policies.names import STOCK
from kvkeep.stock import new_cache

PAGE = Path(__file__).parents[3] / "docs" / "chat.md"


class Lines:
    """A screen of lists: lines to type, answers, and notes."""

    interactive = False

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
    made = Chat(talk, Lines(*typed), own.pop("saver", Saver()), **{"max_tokens": 6} | own)  # type: ignore
    commands.converse(made)
    return made


def notes_of(made: Chat) -> str:
    return "\n".join(made.screen.notes)  # type: ignore[attr-defined]


def answers_of(made: Chat) -> list[str]:
    """Every answer that was shown, also those that were forgotten afterwards."""
    return [text for text in made.screen.answers if text]  # type: ignore[attr-defined]


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
    assert "".join(answers_of(made)[:3]) == first


@pytest.mark.parametrize("method", ["kv-direct", "h2o"])
def test_what_is_undone_never_was(method: str) -> None:
    """Of a dropping method, too: what it keeps depends on all that it has read."""
    whole = chat("the of and to in", "was it", method=method)
    made = chat("the of and to in", "by from her", "/undo", "was it", method=method)
    assert said(made) == said(whole) and "Forgotten: by from her" in notes_of(made)
    made = chat("the of and", "/temperature 2.5", "/retry", seed=3)
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
    assert said(made)[:6:2] == ["the of and to", "was it", "by"]
    assert said(made)[5] == alone(said(made)[:5], 6)
    errors = [note for note in made.screen.notes if "nope" in note or "cannot be saved" in note]  # type: ignore
    assert len(errors) == 2
    again = Conversation.resume(tiny("llama"), tokenizer(), session)
    assert again.messages == made.talk.messages and isinstance(again.cache, KeepCache)
    assert again.cache.method.name == "full" and again.ids == made.talk.ids
    assert again.continue_answer(max_new_tokens=3).tokens == made.talk.continue_answer(max_new_tokens=3).tokens


def test_a_full_context_is_told_and_half_of_it_can_be_freed() -> None:
    common: dict[str, Any] = {"method": "full", "budget": None, "positions": 72}
    long = [f"the of and to in was {word}" for word in ("it", "for", "on", "as", "with", "his")]
    made = chat(*long, "/context", **common)
    assert len(said(made)) == 2 * len(long) - 2 and made.failed
    told = "The conversation with your question has 77 tokens, too many for an answer in the model's context of 72."
    assert told in notes_of(made) and notes_of(made).count("'/context drop' forgets the oldest turns, '/context") == 2
    one = chat(*long, "/context drop", long[-1], "/continue", **common)
    assert said(one)[0] != long[0] and said(one)[-2] == long[-1] and one.talk.positions == 72
    told_once = chat(*long, at_end="drop", **common)
    assert said(told_once)[-2] == long[-1] and not told_once.failed, "nobody has to be asked"
    assert "give a shorter text" in notes_of(chat("the " * 100, at_end="drop", **common))
    new = chat("/context drop", "/context left", **common)
    assert "There is no earlier turn to forget." in notes_of(new) and "'left'" in notes_of(new)


LONG = [f"{'the of and to in was it for ' * 14}{word}" for word in ("on", "as", "with", "his", "he")]
"""Questions of which four fill 512 positions."""


@pytest.mark.turns(3)
@pytest.mark.parametrize("method", ["full", "kv-direct", "snapkv:window=4,kernel=3+verified:5"])
def test_a_full_context_continues_by_endless_without_reading_again(method: str) -> None:
    common: dict[str, Any] = {"method": method, "budget": None if method == "full" else 32, "positions": 512}
    made = chat(*LONG, at_end="endless", **common)
    notes, cache = made.screen.notes, made.talk.cache  # type: ignore[attr-defined]
    assert not made.failed and said(made)[::2] == LONG
    assert isinstance(cache, KeepCache) and cache.method.recall.endless and made.talk.positions is None
    (switch,) = [note for note in notes if note.startswith("Beyond the model's context, the conversation continues")]
    kept = 64 if method == "full" else 32
    assert f"within {kept} entries per layer" in switch and switch.endswith("; nothing is read again.")
    lines = [note for note in notes if "tokens in memory" in note]
    exact = [line.startswith("exact: ") for line in lines]
    assert exact == sorted(exact, reverse=True) and exact[0] and lines[-1].startswith("exact up to 512 tokens: ")
    asked = chat(*LONG, "/context endless", LONG[-1], "/context", "/budget 40", **common)
    assert asked.talk.messages == made.talk.messages, "the offered way gives the same answers"
    *_, full, budget = asked.screen.notes  # type: ignore[attr-defined]
    assert full.endswith("tokens. This method has no context limit.") and budget.endswith("nothing is read again.")


def test_what_happens_at_the_end_is_chosen_by_the_method() -> None:
    def default(method: str, budget: Any, positions: int = 512) -> str:
        return chosen(None, chat(method=method, budget=budget, positions=positions).talk)

    assert [default("full", None), default("kv-direct", 32)] == ["endless", "endless"]
    assert default("h2o", 32) == default(STOCK, None) == default("streaming-llm", 32) == ASK
    assert default("kv-direct", 32, positions=128) == ASK, "no block fits"
    for method, positions, told in (
        ("h2o", 512, "Method 'h2o' does not keep every entry"),
        ("kv-direct", 128, "128 positions have no space"),
    ):
        with pytest.raises(KvkeepError, match=told):
            chosen("endless", chat(method=method, budget=32, positions=positions).talk)
    assert chosen("drop", chat(method="h2o", budget=32, positions=512).talk) == "drop"
    notes = notes_of(chat(*LONG, "/context endless", method="h2o", budget=32, positions=512))
    assert "Method 'h2o' does not keep every entry" in notes and "'/context drop' forgets the oldest turns.\n" in notes


def test_a_file_goes_with_its_question_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = tmp_path / "a b.txt", "was it for on as with his he at by " * 3
    path.write_text(text)
    common: dict[str, Any] = {"method": "full", "budget": None, "positions": 64}
    made = chat(f"/file {path}", "the of", f"/file '{path}' and to", "/undo", "and to", **common)
    assert said(made)[::2] == ["and to"] and "context of 64" in notes_of(made)
    assert "Forgotten: the of" in notes_of(made), "what was typed"
    assert said(chat(f"/file {path}", "/file none", "the of", **common))[0] == "the of"
    monkeypatch.setattr(Conversation, "answer", _stopped(Conversation.answer))
    made = chat(f"/file {path}", "the of", "and to", **common)
    assert said(made)[0] == f"{text}\n\nand to" and "nothing was changed" in notes_of(made)


def test_files_prompts_and_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("on as with")
    made = chat(f"/file {tmp_path}/c.txt the of", "/system by from", "and", "/system none", "/system", "/file",
                "/file nowhere", "/temperature hot", "/temperature", "/contniue", "/etc/hosts is", "/save",
                "/reset", "/undo", "/banana", "/exit", "never")  # fmt: skip
    assert len(answers_of(made)) == 3 and made.failed
    for sentence in ("System prompt: by from. The model reads", "System prompt: none.", "Name a file", "'hot'",
                     "'nowhere' cannot be read", "Temperature: 0 (greedy).", "nothing to undo",
                     "did you mean /continue or /context? /help lists all.", "'/save talk'",
                     "Unknown command '/banana': /help lists all."):  # fmt: skip
        assert sentence in notes_of(made), sentence
    assert not said(made) and made.screen.rest == ["never"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "method, options, there",
    [
        ("full", {}, "exact: all 245 tokens in memory ({0})"),
        ("kv-direct", {"checkpoint": "kv"}, "exact: 72 tokens in memory ({0}), 173 on disk ({disk})"),
        ("kv-direct", {"checkpoint": "residual", "where": "host"},
         "exact: 72 tokens in memory ({0}), 173 on host ({host})"),
        ("h2o", {}, "72 tokens in memory ({0}), 173 dropped"),
        ("kvslimmer", {}, "all 245 tokens in memory ({0})"),
        ("revive", {}, "all 245 tokens in memory ({0})"),
        ("h2o+drop+pages:2", {"checkpoint": "kv"}, "72 tokens in memory ({0}), 173 on disk ({disk})"),
    ],
)  # fmt: skip
def test_the_line_says_where_every_token_is(method: str, options: dict[str, Any], there: str) -> None:
    cache = KeepCache(tiny("llama"), method, None if method == "full" else 72, **options)
    result = Conversation(tiny("llama"), tokenizer(), cache).answer("the of and " * 80, max_new_tokens=4)
    memory = result.memory
    sizes = {place: size(count) for place, count in memory.checkpoint_bytes.items()}
    here = memory.resident_bytes + memory.compressed_bytes + memory.checkpoint_bytes["device"]
    said = there.format(size(here), **sizes)
    line = status(cache, result)
    assert line.startswith(f"{said}, ") and line.endswith(" tokens/s") and len(line) <= 80


def _stopped(answer: Any) -> Any:
    """As with Ctrl-C while the first prompt is read."""
    stops = iter([KeyboardInterrupt])

    def stopped(*given: Any, **options: Any) -> Any:
        for stop in stops:
            raise stop
        return answer(*given, **options)

    return stopped


def test_completions_and_the_page() -> None:
    assert [word for word, _ in commands.completions("/me")] == ["/method", "/memory"]
    assert {"h2o", "h2o-fisher"} & dict(commands.completions("/method h2")).keys()
    assert dict(commands.completions("/context d")) == {"drop": ""} and not list(commands.completions("what /me"))
    assert {way.value for way in AtEnd} == {ASK, *CONTINUATIONS}
    rows = [f"| `{command.usage}` | {command.help} |" for command in commands.COMMANDS.values()]
    table = re.search(r"\| command \| .*?\n\n", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert table is not None and table[0].split("\n")[2:-2] == rows
    with pytest.raises(UsageError, match="did you mean /undo"):
        commands.run(chat(), "/undoo")
