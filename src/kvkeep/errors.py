"""Errors of one sentence: what is wrong, why, and what to do.

The command line prints the sentence and exits with ``exit_code``; library users catch :class:`KvkeepError` or a
subclass.
"""

from __future__ import annotations

import errno
import logging
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

log = logging.getLogger(__name__)


class KvkeepError(Exception):
    """The base class; ``exit_code``: the exit code of the command line."""

    exit_code = 1


class UsageError(KvkeepError, ValueError):
    """The request itself is wrong (an unknown name, an impossible value)."""

    exit_code = 2


class ModelError(KvkeepError):
    """A model could not be found, read or trusted."""


class ModelTooLarge(ModelError, MemoryError):
    """There was not enough memory to load a model."""


class UnsupportedModelError(ModelError):
    """The method does not support the model's architecture."""


class OutOfMemory(KvkeepError, MemoryError):
    """There was not enough memory, or no further thread could be started. A cache is then as it was before the pass,
    where its method allows that (:meth:`~kvkeep.passes.stream.CacheStream.roll_back`)."""


class BadCall(KvkeepError, ValueError):
    """A step, or a call of the native library, is refused, and nothing was written: a tensor breaks ``rule``."""

    def __init__(self, rule: str) -> None:
        super().__init__(
            f"A call is refused, and nothing was written: {rule}. This is an error of kvkeep or of an installed part; "
            "use another method, and report it."
        )
        self.rule = rule


class EmptyText(UsageError):
    """A file has no text."""


class BudgetError(UsageError):
    """A cache budget is too small; the message names the smallest possible one."""


class NotCarried(UsageError):
    """The past of one cache cannot be put into another of method ``name``; ``reason`` is why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"The entries of a cache cannot be moved into a cache of method '{name}': {reason}.")
        self.reason = reason


class StoreError(KvkeepError):
    """Entries could not be stored in the place requested (full disk, read-only folder)."""


class EntriesLost(StoreError):
    """Entries on disk cannot be read, or differ from what was written."""

    def __init__(self) -> None:
        super().__init__(
            "The disk does not return what was written to it, so entries of the text are lost, and the text has to be "
            "read again. Check the disk, or keep the entries in memory (--where host)."
        )


class BlockMissing(StoreError):
    """There is no such block."""


class BlockDamaged(StoreError):
    """The file of a block is not as it was written; the message is a part of a sentence."""


class BlockVersion(StoreError):
    """The file of a block is of another version of kvkeep; it is neither read nor changed."""


class SessionError(KvkeepError):
    """A saved cache cannot be continued (another model, a truncated file)."""


class SessionBusy(SessionError):
    """Another program, or an answer that is being written, uses the session."""


class SessionDamaged(SessionError):
    """The file of a session is not as it was written."""


class SessionUnwritable(SessionError):
    """The file of a session could not be written (full disk, read-only folder)."""


class NoStore(UsageError, SessionUnwritable):
    """A folder is no store of sessions, and cannot become one (other files, another version)."""


class SessionVersion(SessionError):
    """Another version of kvkeep has saved the session; it is neither read nor changed."""


class QueueFull(KvkeepError):
    """The server's queue is full; retry later."""


class EngineStopping(KvkeepError):
    """The server's engine is shutting down and accepts no requests."""


class SessionMismatch(UsageError):
    """A request names another method or budget than its session has."""


class PromptTooLong(UsageError):
    """A prompt leaves no position for an answer."""

    @classmethod
    def of(cls, tokens: int | str, positions: int) -> PromptTooLong:
        """Return the error for a prompt of ``tokens`` in a context of ``positions``."""
        return cls(  # agents shorten their conversations when they read the first half
            f"The prompt is too long: {tokens} tokens > {positions - 1} maximum, as the model's context has "
            f"{positions}; shorten the prompt, or, with an exact method, start kvkeep serve --at-end endless, or send "
            "kvkeep.at_end 'endless' with every request of the session."
        )


def unknown(kind: str, name: str, known: Iterable[str], lists: str = "") -> UsageError:
    """Return the error for an unknown name, with near matches and all known names; of many, what ``lists`` them."""
    names = sorted(known)
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    rest = f"{lists} lists all" if lists else f"known are {', '.join(names)}"
    return UsageError(f"Unknown {kind} '{name}': {hint}{rest}.")


class Interrupted(KvkeepError):
    """Ctrl-C stopped the command."""


class Stopped(Interrupted):
    """Ctrl-C stopped a command that resumes when repeated; the exit code is a shell's for Ctrl-C."""

    exit_code = 130


def place_of(error: BaseException) -> str:
    """Return the kind of an error and the line that it comes from, for logs: its words may be those of a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"


def reason_of(error: Exception) -> str:
    """Return an error of the system as a part of a sentence, such as "no space left on device"."""
    return (getattr(error, "strerror", None) or str(error)).lower()


_SAID = ("allocate memory", "not enough memory", "out of memory", "bad_alloc", "bad alloc", "failed to map segment",
         "start new thread", "os error 12", "threadpoolbuilderror")  # fmt: skip
"""What libraries say, in lower case, if they find no memory or cannot start a thread. torch has no class for it."""
_RUST = ("SafetensorError", "PanicException")
"""Errors of libraries written in Rust; the second is no Exception."""


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error``, or an error that it was raised from, says that memory of the process or of a device is
    exhausted, or that no further thread can be started, which takes memory as well."""
    for _ in range(16):
        if error is None:
            return False
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        if getattr(error, "errno", None) == errno.ENOMEM or _says_so(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _says_so(error: BaseException) -> bool:
    """Return whether an error's words are about memory. Those of other kinds may quote a path or a text."""
    quotes = isinstance(error, OSError) and error.errno is not None
    known = isinstance(error, RuntimeError | ImportError | OSError | SystemError)
    if quotes or not (known or type(error).__name__ in _RUST):
        return False
    said = str(error).lower()
    return any(one in said for one in _SAID)


def release(error: BaseException | None) -> None:
    """Free what the frames of a handled error hold, such as the activations of a failed pass."""
    for _ in range(16):
        if error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__


def out_of_memory(doing: str, error: BaseException | None = None) -> OutOfMemory:
    """Return the error for memory that ran out during ``doing`` ("reading 512 tokens"). error: its cause."""
    found = OutOfMemory(f"There was not enough memory for {doing}; use a smaller budget, text or model.")
    found.__cause__ = error
    return found


@contextmanager
def naming_memory(doing: str) -> Iterator[None]:
    """Within the block, or the function that it decorates, an error for lack of memory becomes OutOfMemory. doing: as
    in :func:`out_of_memory`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemory) or not ran_out_of_memory(error):
            raise
        release(error)
        raise out_of_memory(doing, error) from error


@contextmanager
def trial(what: str) -> Iterator[None]:
    """Within the block ``what`` is tried. An error as a model of another layout causes it ends the block, and is
    logged; an error for lack of memory is raised."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, RuntimeError, ValueError) as error:
        if ran_out_of_memory(error):
            raise
        log.debug("%s: %s", what, error)
