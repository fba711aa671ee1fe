"""The end of a model's positions: what a conversation can do to go on, instead of a refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvkeep.cli.chat.state import Chat
from kvkeep.cli.chat.streaming import stream_answer
from kvkeep.cli.chat.switch_cache import switch_cache
from kvkeep.decode.chat import SUMMARISED, whole_sentences
from kvkeep.decode.generate import Generation
from kvkeep.errors import UsageError

ASK = "ask"
"""At the end, offer what can be done."""
MIN_ANSWER_TOKENS = 32
"""Tokens that there has to be room for in an answer, or as many as it may have."""

MAX_SUMMARY_TOKENS = 256
"""Tokens of a summary at most, whatever answers may have: half of one is no summary."""


@dataclass(frozen=True)
class Continuation:
    """One way to go on. make_room: of a chat and its next question, None where the last answer goes on."""

    name: str
    help: str
    make_room: Callable[[Chat, str | None], None]


def fits(chat: Chat, tokens: int) -> bool:
    """Return whether the model has positions for an answer to so many tokens."""
    positions = chat.talk.positions
    return positions is None or tokens + _min_answer(chat) <= positions


def offer(chat: Chat, tokens: int, question: str | None) -> str:
    """Show and return a sentence that the positions are used up, and show the ways to go on."""
    problem = _shortage(chat, tokens, question)
    chat.screen.note(f"{problem} To go on:")
    chat.screen.table([(f"/window {way.name}", way.help) for way in CONTINUATIONS.values()])
    return problem


def _shortage(chat: Chat, tokens: int, question: str | None, start: str = "") -> str:
    """Return a sentence, which may begin with ``start``, on a prompt of so many tokens for ``question``, after which
    there are too few positions for an answer."""
    positions, least = chat.talk.positions or 0, _min_answer(chat)
    if tokens > positions:
        what = "the conversation" + (" with your question" if question is not None else "")
        line = f"{start}{what} has {tokens:,} tokens, and the model only {positions:,} positions."
    else:
        what = "the conversation" if question is None else "your question"
        left, need = positions - tokens or "none", f"at least {least} {'is' if least == 1 else 'are'} needed"
        line = f"{start}{what} leaves {left} of {positions:,} positions for an answer; {need}."
    return line[0].upper() + line[1:]


def usage(chat: Chat) -> str:
    """Return a sentence on how many positions are used."""
    used, positions = chat.talk.used, chat.talk.positions
    if positions is None:
        return f"{used} tokens; with this method the model's positions do not run out."
    return f"{used:,} of {positions:,} positions are used."


def _drop(chat: Chat, question: str | None) -> None:
    turns = _oldest(chat, question)
    chat.talk.forget(turns)
    chat.screen.note(f"The oldest {_turns(turns)} forgotten; what is left is read again.")


def _summary(chat: Chat, question: str | None) -> None:
    turns, talk = _oldest(chat, question), chat.talk
    if turns == 1 and talk.messages[-2 * talk.turns]["content"] == SUMMARISED:
        raise UsageError("All that could go is a summary already; '/window drop' and '/window endless' go on.")
    tokens, limit = len(talk.summary_prompt(turns)), (talk.positions or 0) - _min_answer(chat)
    room = limit - talk.summarised(turns, question)
    if room < _min_answer(chat) or not fits(chat, tokens):
        raise UsageError(
            f"A summary has no room in the {talk.positions:,} positions of the model, so nothing was changed; "
            "'/window drop' and '/window endless' go on."
        )
    chat.screen.note(f"The oldest {_turns(turns)} summarised by the model:")

    def summarise(**options: Any) -> Generation:
        return talk.summarise(turns, question, limit, **options | {"max_new_tokens": min(MAX_SUMMARY_TOKENS, room)})

    written = stream_answer(chat, tokens, summarise)
    if written is None:
        raise UsageError("There is no summary, so nothing was changed.")
    cut = written.stopped != "eos" and whole_sentences(written.text) != written.text.strip()
    which = f"The summary was cut after {len(written.tokens)} tokens; its whole sentences take" if cut else "It takes"
    chat.screen.note(f"{which} their place, and what is left is read again.")


def _endless(chat: Chat, question: str | None) -> None:
    own, positions = getattr(chat.talk.cache, "request", None), chat.talk.positions
    if positions is None:
        raise UsageError("With this method the model's positions do not run out.")
    budget = None if own is None else own.budget
    switch_cache(chat, "streaming-llm", str(budget) if budget is not None and budget.amount else str(positions // 4))


def _oldest(chat: Chat, question: str | None) -> int:
    """Return how many turns to forget, so that half of the positions are free. Raises UsageError where none would have
    to go, or what is left is too long for the model all the same."""
    positions = chat.talk.positions
    if positions is None:
        raise UsageError("With this method the model's positions do not run out.")
    if question is None and not chat.talk.turns:
        raise UsageError("Nothing was said yet, so there is nothing to forget.")
    turns, tokens = chat.talk.excess(question, positions // 2)
    if not fits(chat, tokens):
        lacking = _shortage(chat, tokens, question, "without any earlier turn ")
        raise UsageError(f"{lacking} Give a shorter text, or '/window endless'.")
    if not turns and tokens > positions // 2:
        raise UsageError(
            f"The newest turn alone takes {tokens:,} of {positions:,} positions, and no other is there to go."
        )
    if not turns:
        raise UsageError("Half of the positions are free, so no turn would have to go.")
    return turns


def _min_answer(chat: Chat) -> int:
    return min(chat.max_tokens, MIN_ANSWER_TOKENS)


def _turns(count: int) -> str:
    return "turn is" if count == 1 else f"{count} turns are"


CONTINUATIONS = {
    way.name: way
    for way in (
        Continuation("drop", "forget the oldest turns, so that half of the positions are free", _drop),
        Continuation("summary", "put a summary by the model in their place", _summary),
        Continuation("endless", "method streaming-llm: the first and the newest tokens, without an end", _endless),
    )
}
"""The ways by name."""
