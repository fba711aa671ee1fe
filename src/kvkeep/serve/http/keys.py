"""Bearer keys, compared in constant time. Sessions belong to a key."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvkeep.errors import UsageError, reason_of
from kvkeep.files import make_folder, open_file
from kvkeep.models.folders import data_folder
from kvkeep.serve.http.errors import APIError

VARIABLE = "KVKEEP_API_KEYS"


class Keys:
    """The keys of a server. Without keys, all clients are one owner."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in dict.fromkeys(keys)]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, header: str | None) -> str:
        """Return the owner of a request with this Authorization ``header``. Raises APIError for a wrong or missing
        key."""
        if not self._digests:
            return "local"
        key = bearer(header)
        given, owner = _digest(key or ""), ""
        for digest in self._digests:  # compare with all of them, so that timing reveals nothing
            if hmac.compare_digest(digest, given):
                owner = digest[:16]
        if key is None or not owner:
            raise APIError(401, "The API key is wrong or missing; send 'Authorization: Bearer KEY'.", "invalid_api_key")
        return owner


def bearer(header: str | None) -> str | None:
    """Return the key in an Authorization ``header``; None without a header."""
    scheme, _, key = (header or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def keys_given(path: str | None = None) -> list[str]:
    """Return the keys of the environment, separated by commas, and those of a file: one per line, without blanks and
    ``#`` comments. Raises UsageError for a file without keys, and for a key that clients cannot send."""
    found = [key.strip() for key in os.environ.get(VARIABLE, "").split(",") if key.strip()]
    _check(found, VARIABLE)
    if path is None:
        return found
    lines = (re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip() for line in _read(Path(path)).splitlines())
    keys = [line for line in lines if line]
    if not keys:
        raise UsageError(f"The file '{path}' has no keys; write one a line.")
    _check(keys, f"'{path}'")
    return [*found, *keys]


def kept_key() -> tuple[str, Path, bool]:
    """Return this user's key, its file (readable only by the user), and whether the key is new."""
    path = data_folder() / "server-key"
    key = f"kvkeep-{secrets.token_urlsafe(24)}"
    try:
        make_folder(path.parent)
        handle = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        with suppress(OSError):  # it may be another user's, who has given it
            path.chmod(0o600)
        if not (key := _read(path).strip()):
            raise UsageError(f"The file '{path}' has no key; delete it, and a new key is made.") from None
        return key, path, False
    except OSError as error:
        raise UsageError(f"A key cannot be saved in '{path}': {reason_of(error)}.") from error
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(key + "\n")
    return key, path, True


def _check(keys: Sequence[str], where: str) -> None:
    for number, key in enumerate(keys, 1):  # an error never shows the key itself
        if not (key.isascii() and key.isprintable()):
            raise UsageError(
                f"Key {number} of {where} has characters that are not ASCII, which clients cannot send in a header; "
                "use letters, digits and punctuation."
            )
        if " " in key:
            raise UsageError(f"Key {number} of {where} contains a space; use letters, digits and punctuation.")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = (getattr(error, "strerror", None) or "it is not text").lower()
        raise UsageError(f"The key file '{path}' cannot be read: {reason}.") from error


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
