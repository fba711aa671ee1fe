"""Texts that a user names: a file, standard input, a word of the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO

from kvkeep.errors import EmptyText, UsageError, reason_of


def read_text(path: str) -> str:
    """Return the text of a file, or of standard input for ``-``, without a byte order mark. Raises UsageError if there
    is no readable text, EmptyText if the file is empty."""
    try:
        data = standard_input().read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"The file '{path}' cannot be read: {reason_of(error)}.") from error
    name = "standard input" if path == "-" else f"the file '{path}'"
    if b"\0" in data:
        raise UsageError(f"There is no text in {name}: it is binary; give a text file (UTF-8).")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"The text of {name} is not UTF-8 (byte {error.start}); convert it first.") from error
    if not text.strip():
        raise EmptyText(f"There is no text in {name}: it is empty.")
    return text


def standard_input() -> IO[bytes]:
    """Return standard input as bytes. Raises UsageError if it is closed."""
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("Standard input is closed, so there is nothing to read from it; redirect it from a file.")
    return sys.stdin.buffer


def check_text(text: str, name: str) -> str:
    """Return ``text``; ``name`` is its name in the error. Raises UsageError for bytes that are not UTF-8, which the
    command line and the environment pass as surrogates (PEP 383)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"The text of {name} is not UTF-8; convert it, or set the terminal to UTF-8.") from None
    return text
