"""Another method or budget in mid-conversation: the past is carried over, or else read again."""

from __future__ import annotations

from dataclasses import replace

from transformers.cache_utils import Cache

from kvkeep.cache import KeepCache
from kvkeep.cli.chat.state import Chat
from kvkeep.decode.chat import Conversation
from kvkeep.decode.session import check_savable
from kvkeep.errors import NotCarried
from kvkeep.policies.methods import resolve
from kvkeep.policies.request import Request
from kvkeep.stock import STOCK, new_cache, requested

NONE = "none"
"""A budget that is none."""


def switch_cache(chat: Chat, method: str | None, budget: str | None) -> None:
    """Go on with ``method`` and ``budget``, as they are where None, and say whether what was said is read again. Raises
    UsageError, and whatever a :class:`KeepCache` raises; nothing is changed then."""
    talk = chat.talk
    cache, reason = _moved(talk.cache, talk.model, wanted(talk.cache, method, budget))
    if chat.saver.session is not None:
        check_savable(cache)
    line = f"The conversation goes on with {described(cache)}"
    if not talk.turns:
        chat.screen.note(f"{line}.")
    elif _unread(talk):
        chat.screen.note(f"{line}; what was said is read before the next answer.")
    elif reason is None:
        chat.screen.note(f"{line}; nothing is read again.")
    else:
        chat.screen.note(f"{line}, and is read again before the next answer: {reason}.")
    talk.use(cache)


def _unread(talk: Conversation) -> bool:
    """Return whether the next answer reads turns anyway, as where the system prompt was changed since the last one."""
    prompt = talk.last_prompt()
    return talk.ids[: len(prompt)] != prompt


def described(cache: Cache) -> str:
    """Return method and budget of a cache in a few words."""
    if not isinstance(cache, KeepCache):
        return f"{STOCK}, transformers' own cache"
    if cache.request.budget is None:
        return f"{cache.method.name}, without a budget"
    own = "" if str(cache.request.budget) == str(cache.entries) else f" ({cache.request.budget})"
    return f"{cache.method.name} within {cache.entries} entries a layer{own}"


def wanted(cache: Cache, method: str | None, budget: str | None) -> Request | None:
    """Return the request for another ``method`` or ``budget``, with what else the cache was asked for as far as the
    method has a use for it; None for transformers' own cache. Raises UsageError."""
    if method == STOCK:
        return requested(STOCK, budget)
    own = cache.request if isinstance(cache, KeepCache) else Request.parse()
    if budget == NONE:
        name, given = method or "full", None
    elif budget is not None:
        name, given = method or (own.method.name if "budget" in own.method.options else "kv-direct"), budget
    else:
        name = method or own.method.name
        given = None if own.budget is None or "budget" not in resolve(name).options else str(own.budget)
    uses = (*resolve(name).options, "page", "context", "batch")
    return Request.parse(name, given, **{key: value for key, value in own.options().items() if key in uses})


def _moved(cache: Cache, model: object, request: Request | None) -> tuple[Cache, str | None]:
    """Return a cache of another kind with the past of ``cache``; where that cannot be, an empty one, and the reason.
    Where nobody asked for a kind of checkpoint, entries are one that takes a past over."""
    if request is None or not isinstance(cache, KeepCache):
        made = new_cache(model, STOCK) if request is None else KeepCache(model, request=request)
        return made, "transformers' own cache neither takes a past over nor hands it on"
    kinds = [None, "kv"] if request.method.checkpoints and request.checkpoint is None else [request.checkpoint]
    for kind in kinds:
        options = replace(request, checkpoint=kind).options()
        try:
            return cache.fork(request.method.name, request.budget, **options), None
        except NotCarried as error:
            reason = error.reason
    return KeepCache(model, request=request), reason
