"""Forms of answers, as texts that the library llguidance compiles (:mod:`kvkeep.engine.grammar`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvkeep.plugins import optional

JSON_SPACE = {"whitespace_pattern": r"[ \n\t]{0,16}"}
"""Between the values of JSON. Without a limit, small models write spaces until the answer's last token."""


def llguidance() -> Any:
    """Return the library. Raises UsageError where it is not installed."""
    return optional("llguidance", "serve")


def of_schema(schema: Mapping[str, Any]) -> str:
    """Return the form of JSON with a JSON Schema."""
    return str(llguidance().LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_SPACE))


def of_regex(pattern: str) -> str:
    """Return the form of a text that a regular expression describes as a whole."""
    return str(llguidance().LLMatcher.grammar_from_regex(pattern))


def of_lark(grammar: str) -> str:
    """Return the form of a grammar in Lark's notation."""
    return str(llguidance().LLMatcher.grammar_from_lark(grammar))
