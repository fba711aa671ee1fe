"""Lines of a system prompt that change with each session: they are near the beginning of a text, and everything after
them would be read again.

The agents' own texts have them. A header of Claude Code's billing says nothing to a model and is left out. A line with
the date goes to the beginning of the first question: it is not lost, and all sessions share what comes before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_HEADER = re.compile(r"^x-anthropic-billing-header:[^\n]{0,500}(?:\n|\Z)", re.MULTILINE)
_DATE = re.compile(
    r"^[ \t]*(?:[-*][ \t]+)?(?:today'?s date|today|(?:the )?current (?:date|time)(?: and (?:date|time))?|date)"
    r"(?::| is:?)[ \t][^\n]{0,200}(?:\n|\Z)",
    re.MULTILINE | re.IGNORECASE,
)


def steady(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a conversation whose system prompt does not change with each session, and a sentence on each thing that
    was done for it."""
    found, notes = [dict(one) for one in messages], list[str]()
    if not found or found[0]["role"] != "system":
        return found, notes
    system, headers = _HEADER.subn("", found[0]["content"])
    if headers:
        notes.append("The line 'x-anthropic-billing-header' is left out, because it changes with each session.")
    first = next((one for one in found if one["role"] == "user"), None)
    dates = [] if first is None else [hit[0].strip() for hit in _DATE.finditer(system)]
    if first is not None and dates:
        system = _DATE.sub("", system)
        first["content"] = "\n".join([*dates, "", first["content"]])
        notes.append("The date of the system prompt is moved to the first question, because it changes every day.")
    found[0]["content"] = system
    return found, notes
