"""Errors a person reads: one sentence that says what is wrong, why, and what to do.

The command line prints the sentence and leaves with ``exit_code``; a library user catches
:class:`KvkeepError` or the subclass that fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class KvkeepError(Exception):
    """Something could not be done; ``exit_code`` is what the command line leaves with."""

    exit_code = 1


class UsageError(KvkeepError, ValueError):
    """The request itself is wrong (an unknown name, an impossible value)."""

    exit_code = 2


class ModelError(KvkeepError):
    """A model could not be found, read or trusted."""


class UnsupportedModelError(ModelError):
    """The model was read, but its architecture cannot be served by the method asked for."""


class BudgetError(UsageError):
    """A cache budget that cannot be met; the message names the smallest that would do."""


class StoreError(KvkeepError):
    """Entries could not be kept where they were asked to live (full disk, read-only folder)."""


class SessionError(KvkeepError):
    """A saved cache cannot be continued (another model, a truncated file)."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a name nobody knows, with the near matches and the whole list."""
    names = sorted(known)
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return UsageError(f"Unknown {kind} '{name}': {hint}known are {', '.join(names)}.")


class Interrupted(KvkeepError):
    """A person stopped it."""


class Stopped(Interrupted):
    """A person stopped work that goes on from there when it is started again; the code is a shell's for Ctrl-C."""

    exit_code = 130
