"""The data of a session's reference, checked before it is used: another program may have written it."""

from __future__ import annotations

import math
import re
from typing import Any

from kvkeep.errors import SessionDamaged, SessionVersion

MAX_SLOTS = 2**31
"""Slots and token ids are int32."""
_MAX_NUMBER = 2**63
MAX_DEPTH = 200
"""The maximum number of levels of a session's notes and of other tables of a reference."""
_BLOCK = re.compile(r"[0-9a-fx][0-9a-f]{31}")
_HEADER: dict[str, Any] = {
    "fingerprint": str,
    "tokenizer": str | None,
    "family": str,
    "method": str,
    "budget": str | None,
    "options": dict,
    "entries": int | None,
    "chunk": int,
    "past": dict,
    "notes": dict,
    "ids": list,
    "blocks": list,
    "by_token": dict,
    "state": str,
    "state_bytes": int,
    "block_bytes": int,
    "created": float,
    "saved": float,
}


def checked(about: Any) -> dict[str, Any]:
    """Return a reference's data, whose types and ranges are right. Raises SessionDamaged and SessionVersion."""
    if type(about) is not dict:
        raise damaged("its header is no table")
    check_version(about)
    for name, kind in _HEADER.items():
        value = about[name]
        if not isinstance(value, kind) or (isinstance(value, float) and not math.isfinite(value)):
            raise damaged(f"its header has a '{name}' of the wrong type")
        if isinstance(value, int) and not -1 < value < _MAX_NUMBER:
            raise damaged(f"its header has a '{name}' that is out of range")
        if isinstance(value, str) and not value.isprintable():
            raise damaged(f"its header has a '{name}' that cannot be printed")
    if not all(isinstance(key, str) and _BLOCK.fullmatch(key) for key in [*about["blocks"], about["state"]]):
        raise damaged("it has invalid names of blocks")
    if any(too_deep(about[name]) for name in ("notes", "options", "past", "by_token")):
        raise damaged("its header has too many levels")
    length, rows, ids = about["past"].get("length"), about["past"].get("rows"), about["ids"]
    if not all(type(one) is int and 0 <= one < MAX_SLOTS for one in (length, rows)):
        raise damaged("it has an invalid number of tokens")
    if not all(type(row) is list and all(type(one) is int and 0 <= one < MAX_SLOTS for one in row) for row in ids):
        raise damaged("it has invalid token ids")
    if any(len(row) != length for row in ids) or (length and len(ids) != rows):
        raise damaged("it has the ids of other tokens")
    return dict(about)


def too_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Return whether plain data has more than so many levels of tables and lists."""
    if not isinstance(value, dict | list | tuple):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(too_deep(one, levels - 1) for one in inner)


def check_version(about: dict[str, Any]) -> None:
    """Raise SessionVersion unless a reference's data has the names that this version of kvkeep writes."""
    others, missing = sorted(map(str, set(about) - set(_HEADER))), sorted(set(_HEADER) - set(about))
    if not (others or missing):
        return
    name = ascii((others or missing)[0])[:40]
    what = f"has {name}, which this one does not know" if others else f"lacks {name}"
    raise SessionVersion(
        f"it was saved by another version of kvkeep (it {what}); use that version, or start a new session."
    )


def damaged(reason: str) -> SessionDamaged:
    """Return the error for a session whose checksums hold and whose content is none of kvkeep's."""
    return SessionDamaged(f"it is not as kvkeep writes it ({reason}); start a new one.")
