"""Generates an answer, shows it, saves it, and describes it in a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvkeep.cli.chat import context_limit, long_reading
from kvkeep.cli.chat.state import Attachment, Chat
from kvkeep.cli.chat.status import Passed, limits_passed, remark, status
from kvkeep.cli.chat.streaming import STOPPED, stream_answer
from kvkeep.cli.generate import as_json
from kvkeep.decode.generate import Generation
from kvkeep.policies.endless import ENDLESS

RETRY_TEMPERATURE = 0.8
"""Temperature of a further answer if answers are greedy: all greedy answers are equal."""


def ask(chat: Chat, question: str, *files: Attachment) -> None:
    """Answer a question, after the attached files and ``files``. If the context is full, offer ways to continue; the
    question then waits, and all the files stay attached."""
    before = chat.pending, chat.attachments
    chat.pending, chat.attachments = question, [*chat.attachments, *files]
    text = with_attachments(chat, question)
    prompt = chat.talk.prompt(text)
    if not long_reading.agreed(chat, prompt):
        chat.pending, chat.attachments = before
        return
    if not _fits(chat, len(prompt), text, question):
        if chat.attachments:
            chat.screen.note(describe_attachments(chat))
        return
    chat.pending, chat.attachments = before
    prompt = chat.talk.prompt(text)
    if _answer(chat, prompt, lambda **options: chat.talk.answer(text, prompt, **options), question):
        chat.pending, chat.attachments = None, []


def with_attachments(chat: Chat, question: str) -> str:
    """Return a question after the attached files."""
    return "\n\n".join([*(file.text for file in chat.attachments), question])


def describe_attachments(chat: Chat) -> str:
    """Return a sentence on the attached files."""
    it = "it" if len(chat.attachments) == 1 else "them"
    names = " and ".join(file.path for file in chat.attachments)
    return f"Your next question will follow {names}; '/file none' removes {it}."


def retry(chat: Chat, temperature: float | None) -> None:
    """Answer the last question again, at ``temperature``; without one, sampled."""
    if not _fits(chat, len(chat.talk.last_prompt()), None, "/retry"):
        return
    chat.retries += 1
    sampling: dict[str, Any] = {"temperature": chat.temperature or RETRY_TEMPERATURE}
    sampling |= {} if temperature is None else {"temperature": temperature}
    sampling |= {} if chat.seed is None else {"seed": chat.seed + chat.retries}
    _answer(chat, chat.talk.last_prompt(), lambda **options: chat.talk.retry(**options | sampling), "/retry")


def continue_answer(chat: Chat) -> None:
    """Continue an answer that was cut."""
    if _fits(chat, len(chat.talk.unfinished().sequence), None, "/continue"):
        _answer(chat, chat.talk.unfinished().sequence, chat.talk.continue_answer, "/continue")


def save(chat: Chat) -> None:
    """Save the conversation if it has a session. An error is shown here, and raised at the end of the chat."""
    if (problem := chat.saver.save(chat.talk)) is not None:
        chat.screen.note(problem)


def _fits(chat: Chat, tokens: int, question: str | None, line: str) -> bool:
    """Return whether the context has space for an answer to a prompt of ``tokens``; ``chat.at_end`` may make space. If
    it has none, offer ways to continue, and record that ``line`` failed."""
    all_of_it = chat.max_tokens if chat.at_end == ENDLESS else None  # no answer is cut off where texts can continue
    if context_limit.fits(chat, tokens, all_of_it):
        return True
    if chat.at_end == context_limit.ASK:
        chat.fail(line, context_limit.offer(chat, tokens, question))
        return False
    context_limit.CONTINUATIONS[chat.at_end].free(chat, question)
    return True


def _answer(chat: Chat, prompt: Sequence[int], generate: Callable[..., Generation], line: str) -> bool:
    """Show the answer to ``prompt``, save it, and show the state of the cache. Return False if the user
    stopped it before its first token."""
    before = Passed.of(chat.talk.cache)
    result = stream_answer(chat, prompt, generate)
    if result is None:
        chat.fail(line, STOPPED)
        return False
    long_reading.learn(chat, result)
    chat.turns.append({"question": line, **as_json(result)})
    save(chat)
    cache = chat.talk.cache
    for text in (status(cache, result), *limits_passed(cache, before), remark(result, chat.talk.positions)):
        if text is not None:
            chat.screen.note(text)
    return True
