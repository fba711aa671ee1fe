"""One answer: asked for, shown, saved, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvkeep.cli.chat import context_limit
from kvkeep.cli.chat.state import Attachment, Chat
from kvkeep.cli.chat.status import remark, status
from kvkeep.cli.chat.streaming import STOPPED, stream_answer
from kvkeep.cli.generate import as_json
from kvkeep.decode.generate import Generation

SAMPLED = 0.8
"""The temperature of another answer where answers are greedy: those are all the same."""


def ask(chat: Chat, question: str, *files: Attachment) -> None:
    """Answer a question, with the files attached and ``files`` before it. Where there are no positions for it, offer
    what can be done; until then it waits, and all of the files are attached."""
    before = chat.pending, chat.attachments
    chat.pending, chat.attachments = question, [*chat.attachments, *files]
    asked = with_attachments(chat, question)
    if not _room(chat, len(chat.talk.prompt(asked)), asked, question):
        if chat.attachments:
            chat.screen.note(describe_attachments(chat))
        return
    chat.pending, chat.attachments = before
    prompt = chat.talk.prompt(asked)
    if _answer(chat, len(prompt), lambda **options: chat.talk.answer(asked, prompt, **options), question):
        chat.pending, chat.attachments = None, []


def with_attachments(chat: Chat, question: str) -> str:
    """Return a question with the files attached before it."""
    return "\n\n".join([*(file.text for file in chat.attachments), question])


def describe_attachments(chat: Chat) -> str:
    """Return a sentence on the files attached."""
    names = [file.path for file in chat.attachments]
    goes, it = ("goes", "it") if len(names) == 1 else ("go", "them")
    return f"{' and '.join(names)} {goes} before the next question; '/file none' takes {it} back."


def retry(chat: Chat, temperature: float | None) -> None:
    """Answer the last question again, at ``temperature``; without one, sampled."""
    talk = chat.talk
    if not _room(chat, len(talk.last_prompt()), None, "/retry"):
        return
    chat.retries += 1
    own: dict[str, Any] = {"temperature": temperature if temperature is not None else chat.temperature or SAMPLED}
    own |= {} if chat.seed is None else {"seed": chat.seed + chat.retries}
    _answer(chat, len(talk.last_prompt()), lambda **options: talk.retry(**options | own), "/retry")


def continue_answer(chat: Chat) -> None:
    """Go on with an answer that was cut."""
    if _room(chat, len(chat.talk.unfinished().sequence), None, "/continue"):
        _answer(chat, len(chat.talk.unfinished().sequence), chat.talk.go_on, "/continue")


def save(chat: Chat) -> None:
    """Save the conversation where it has a session; an error is said, and raised at the end of the chat."""
    if (problem := chat.saver.save(chat.talk)) is not None:
        chat.screen.note(problem)


def _room(chat: Chat, tokens: int, question: str | None, asked: str) -> bool:
    """Return whether there are positions for an answer to so many tokens, which are made where the chat was told how;
    else offer what can be done, and note that what was ``asked`` failed."""
    if context_limit.fits(chat, tokens):
        return True
    if chat.at_end == context_limit.ASK:
        chat.fail(asked, context_limit.offer(chat, tokens, question))
        return False
    context_limit.CONTINUATIONS[chat.at_end].make_room(chat, question)
    return True


def _answer(chat: Chat, tokens: int, generate: Callable[..., Generation], asked: str) -> bool:
    """Show an answer to a prompt of so many tokens, save it, and say in a line what the cache holds. Return False where
    it was stopped before."""
    result = stream_answer(chat, tokens, generate)
    if result is None:
        chat.fail(asked, STOPPED)
        return False
    chat.turns.append({"question": asked, **as_json(result)})
    save(chat)
    for line in (status(chat.talk.cache, result), remark(result, chat.talk.positions)):
        if line is not None:
            chat.screen.note(line)
    return True
