"""Ways to continue a conversation whose context is full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvkeep.cache import KeepCache
from kvkeep.cli.chat.state import Chat
from kvkeep.cli.chat.streaming import stream_answer
from kvkeep.cli.chat.switch_cache import use_request
from kvkeep.contracts.exactness import Exactness
from kvkeep.decode.chat import SUMMARISED, Conversation, whole_sentences
from kvkeep.decode.generate import Generation
from kvkeep.errors import KvkeepError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.endless import ENDLESS, check_keeps, endless
from kvkeep.policies.request import Request

ASK = "ask"
"""Offer the user the ways to continue."""
MIN_ANSWER_TOKENS = 32
"""Minimum free tokens for an answer, unless a smaller limit is set."""
MAX_SUMMARY_TOKENS = 256
"""Maximum tokens of a summary, independent of the limit of answers, which would truncate it."""
_NO_LIMIT = "This method has no context limit."


@dataclass(frozen=True)
class Continuation:
    """One way to continue."""

    name: str
    help: str
    free: Callable[[Chat, str | None], None]
    """Makes space for a question; None makes space for more of the last answer. Raises UsageError if it cannot."""


def chosen(given: str | None, talk: Conversation) -> str:
    """Return what to do when the context of ``talk`` is full: what the user has ``given``, or else ``endless`` if the
    method is exact and can continue so, and otherwise :data:`ASK`. Raises the reason why ``endless`` was given and
    cannot be used."""
    request = talk.cache.request if isinstance(talk.cache, KeepCache) else None
    if given == ENDLESS:
        check_keeps(request)
    elif given is not None or request is None:  # the model would have to read the text of another cache again
        return given or ASK
    if talk.positions is None:
        return given or ASK
    try:
        KeepCache(talk.model, request=_endless_request(talk))
    except KvkeepError:
        if given is not None:
            raise
        return ASK
    return ENDLESS


def fits(chat: Chat, tokens: int, answer: int | None = None) -> bool:
    """Return whether the context has space for an answer to a prompt of ``tokens``: for its first words, or for all of
    its ``answer`` tokens."""
    positions = chat.talk.positions
    return positions is None or tokens + (answer or _min_answer(chat)) <= positions


def offer(chat: Chat, tokens: int, question: str | None) -> str:
    """Show and return a sentence that the context is full, and show the ways to continue."""
    problem = _shortage(chat, tokens, question)
    chat.screen.note(f"{problem} To continue:")
    show_continuations(chat)
    return problem


def show_continuations(chat: Chat) -> None:
    """Show the ways to continue."""
    chat.screen.table([(f"/context {name}", CONTINUATIONS[name].help) for name in _ways(chat)])


def _ways(chat: Chat) -> list[str]:
    """Return the names of the ways to continue, without one that needs entries which the cache does not keep; none
    where there is no limit."""
    if chat.talk.positions is None:
        return []
    cache = chat.talk.cache
    lossy = isinstance(cache, KeepCache) and cache.method.exactness is not Exactness.EXACT
    return [name for name in CONTINUATIONS if not (lossy and name == ENDLESS)]


def _others(chat: Chat) -> str:
    """Return a sentence on the ways to continue other than a summary."""
    others = [f"'/context {name}'" for name in _ways(chat) if name != "summary"]
    return f"Use {' or '.join(others)}."


def _shortage(chat: Chat, tokens: int, question: str | None) -> str:
    """Return a sentence on a prompt of ``tokens`` for ``question``, after which there is no space for an answer."""
    positions, least = chat.talk.positions or 0, _min_answer(chat)
    if tokens > positions:
        subject = "The conversation" if question is None else "The conversation with your question"
        return f"{subject} has {tokens:,} tokens, and the model's context only {positions:,}."
    subject = "The conversation" if question is None else "Your question"
    need = f"at least {least} {'is' if least == 1 else 'are'} needed"
    return f"{subject} leaves {positions - tokens or 'none'} of {positions:,} tokens for an answer; {need}."


def usage(chat: Chat) -> str:
    """Return a sentence on how full the context is."""
    used, positions = chat.talk.used, chat.talk.positions
    return f"{used} tokens. {_NO_LIMIT}" if positions is None else f"{used:,} of {positions:,} tokens are used."


def _drop(chat: Chat, question: str | None) -> None:
    turns = _oldest(chat, question)
    chat.talk.forget(turns)
    chat.screen.note(f"The oldest {_turns(turns)} forgotten; the model reads the rest again.")


def _summary(chat: Chat, question: str | None) -> None:
    turns, talk = _oldest(chat, question), chat.talk
    if turns == 1 and talk.messages[-2 * talk.turns]["content"] == SUMMARISED:
        raise UsageError(f"The conversation has only a summary left to forget. {_others(chat)}")
    prompt, limit = talk.summary_prompt(turns), (talk.positions or 0) - _min_answer(chat)
    space = limit - talk.summarised(turns, question)
    if space < _min_answer(chat) or not fits(chat, len(prompt)):
        raise UsageError(f"A summary does not fit into the context of {talk.positions:,} tokens. {_others(chat)}")
    chat.screen.note(f"The oldest {_turns(turns)} summarised by the model:")

    def summarise(**options: Any) -> Generation:
        return talk.summarise(turns, question, limit, **options | {"max_new_tokens": min(MAX_SUMMARY_TOKENS, space)})

    written = stream_answer(chat, prompt, summarise)
    if written is None:
        raise UsageError("There is no summary, so nothing was changed.")
    cut = written.stopped != "eos" and whole_sentences(written.text) != written.text.strip()
    subject = f"The summary was cut off after {len(written.tokens)} tokens; its whole sentences replace"
    chat.screen.note(f"{subject if cut else 'It replaces'} them; the model reads the rest again.")


def _endless(chat: Chat, question: str | None) -> None:
    positions = chat.talk.positions
    if positions is None:
        raise UsageError(_NO_LIMIT)
    full = question is not None or not fits(chat, chat.talk.used, chat.max_tokens)
    reason = f"The context of {positions:,} tokens is full, so the" if full else "The"
    use_request(chat, _endless_request(chat.talk), f"{reason} conversation continues")


def _endless_request(talk: Conversation) -> Request:
    present = talk.cache.request if isinstance(talk.cache, KeepCache) else Request.parse()
    return endless(present, ModelGeometry.of(talk.model))


def _oldest(chat: Chat, question: str | None) -> int:
    """Return the number of oldest turns to remove, so that half of the context is free. Raises UsageError if no turn
    has to be removed, or removing turns is not enough."""
    positions = chat.talk.positions
    if positions is None:
        raise UsageError(_NO_LIMIT)
    if question is None and not chat.talk.turns:
        raise UsageError("The conversation is empty, so there is nothing to forget.")
    turns, tokens = chat.talk.excess(question, positions // 2)
    if not fits(chat, tokens):
        problem = _shortage(chat, tokens, question)
        endless = ", or use '/context endless'" if ENDLESS in _ways(chat) else ""
        raise UsageError(
            f"Even without the earlier turns, {problem[:1].lower()}{problem[1:]} Give a shorter text{endless}."
        )
    if not turns and tokens > positions // 2:
        raise UsageError(
            f"The last turn takes {tokens:,} of {positions:,} tokens, and there is no earlier one to forget."
        )
    if not turns:
        raise UsageError("Half of the context is free already.")
    return turns


def _min_answer(chat: Chat) -> int:
    return min(chat.max_tokens, MIN_ANSWER_TOKENS)


def _turns(count: int) -> str:
    return "turn is" if count == 1 else f"{count} turns are"


CONTINUATIONS = {
    way.name: way
    for way in (
        Continuation("drop", "forget the oldest turns, so that half of the context is free", _drop),
        Continuation("summary", "replace the oldest turns by a summary that the model writes", _summary),
        Continuation(ENDLESS, "keep all turns, and recall parts of the older ones (method endless)", _endless),
    )
}
"""The ways to continue, by name."""
