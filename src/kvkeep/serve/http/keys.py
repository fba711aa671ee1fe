"""The keys of a server: of the environment, of a file, and the one that is made for a user."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvkeep.errors import UsageError, reason_of
from kvkeep.files import make_folder, open_file
from kvkeep.models.folders import data_folder

VARIABLE = "KVKEEP_API_KEYS"


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
        raise UsageError(f"The file '{path}' contains no keys; write one per line.")
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


def digest_of(key: str) -> str:
    """Return the digest of a key, by which a server knows it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def owner_of(digest: str) -> str:
    """Return the owner of what clients with the key of this digest store."""
    return digest[:16]


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
