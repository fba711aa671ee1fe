"""The end of a model's positions: what a conversation can do to go on, instead of a refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvkeep.cli.chat.change import change
from kvkeep.cli.chat.showing import shown
from kvkeep.cli.chat.state import Chat
from kvkeep.errors import UsageError

ASK = "ask"
"""At the end, offer what can be done."""
LEAST = 32
"""Tokens that there has to be room for in an answer, or as many as it may have."""


@dataclass(frozen=True)
class End:
    """One way to go on. make_room: of a chat and its next question, None where the last answer goes on."""

    name: str
    help: str
    make_room: Callable[[Chat, str | None], None]


def fits(chat: Chat, tokens: int) -> bool:
    """Return whether the model has positions for an answer to so many tokens."""
    positions = chat.talk.positions
    return positions is None or tokens + min(chat.max_tokens, LEAST) <= positions


def offer(chat: Chat, tokens: int) -> None:
    """Say that the positions are used up, and what can be done."""
    chat.screen.note(f"This makes {tokens} tokens, and the model has {chat.talk.positions} positions. To go on:")
    chat.screen.table([(f"/window {end.name}", end.help) for end in ENDS.values()])


def told(chat: Chat) -> str:
    """Return a sentence on how many positions are used."""
    used, positions = len(chat.talk.last.sequence if chat.talk.last else chat.talk.ids), chat.talk.positions
    if positions is None:
        return f"{used} tokens; with this method the model's positions do not run out."
    return f"{used} of {positions} positions are used."


def _drop(chat: Chat, question: str | None) -> None:
    turns = _oldest(chat, question)
    chat.talk.forget(turns)
    chat.screen.note(f"The oldest {_turns(turns)} forgotten; what is left is read again.")


def _summary(chat: Chat, question: str | None) -> None:
    turns, talk = _oldest(chat, question), chat.talk
    chat.screen.note(f"The oldest {_turns(turns)} summarised by the model:")
    tokens = len(talk.summary_prompt(turns))
    if shown(chat, tokens, lambda **options: talk.summarise(turns, **options)) is None:
        raise UsageError("There is no summary, so nothing was changed.")
    chat.screen.note("The summary takes their place; what is left is read again.")


def _endless(chat: Chat, question: str | None) -> None:
    own, positions = getattr(chat.talk.cache, "request", None), chat.talk.positions
    if positions is None:
        raise UsageError("With this method the model's positions do not run out.")
    budget = None if own is None else own.budget
    change(chat, "streaming-llm", str(budget) if budget is not None and budget.amount else str(positions // 4))


def _oldest(chat: Chat, question: str | None) -> int:
    """Return how many turns to forget, so that half of the positions are free. Raises UsageError where none would have
    to go, or what is left is too long for the model all the same."""
    positions = chat.talk.positions
    if positions is None:
        raise UsageError("With this method the model's positions do not run out.")
    turns, tokens = chat.talk.excess(question, positions // 2)
    if not fits(chat, tokens):
        raise UsageError(
            f"Without any earlier turn there are {tokens} tokens, and the model has {positions} positions: give a "
            "shorter text, or '/window endless'."
        )
    if not turns:
        raise UsageError("Half of the positions are free, so no turn would have to go.")
    return turns


def _turns(count: int) -> str:
    return "turn is" if count == 1 else f"{count} turns are"


ENDS = {
    end.name: end
    for end in (
        End("drop", "forget the oldest turns, so that half of the positions are free", _drop),
        End("summary", "put a summary by the model in their place", _summary),
        End("endless", "method streaming-llm: the first and the newest tokens, without an end", _endless),
    )
}
"""The ways by name."""
