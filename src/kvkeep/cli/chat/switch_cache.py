"""Changes method or budget during a conversation. The new cache takes the old cache's entries, or reads the text
again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers.cache_utils import Cache

from kvkeep.blocks.sessions import check_savable
from kvkeep.cache import KeepCache
from kvkeep.cli.chat.state import Chat
from kvkeep.decode.chat import Conversation
from kvkeep.decode.generate import positions_of
from kvkeep.errors import NotCarried, UsageError
from kvkeep.policies.methods import Request, requested, resolve
from kvkeep.policies.names import STOCK
from kvkeep.stock import new_cache

NONE = "none"
"""Word for no budget, system prompt or file."""


def switch_cache(chat: Chat, method: str | None, budget: str | None) -> None:
    """Continue with ``method`` and ``budget``; None keeps the present one. Show whether the conversation is read again.
    Raises UsageError, and the errors of :class:`KeepCache`; the conversation is then unchanged."""
    talk, request = chat.talk, _request(chat.talk.cache, method, budget)
    if talk.pin is not None and request is not None:
        request = request.pinning(talk.pinned(talk.prompt("?")) or 0)
    use_request(chat, request, "The conversation continues")


def use_request(chat: Chat, request: Request | None, continues: str) -> None:
    """Do the same for a ``request``; None: transformers' cache. continues: the beginning of the line that is shown."""
    talk = chat.talk
    cache, reason = _carried_over(talk.cache, talk.model, request, talk.ids)
    limit = positions_of(talk.model, cache)
    endless = isinstance(talk.cache, KeepCache) and talk.cache.method.recall.endless
    if reason is not None and endless and limit is not None and len(talk.ids) >= limit:
        raise UsageError(
            f"The conversation has {len(talk.ids):,} tokens. The model would have to read it again for "
            f"{describe(cache)}, and its context has {limit:,}; leave method and budget as they are, or forget turns "
            "with '/undo' or '/reset'."
        )
    if chat.saver.session is not None:
        check_savable(cache)
    line = f"{continues} with {describe(cache)}"
    if not talk.turns:
        chat.screen.note(f"{line}.")
    elif _unread(talk):
        chat.screen.note(f"{line}; the model reads it before its next answer.")
    elif reason is None:
        chat.screen.note(f"{line}; nothing is read again.")
    else:
        chat.screen.note(f"{line}; the model reads it again before its next answer: {reason}.")
    talk.use(cache)


def _unread(talk: Conversation) -> bool:
    """Return whether the next answer reads turns in any case, for instance after a change of the system prompt."""
    prompt = talk.last_prompt()
    return talk.ids[: len(prompt)] != prompt


def describe(cache: Cache) -> str:
    """Return method and budget of a cache in a few words."""
    if not isinstance(cache, KeepCache):
        return f"{STOCK}, transformers' own cache"
    if cache.request.budget is None:
        return f"{cache.method.name}, without a budget"
    given = "" if str(cache.request.budget) == str(cache.entries) else f" ({cache.request.budget})"
    stored = "" if cache.request.capacity is None else f", with at most {cache.request.capacity:,} older ones"
    stored += f", the first {cache.method.pin:,} pinned" if cache.method.pin else ""
    return f"{cache.method.name} within {cache.entries} entries per layer{given}{stored}"


def _request(cache: Cache, method: str | None, budget: str | None) -> Request | None:
    """Return the request for another ``method`` or ``budget``, with the cache's other options that the method accepts;
    None for transformers' cache. Raises UsageError."""
    if method == STOCK:
        return requested(STOCK, budget)
    present = cache.request if isinstance(cache, KeepCache) else Request.parse()
    if budget == NONE:
        name, given = method or "full", None
    elif budget is not None:
        name, given = method or (present.method.name if "budget" in present.method.options else "kv-direct"), budget
    else:
        name = method or present.method.name
        given = None if present.budget is None or "budget" not in resolve(name).options else str(present.budget)
    uses = (*resolve(name).options, "page", "context", "batch")
    return Request.parse(name, given, **{key: value for key, value in present.options().items() if key in uses})


def _carried_over(cache: Cache, model: object, request: Request | None, ids: Sequence[int]) -> tuple[Cache, str | None]:
    """Return the requested cache with the entries of ``cache``, which has read ``ids``. If it cannot take them, return
    an empty cache, and the reason. Without a requested kind of checkpoint, ``kv`` is tried in addition to the default
    kind of the method."""
    if request is None or not isinstance(cache, KeepCache):
        made = new_cache(model, STOCK) if request is None else KeepCache(model, request=request)
        return made, "transformers' own cache neither takes entries over nor hands them on"
    kinds = [None, "kv"] if request.method.checkpoints and request.checkpoint is None else [request.checkpoint]
    for kind in kinds:
        options = replace(request, checkpoint=kind).options()
        try:
            return cache.fork(request.method.name, request.budget, ids=ids, **options), None
        except NotCarried as error:
            reason = error.reason
    return KeepCache(model, request=request), reason
