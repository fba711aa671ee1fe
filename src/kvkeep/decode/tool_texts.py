"""Tools in conversations: as a model's chat template takes them, or as texts where it takes none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.decode.answer_format import AnswerFormat

_DESCRIPTION = (
    "# Tools\n\nYou can call functions. These are their descriptions:\n<tools>\n{tools}\n</tools>\n\n"
    "To call a function, write its name and its arguments in this form:\n{example}"
)
_EXAMPLE = [("<name>", {"<argument>": "<value>"})]
Messages = list[dict[str, Any]]
"""A role and a content each, and what belongs to calls of tools."""
Tools = Sequence[Mapping[str, Any]]


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Tools, format: AnswerFormat) -> tuple[Messages, Tools]:
    """Return a conversation with tools, calls, results and reasoning, and the tools, as the template of a model with
    this ``format`` takes them."""
    found = Messages()
    for number, message in enumerate(messages):
        if message["role"] == "tool" and format.plain:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if number and messages[number - 1]["role"] == "tool":
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text})
        else:
            found.append(_given(message, format))
    if not tools or (format.describes and not format.plain):
        return found, tools
    lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in tools)
    description = _DESCRIPTION.format(tools=lines, example=format.written(_EXAMPLE))
    if not format.takes_system:
        first = next((one for one in found if one["role"] == "user"), None)
        if first is not None:
            first["content"] = f"{description}\n\n{first['content']}"
            return found, ()
    if found and found[0]["role"] == "system":
        found[0]["content"] += f"\n\n{description}"
    else:
        found.insert(0, {"role": "system", "content": description})
    return found, ()


def _given(message: Mapping[str, Any], format: AnswerFormat) -> dict[str, Any]:
    """Return a message as the template takes it."""
    found = dict(message)
    reasoning, calls = found.pop("reasoning_content", None), found.get("tool_calls")
    if reasoning and format.reasoning_key and not (calls and found["content"] and format.calls is None):
        found[format.reasoning_key] = reasoning  # harmony's template takes one text before a call
    if not calls:
        return found
    functions = [one["function"] for one in calls]
    if not format.writes:
        del found["tool_calls"]
        text = format.written([(one["name"], one["arguments"]) for one in functions])
        found["content"] += f"{found['content'] and chr(10)}{text}"
    else:
        found["content"] = found["content"] or format.empty
        if format.arguments_as_text:
            texts = [{**one, "arguments": json.dumps(one["arguments"], ensure_ascii=False)} for one in functions]
            found["tool_calls"] = [{**one, "function": text} for one, text in zip(calls, texts, strict=True)]
    return found
