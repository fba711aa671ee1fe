"""One answer: asked for, shown, saved, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvkeep.cli.chat import window
from kvkeep.cli.chat.showing import shown
from kvkeep.cli.chat.state import Chat
from kvkeep.cli.chat.status import remark, status
from kvkeep.cli.generate import as_json
from kvkeep.decode.generate import Generation

SAMPLED = 0.8
"""The temperature of another answer where answers are greedy: those are all the same."""


def ask(chat: Chat, question: str) -> None:
    """Answer a question, with the files before it; where there are no positions for it, offer what can be done."""
    whole = "\n\n".join([*chat.attached, question])
    chat.waiting = whole
    if not _room(chat, len(chat.talk.prompt(whole)), whole):
        chat.attached.clear()  # they wait within the question
        return
    chat.waiting = None
    prompt, turns = chat.talk.prompt(whole), chat.talk.turns
    _answer(chat, len(prompt), lambda **options: chat.talk.answer(whole, prompt, **options), question)
    if chat.talk.turns > turns:  # else nothing was changed
        chat.attached.clear()


def retry(chat: Chat, temperature: float | None) -> None:
    """Answer the last question again, at ``temperature``; without one, sampled."""
    talk = chat.talk
    tokens = len(talk.last_prompt())
    chat.tries += 1
    own: dict[str, Any] = {"temperature": temperature if temperature is not None else chat.temperature or SAMPLED}
    own |= {} if chat.seed is None else {"seed": chat.seed + chat.tries}
    _answer(chat, tokens, lambda **options: talk.retry(**options | own), "/retry")


def go_on(chat: Chat) -> None:
    """Go on with an answer that was cut."""
    if _room(chat, len(chat.talk.unfinished().sequence), None):
        _answer(chat, len(chat.talk.unfinished().sequence), chat.talk.go_on, "/continue")


def save(chat: Chat) -> None:
    """Save the conversation where it has a session; an error is said, and raised at the end of the chat."""
    if (problem := chat.keeper.save(chat.talk)) is not None:
        chat.screen.note(problem)


def _room(chat: Chat, tokens: int, question: str | None) -> bool:
    """Return whether there are positions for an answer to so many tokens, which are made where the chat was told how;
    else offer what can be done."""
    if window.fits(chat, tokens):
        return True
    if chat.at_end == window.ASK:
        window.offer(chat, tokens)
        return False
    window.ENDS[chat.at_end].make_room(chat, question)
    return True


def _answer(chat: Chat, tokens: int, generate: Callable[..., Generation], asked: str) -> None:
    """Show an answer to a prompt of so many tokens, save it, and say in a line what the cache holds."""
    result = shown(chat, tokens, generate)
    if result is None:
        return
    chat.turns.append({"question": asked, **as_json(result)})
    save(chat)
    for line in (status(chat.talk.cache, result), remark(result, chat.talk.positions)):
        if line is not None:
            chat.screen.note(line)
