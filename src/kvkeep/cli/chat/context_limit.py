"""Ways to continue a conversation whose context is full."""

from __future__ import annotations

from kvkeep.cache import KeepCache
from kvkeep.cli.chat.state import Chat
from kvkeep.cli.chat.switch_cache import use_request
from kvkeep.contracts.exactness import Exactness
from kvkeep.decode.chat import Conversation
from kvkeep.errors import KvkeepError, UsageError, unknown
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.endless import ENDLESS, check_keeps, endless
from kvkeep.policies.methods import Request

ASK = "ask"
"""Refuse the question, and name the ways to continue."""
MIN_ANSWER_TOKENS = 32
"""Minimum free tokens for an answer, unless a smaller limit is set."""
_NO_LIMIT = "This method has no context limit."


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
    return positions is None or tokens + (answer or min(chat.max_tokens, MIN_ANSWER_TOKENS)) <= positions


def make_space(chat: Chat, tokens: int, question: str | None) -> None:
    """Continue in the way of ``chat.at_end``. question: the one that does not fit; None: the last answer goes on.
    Raises UsageError if the way is to ask, or does not help."""
    if chat.at_end == ASK:
        raise UsageError(f"{_shortage(chat, tokens, question)} {ways(chat)}")
    continue_with(chat, chat.at_end, question)


def continue_with(chat: Chat, way: str, question: str | None) -> None:
    """Make space for a question, or with None for more of the last answer. Raises UsageError if the way cannot."""
    if way not in CONTINUATIONS:
        raise unknown("way to continue", way, CONTINUATIONS)
    if chat.talk.positions is None:
        raise UsageError(_NO_LIMIT)
    CONTINUATIONS[way](chat, question)


def ways(chat: Chat) -> str:
    """Return a sentence on the ways to continue."""
    cache = chat.talk.cache
    lossy = isinstance(cache, KeepCache) and cache.method.exactness is not Exactness.EXACT
    endless = "" if lossy else ", '/context endless' keeps all turns and recalls parts of the older ones"
    return f"'/context drop' forgets the oldest turns{endless}."


def usage(chat: Chat) -> str:
    """Return a sentence on how full the context is, and on the ways to continue."""
    used, positions = chat.talk.used, chat.talk.positions
    if positions is None:
        return f"{used:,} tokens. {_NO_LIMIT}"
    return f"{used:,} of {positions:,} tokens are used. {ways(chat)}"


def _shortage(chat: Chat, tokens: int, question: str | None) -> str:
    """Return a sentence on a prompt of ``tokens`` after which there is no space for an answer."""
    subject = "The conversation" if question is None else "The conversation with your question"
    return f"{subject} has {tokens:,} tokens, too many for an answer in the model's context of {chat.talk.positions:,}."


def _drop(chat: Chat, question: str | None) -> None:
    """Forget the oldest turns, so that half of the context is free."""
    talk, half = chat.talk, (chat.talk.positions or 0) // 2
    turns, tokens = talk.excess(question, half) if talk.turns or question is not None else (0, 0)
    if not fits(chat, tokens):
        remedy = "Forgetting the earlier turns is not enough; give a shorter text."
        raise UsageError(f"{_shortage(chat, tokens, question)} {remedy}")
    if not turns:
        raise UsageError("There is no earlier turn to forget.")
    talk.forget(turns)
    chat.screen.note(
        f"The oldest {'turn is' if turns == 1 else f'{turns} turns are'} forgotten; the model reads the rest again."
    )


def _endless(chat: Chat, question: str | None) -> None:
    """Keep all turns, and recall parts of the older ones."""
    use_request(chat, _endless_request(chat.talk), "Beyond the model's context, the conversation continues")


def _endless_request(talk: Conversation) -> Request:
    present = talk.cache.request if isinstance(talk.cache, KeepCache) else Request.parse()
    return endless(present, ModelGeometry.of(talk.model))


CONTINUATIONS = {"drop": _drop, ENDLESS: _endless}
"""The ways to continue, by name."""
