"""Tasks whose answers copy from their prompts, and one whose answer copies nothing."""

from __future__ import annotations

import ast
import inspect
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, resources
from typing import Any

from kvkeep.decode.answer_form import Calls
from kvkeep.errors import UsageError

MODULES = ("bisect", "colorsys", "fnmatch", "linecache", "reprlib")
"""Modules of Python's standard library whose files are changed: 3,000 to 7,000 characters each."""
NAMES = ("item", "total", "given", "found", "number", "entry", "limit", "state", "other", "current")
"""New names."""
SYSTEM = "You are a coding agent. You change files with your tools. Change what the user names, and nothing else."
ARGUMENTS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "old": {"type": "string", "description": "the lines to replace, copied from the file"},
        "new": {"type": "string", "description": "the lines in their place"},
    },
    "required": ["path", "old", "new"],
    "additionalProperties": False,
}
"""The JSON Schema of an edit."""
EDIT = {
    "name": "edit",
    "description": "Replace a text in a file. The file has to have the old text exactly as it is given.",
    "parameters": ARGUMENTS,
}
"""The tool of an edit."""


@dataclass(frozen=True)
class CopyingTask:
    """A conversation up to an answer."""

    kind: str
    messages: list[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    calls: Calls = field(default_factory=Calls)
    """What the answer has to call."""


def tasks_of(kind: str, edits: int, seed: int) -> list[CopyingTask]:
    """Return the tasks of one of :data:`KINDS`. edits: the number of edits, chosen by ``seed``. Raises UsageError for
    more edits than there are names to change."""
    if kind == "edits":
        return _edits(edits, seed)
    return [CopyingTask(kind, [{"role": "user", "content": _question(kind)}])]


def _question(kind: str) -> str:
    if kind == "rewrite":
        return f"{source('bisect')}\n\nWrite this file again, with `lo` renamed to `low`. Write the code only."
    if kind == "quotation":
        text = resources.files("kvkeep_lab").joinpath("receipt.txt").read_text(encoding="utf-8")
        definitions = text[text.index("1. Definitions") : text.index("2. Grant of Copyright")]
        return f'{definitions}\n\nQuote the definitions of "Source" form and "Object" form, word for word.'
    return "Tell me a story about a river and a fox."


KINDS = ("rewrite", "quotation", "edits", "story")
"""The kinds of tasks: a file that is written again with one name changed, a quotation from a document, edits of files
by calls of a tool, and a story, which copies nothing."""


def source(module: str) -> str:
    """Return the file of a module of Python's standard library."""
    return inspect.getsource(import_module(module))


def _edits(count: int, seed: int) -> list[CopyingTask]:
    """Return ``count`` edits: in each, a name is changed within one function. Those of one file follow each other, and
    their conversations begin with it."""
    chosen = [(module, *one) for module in MODULES for one in _names(ast.parse(source(module)))]
    if count > len(chosen):
        raise UsageError(f"There are {len(chosen)} names to change; ask for at most as many edits.")
    picked = sorted(random.Random(seed).sample(range(len(chosen)), count))
    return [_edit(number, *chosen[number]) for number in picked]


def _names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each function of a file with each of its variables that it has in two or more places."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            names = [one for one in ast.walk(function) if isinstance(one, ast.Name)]
            variables = [one.arg for one in function.args.args if one.arg != "self"]
            places = Counter([*variables, *(one.id for one in names)])
            variables += [one.id for one in names if isinstance(one.ctx, ast.Store)]
            yield from ((function.name, name) for name in dict.fromkeys(variables) if places[name] > 1)


def _edit(number: int, module: str, function: str, name: str) -> CopyingTask:
    path, new = f"{module}.py", NAMES[number % len(NAMES)]
    question = (
        f"In the function `{function}` of {path}, rename `{name}` to `{new}`. Call `edit` with the lines that change."
    )
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"This is {path}:\n\n{source(module)}"},
        {"role": "assistant", "content": "I have read it."},
        {"role": "user", "content": question},
    ]
    calls = Calls([("edit", ARGUMENTS)], required=True, several=False)
    return CopyingTask("edits", messages, [{"type": "function", "function": EDIT}], calls)
