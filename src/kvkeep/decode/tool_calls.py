"""Tools: how a prompt describes them, the form of an answer that may call them, and the calls in its text.

The format is the one of Hermes and Qwen: a call is JSON between ``<tool_call>`` and ``</tool_call>``. A template that
knows it describes the tools. For all others the description is a part of the system prompt, and calls and results are
texts of messages. Some models, as Qwen2.5-Coder, write the JSON of a call without these marks, or as a block of code:
an answer that begins so is a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex

from kvkeep.engine.forms import JSON_SPACE
from kvkeep.engine.token_spelling import special_ids
from kvkeep.models.chat_templates import filled

BEGIN, END = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\n\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
_TAIL = f"}}\n{END}"
_BARE = r'\s*(```(json)?\s*)?\{\s*"name":\s*"%s",\s*"arguments":'
"""The beginning of an answer that is a call without marks."""
_ANY_BARE = regex.compile(_BARE % "(?P<tool>[\\w-]+)")
_DESCRIPTION = (
    "# Tools\n\nYou can call functions. These are their descriptions:\n<tools>\n{tools}\n</tools>\n\n"
    "To call a function, write a JSON object with its name and its arguments, in these lines:\n"
    f'{BEGIN}\n{{{{"name": <name>, "arguments": <arguments>}}}}\n{END}'
)

# -- prompts ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def knows_tools(tokenizer: Any, template: str) -> bool:
    """Return whether a tokenizer's chat ``template`` describes tools, and writes calls and results in this format."""
    call = {"id": "a", "type": "function", "function": {"name": "kept1q", "arguments": {"kept2q": "kept3q"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "kept4q", "tool_call_id": "a", "name": "kept1q"},
        {"role": "user", "content": "?"},
    ]
    tools = [{"type": "function", "function": {"name": "kept5q", "description": "", "parameters": {"type": "object"}}}]
    try:
        text = filled(tokenizer, messages, tools)
    except Exception:  # a template is the model's code and may raise anything
        return False
    written = f'{BEGIN}\n{{"name": "kept1q", "arguments": {{"kept2q": "kept3q"}}}}\n{END}'
    return written in text and "kept4q" in text and "kept5q" in text


def described(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation with tools as messages of texts: the system prompt describes the tools."""
    found = list[dict[str, Any]]()
    if tools:
        lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in tools)
        found.append({"role": "system", "content": _DESCRIPTION.format(tools=lines)})
    for number, message in enumerate(messages):
        role, content = str(message["role"]), str(message["content"])
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if number and messages[number - 1]["role"] == "tool":
                found[-1]["content"] += f"\n{content}"
                continue
            role = "user"
        for call in message.get("tool_calls", ()):
            called = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            content += f"{content and chr(10)}{BEGIN}\n{json.dumps(called, ensure_ascii=False)}\n{END}"
        if role == "system" and tools and not number:
            found[0]["content"] = f"{content}\n\n{found[0]['content']}"
        else:
            found.append({**message, "role": role, "content": content})
            found[-1].pop("tool_calls", None)
    return found


# -- answers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calls:
    """Which calls an answer may have."""

    tools: Sequence[tuple[str, Mapping[str, Any]]]
    """The name of each tool, and the JSON Schema of its arguments."""
    required: bool = False
    """The answer is a call."""
    several: bool = True
    """The answer may have several calls."""
    content: Mapping[str, Any] | None = None
    """The JSON Schema of an answer without a call; None: any text, which may also precede the first call."""

    def form(self, tokenizer: Any, vocabulary: Any) -> str:
        """Return the form of the answer for :class:`~kvkeep.engine.grammar.Grammar`, in Lark's notation."""
        begin, end = (_mark(tokenizer, vocabulary, text) for text in (BEGIN, END))
        call = " | ".join(f"call_{number}" for number in range(len(self.tools)))
        more = f' ("\\n" {begin} call)*' if self.several else ""
        lines = ["%llguidance {}"]
        if self.required:
            lines.append(f"start: {begin} call{more}")
        elif self.content is not None:
            lines += [f"start: content | {begin} call{more}", f"content: %json {_schema(self.content)}"]
        else:
            head = f"TEXT {begin}" if begin == BEGIN else "head"
            lines += [f"start: TEXT | {head} call{more} {self._bare(lines)}", "TEXT: /(.|\\n)*/"]
            lines += [] if begin == BEGIN else [f"head[lazy]: TEXT {begin}"]
        lines.append(f'call: "\\n" ({call}) "\\n" {end}')
        for number, (name, parameters) in enumerate(self.tools):
            opened = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
            lines.append(f'call_{number}: {json.dumps(opened)} arguments_{number} "}}"')
            lines.append(f"arguments_{number}: %json {_schema({'type': 'object', **parameters})}")
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}]})

    def _bare(self, lines: list[str]) -> str:
        """Add the rules of calls without marks to ``lines``, and return them as alternatives."""
        found = ""
        for number, (name, _) in enumerate(self.tools):
            if re.fullmatch(r"[\w-]+", name):
                found += f" | bare_{number}"
                lines.append(f"begun_{number}[lazy]: /{_BARE % name}/")
                lines.append(f"bare_{number}: begun_{number} SPACE arguments_{number} BARE_END")
        lines += ["SPACE: /\\s{0,8}/", "BARE_END: /\\s{0,8}\\}\\s{0,8}(```)?\\s{0,8}/"] if found else []
        return found


def _mark(tokenizer: Any, vocabulary: Any, text: str) -> str:
    """Return a mark of the format in Lark's notation: by its name if it is one token, which llguidance then keeps out
    of texts, or else as a text."""
    token = tokenizer.convert_tokens_to_ids(text)
    known = isinstance(token, int) and token not in special_ids(tokenizer) and vocabulary.is_special_token(token)
    return text if known else json.dumps(text)


def _schema(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": JSON_SPACE})


@dataclass(frozen=True)
class CallPart:
    """A part of a call."""

    index: int
    """The number of the call in the answer, from 0."""
    name: str
    """The tool's name in the first part of a call; then empty."""
    arguments: str
    """The next characters of the arguments, which are JSON."""


class CallReader:
    """Finds the calls of some tools, by their names, in the text of an answer, which arrives in parts and has the form
    of :class:`Calls`."""

    def __init__(self, tools: Collection[str] = ()) -> None:
        self.complete = 0
        """The number of complete calls."""
        self._tools, self._index, self._waiting, self._within = tools, -1, "", "beginning"

    def add(self, text: str) -> list[str | CallPart]:
        """Return the next parts of the answer: texts, and parts of calls."""
        self._waiting += text
        found = list[str | CallPart]()
        while (part := self._next()) is not None:
            found += [one for one in (part,) if one != ""]
        return found

    def rest(self) -> list[str | CallPart]:
        """Return what remains of an answer that ends here."""
        left, self._waiting = self._waiting, ""
        if self._within == "bare":
            left = left.lstrip()
            with suppress(ValueError):  # it was cut off
                _, end = json.JSONDecoder().raw_decode(left)
                self.complete, left = 1, left[:end]
        if not left or self._within in ("head", "between"):
            return []
        return [left if self._within in ("beginning", "content") else CallPart(self._index, "", left)]

    def _next(self) -> str | CallPart | None:
        """Return the next part; None: more text has to arrive. An empty text says nothing."""
        text = self._waiting
        if self._within == "bare":
            return None
        if self._within == "beginning":
            hit = _ANY_BARE.match(text, partial=True)
            if hit is not None and hit.partial and self._tools:
                return None
            if hit is not None and not hit.partial and hit["tool"] in self._tools:
                self._waiting, self._within, self._index = text[hit.end() :], "bare", 0
                return CallPart(0, hit["tool"], "")
            self._within = "content"
        if self._within in ("content", "between"):
            before, found, after = text.partition(BEGIN)
            if found:
                self._waiting, content, self._within = after, self._within == "content", "head"
                return before.rstrip() if content else ""
            kept = len(text) if self._within == "between" else len(text) - len(text[: _certain(text, BEGIN)].rstrip())
            self._waiting = text[len(text) - kept :]
            return text[: len(text) - kept] or None
        if self._within == "head":
            if (hit := _HEAD.match(text)) is None:
                return None
            self._waiting, self._within, self._index = text[hit.end() :], "arguments", self._index + 1
            return CallPart(self._index, json.loads(hit[1]), "")
        before, found, after = text.partition(_TAIL)
        if found:
            self._waiting, self._within, self.complete = after, "between", self.complete + 1
            return CallPart(self._index, "", before) if before else ""
        certain = _certain(text, _TAIL)
        self._waiting = text[certain:]
        return CallPart(self._index, "", text[:certain]) if certain else None


def _certain(text: str, mark: str) -> int:
    """Return how many characters of a text are no beginning of a ``mark`` at its end."""
    return next(
        (len(text) - n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), len(text)
    )
