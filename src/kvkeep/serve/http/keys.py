"""Who asks: bearer keys, compared in constant time. Sessions belong to a key."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence

from kvkeep.serve.http.errors import Refused

VARIABLE = "KVKEEP_API_KEYS"


class Keys:
    """The keys of a server; without any, everybody is one owner."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def owner(self, header: str | None) -> str:
        """Return whose request has this Authorization ``header``. Raises Refused for a wrong key or none."""
        if not self._digests:
            return "local"
        scheme, _, key = (header or "").partition(" ")
        given, owner = _digest(key.strip()), ""
        for digest in self._digests:  # all of them: time does not tell which one
            if hmac.compare_digest(digest, given):
                owner = digest[:16]
        if scheme.lower() != "bearer" or not owner:
            raise Refused(401, "The key is wrong or missing: send 'Authorization: Bearer KEY'.", "invalid_api_key")
        return owner


def keys_given() -> list[str]:
    """Return the keys of the environment, by commas."""
    return [key.strip() for key in os.environ.get(VARIABLE, "").split(",") if key.strip()]


def new_key() -> str:
    """Return a key that nobody has."""
    return f"kvkeep-{secrets.token_urlsafe(24)}"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
