"""Synthetic texts of a coding agent: prose, source code and descriptions of tools, of a given number of tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

NOUNS = (
    "account", "archive", "batch", "branch", "buffer", "cache", "channel", "client", "column", "config", "counter",
    "cursor", "digest", "entry", "event", "field", "folder", "handle", "header", "index", "ledger", "message", "metric",
    "module", "network", "offset", "packet", "parser", "pointer", "project", "query", "queue", "record", "report",
    "request", "response", "result", "schema", "server", "session", "signal", "socket", "stream", "table", "thread",
    "timer", "token", "topic", "update", "value", "version", "window", "worker",
)  # fmt: skip
VERBS = (
    "append", "apply", "build", "check", "close", "collect", "compare", "copy", "count", "decode", "drop", "encode",
    "fetch", "filter", "flush", "join", "load", "lock", "merge", "move", "open", "parse", "read", "remove", "render",
    "reset", "resolve", "send", "sort", "split", "start", "store", "trim", "validate", "wait", "write",
)  # fmt: skip
PREPOSITIONS = ("after", "before", "beside", "for", "from", "into", "of", "through", "under", "with", "without")


class Texts:
    """Texts that a seed determines. count: returns the number of tokens of a text."""

    def __init__(self, seed: int | str, count: Callable[[str], int]) -> None:
        self._draw, self._count = random.Random(seed), count

    def prose(self, tokens: int) -> str:
        """Return sentences of at least ``tokens`` tokens."""
        return self._joined(self._sentences(), tokens, " ")

    def code(self, tokens: int) -> str:
        """Return source code of at least ``tokens`` tokens."""
        return self._joined(self._lines(), tokens, "\n")

    def tool(self, name: str, tokens: int) -> dict[str, Any]:
        """Return a tool of about ``tokens`` tokens. Its arguments are short, so that every call is."""
        paths = [f"src/{self._noun()}/{self._noun()}.py" for _ in range(4)]
        properties = {
            "path": {"type": "string", "enum": sorted(set(paths)), "description": "The file."},
            "line": {"type": "integer", "minimum": 0, "maximum": 9999, "description": "The first line."},
            "mode": {"type": "string", "enum": ["text", "lines", "summary"]},
        }
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        function = {"name": name, "description": "", "parameters": schema}
        function["description"] = self.prose(max(1, tokens - self._count(json.dumps(function))))
        return {"type": "function", "function": function}

    def sizes(self, count: int, least: int, largest: int) -> list[int]:
        """Return ``count`` sizes, from ``least`` to ``largest`` in equal ratios. About five in succession are in random
        order, and small and large ones are among them."""
        ratio = (largest / least) ** (1 / max(1, count - 1))
        sizes = [round(least * ratio**place) for place in range(count)]
        blocks = max(1, count // 5)
        parts = [self._draw.sample(part, len(part)) for part in (sizes[first::blocks] for first in range(blocks))]
        return [size for part in self._draw.sample(parts, blocks) for size in part]

    def name(self) -> str:
        """Return a name such as ``merge_record``."""
        return f"{self._draw.choice(VERBS)}_{self._noun()}"

    def _joined(self, parts: Iterator[str], tokens: int, between: str) -> str:
        text = next(parts)
        while (lacking := tokens - self._count(text)) > 0:
            while lacking > 0:
                part = f"{between}{next(parts)}"
                text, lacking = text + part, lacking - self._count(part)  # more than both have together, often
        return text

    def _noun(self) -> str:
        return self._draw.choice(NOUNS)

    def _sentences(self) -> Iterator[str]:
        while True:
            verb, first, second = self._draw.choice(VERBS).capitalize(), self._noun(), self._noun()
            yield (
                f"{verb} the {first} {self._draw.choice(PREPOSITIONS)} the {second}, and "
                f"{self._draw.choice(VERBS)} {self._draw.randrange(2, 99)} of each {self._noun()}."
            )

    def _lines(self) -> Iterator[str]:
        while True:
            name, given, other = self.name(), self._noun(), self._noun()
            yield f"def {name}({given}, {other}=None):"
            for _ in range(self._draw.randrange(2, 7)):
                yield f"    {self._noun()} = {given}.{self._draw.choice(VERBS)}({other}, {self._draw.randrange(100)})"
            yield f"    return {self.name()}({given})\n"
