"""Sessions: a cache is saved to a file, and continued later without reading its tokens again.

The file (:mod:`~kvkeep.decode.session_file`) holds the resident entries of every layer, and the checkpoint's rows, ids
and positions. It also holds the method, the budget, the lengths, and the fingerprints of model and tokenizer. A save
appends the changes after the previous save.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvkeep import transfer
from kvkeep.cache import KeepCache
from kvkeep.decode.session_file import NAME_OF_IDS, SessionFile, empty
from kvkeep.decode.session_layout import check_restored, check_shares, check_tensors
from kvkeep.errors import KvkeepError, SessionDamaged, SessionError, UsageError
from kvkeep.memory.extent import ShapeError
from kvkeep.memory.rows import Rows
from kvkeep.models.fingerprint import fingerprint
from kvkeep.models.sharded import processes
from kvkeep.policies.request import Request

_MAX_SLOTS = 2**31  # slots are int32
_HEADER: dict[str, tuple[type, ...]] = {
    "fingerprint": (str,),
    "tokenizer": (str, type(None)),
    "family": (str,),
    "method": (str,),
    "budget": (str, type(None)),
    "options": (dict,),
    "entries": (int, type(None)),
    "chunk": (int,),
    "past": (dict,),
    "notes": (dict,),
}
_PAST: dict[str, tuple[type, ...]] = {
    **{"length": (int,), "rows": (int,), "first": (dict,)},
    **{"uneven": (bool,), "shares": (list, type(None))},
}


@dataclass
class Session:
    """A cache, and the data saved with it."""

    cache: KeepCache
    ids: list[list[int]]
    """Ids of the tokens in the cache, by row."""
    notes: dict[str, Any] = field(default_factory=dict)
    """JSON data of the program."""
    tokenizer: str | None = None
    """The fingerprint of the tokenizer that made the ids; None if there was none."""


Where = str | os.PathLike[str] | SessionFile
"""A path, or a session open for writing."""


def save_session(where: Where, session: Session, *, anew: bool = False) -> None:
    """Save ``session`` as one transaction: append the changes after the previous save. A link is followed; the file
    keeps its mode. anew: rewrite the file without data of earlier saves.

    Raises SessionError if the cache cannot be saved, another program has the session open, or the file cannot be
    written. Earlier turns then remain saved.
    """
    about, parts = _described(session)
    with nullcontext(where) if isinstance(where, SessionFile) else SessionFile(where, writing=True) as file:
        past = {} if file.about is None else file.about.get("past")
        before = past.get("length") if isinstance(past, dict) else None
        added = session.cache.get_seq_length() - before if type(before) is int else 0
        file.save(parts, about, added, anew=anew)


def _described(session: Session) -> tuple[dict[str, Any], dict[str, Tensor | Rows]]:
    """Return the saved data of a session: plain types, and tensors by name."""
    cache = session.cache
    check_savable(cache)
    if any(len(row) != cache.get_seq_length() for row in session.ids):
        raise UsageError(f"A session needs the ids of all {cache.get_seq_length()} tokens of its cache.")
    about = {
        "fingerprint": fingerprint(cache.model),
        "tokenizer": session.tokenizer,
        "family": cache.geometry.model_type,
        "method": cache.method.name,
        "budget": None if cache.request.budget is None else str(cache.request.budget),
        "options": cache.request.options(),
        "entries": cache.entries,
        "chunk": cache.stream.chunk,
        "past": transfer.header(cache),
        "notes": session.notes,
    }
    return about, transfer.parts(cache) | {NAME_OF_IDS: torch.tensor(session.ids, dtype=torch.int32)}


def check_savable(cache: Cache) -> None:
    """Raise SessionError if a cache of this kind cannot be saved."""
    if not isinstance(cache, KeepCache):
        raise SessionError("A session with transformers' own cache cannot be saved; use method 'full'.")
    if (parts := processes(cache.model)) > 1:
        raise SessionError(f"The session cannot be saved: its heads are split over {parts} processes.")
    if others := cache.geometry.other_layers:
        raise SessionError(
            f"The session cannot be saved: '{cache.geometry.model_type}' has a '{others[0].kind}' layer, whose state "
            "is not keys and values."
        )


def load_session(where: Where, model: Any, tokenizer: str | None = None, cache: KeepCache | None = None) -> Session:
    """Return the saved session, ready to continue with ``model``. tokenizer: the required fingerprint of the ids'
    tokenizer; None: any. cache: an empty cache of the right kind (:func:`request_of`) to fill; None: a new one is made.

    Everything in the file is checked before it is used. Raises SessionError for a file that is not a session, is
    damaged (SessionDamaged), or was saved with another model or tokenizer.
    """
    if isinstance(where, SessionFile):
        return _loaded(where, model, tokenizer, cache)
    with SessionFile(where) as file:
        return _loaded(file, model, tokenizer, cache)


def request_of(file: SessionFile, model: Any, tokenizer: str | None = None) -> Request:
    """Return the cache request that a saved session needs to continue with ``model``. The model is not run, and no
    tensor of the file is read. Raises as :func:`load_session`."""
    with naming(file):
        return _request(file, model, tokenizer)


def _loaded(file: SessionFile, model: Any, tokenizer: str | None, cache: KeepCache | None) -> Session:
    with naming(file):
        return _restored(file, model, tokenizer, cache)


@contextmanager
def naming(file: SessionFile) -> Iterator[None]:
    """Name the session in errors raised within the block."""
    if file.about is None:
        raise empty(file.path)
    try:
        yield
    except SessionError as error:
        raise type(error)(f"The session '{file.path}' cannot be continued: {error}") from error.__cause__
    except KvkeepError as error:  # this machine lacks a method or a folder
        raise SessionError(f"The session '{file.path}' cannot be continued here: {error}") from error


def _request(file: SessionFile, model: Any, tokenizer: str | None) -> Request:
    about = file.about
    _check_types(about, _HEADER, "header")
    if about["fingerprint"] != fingerprint(model):
        raise SessionError(
            f"it was saved with another model (a '{about['family']}' model with other weights, dtype or layers); load "
            "that one, or start a new session."
        )
    if tokenizer is not None and about["tokenizer"] not in (None, tokenizer):
        raise SessionError(
            "it was saved with another tokenizer, whose token ids differ; load that one, or start a new session."
        )
    try:
        request = Request.parse(about["method"], about["budget"], **about["options"])
    except TypeError as error:
        raise _odd("its options are not those of a cache") from error
    if request.options() != about["options"]:
        raise _odd("its options are not those of a cache")
    return request


def _restored(file: SessionFile, model: Any, tokenizer: str | None, cache: KeepCache | None) -> Session:
    request, about = _request(file, model, tokenizer), file.about
    cache = KeepCache(model, request=request) if cache is None else cache
    past = about["past"]
    _check_types(past, _PAST, "past")
    numbers = [past["length"], past["rows"], *past["first"].values()]
    if not all(type(number) is int and 0 <= number < _MAX_SLOTS for number in numbers):
        raise _odd("its state has numbers out of range")
    try:
        if past["shares"] is not None:
            check_shares(cache, past["shares"], past["rows"])
            cache.recompose(past["shares"])
        if (cache.entries, cache.stream.chunk) != (about["entries"], about["chunk"]):
            raise SessionError(
                f"it was saved with {about['entries']} entries per layer and chunks of {about['chunk']} tokens; "
                f"here its budget gives {cache.entries} entries and chunks of {cache.stream.chunk}. Start a new "
                "session."
            )
        check_tensors(cache, file.stored, past)
        names = set(file.stored) - {NAME_OF_IDS}
        transfer.restore(cache, names, file.tensor, past)
        check_restored(cache, file, past)
    except ShapeError as error:
        raise _odd(str(error)) from error
    except KvkeepError:
        raise
    except Exception as error:  # restoring malformed tensors may raise anything
        if file.closed:
            raise SessionError("its file was closed while it was read; retry.") from error
        raise _odd(f"its tensors are not those of a cache of method '{cache.method.name}'") from error
    return Session(cache, file.tensor(NAME_OF_IDS).tolist(), about["notes"], about["tokenizer"])


def _check_types(value: Any, schema: Mapping[str, tuple[type, ...]], what: str) -> None:
    if type(value) is not dict or set(value) != set(schema):
        raise _odd(f"its {what} has other names than expected")
    for name, kinds in schema.items():
        if type(value[name]) not in kinds:
            raise _odd(f"its {what} has a '{name}' of the wrong type")


def _odd(reason: str) -> SessionDamaged:
    return SessionDamaged(f"it is not as kvkeep writes it ({reason}); start a new one.")
