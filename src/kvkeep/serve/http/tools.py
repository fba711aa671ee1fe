"""The fields of tools and their calls, as OpenAI's clients send them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from kvkeep.serve.http.conversation import called
from kvkeep.serve.http.protocol import Name, Object, Strict, Text, readable, wrong

MAX_TOOLS = 1000


class Function(Strict):
    """A function that an answer may call."""

    name: Annotated[Name, Field(min_length=1)]
    description: Text | None = None
    parameters: Object = Field(default_factory=dict)
    """The JSON Schema of its arguments."""
    strict: bool = False
    """Arguments always obey the schema."""


class Tool(Strict):
    """A tool."""

    hints: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["function"]
    function: Function

    def described(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        return self.model_dump(exclude_unset=True)


def named_once(tools: Any) -> Any:
    """Return a request's tools, if no two functions have one name."""
    if isinstance(tools, list):
        functions = [one.get("function", one) for one in tools if isinstance(one, dict)]
        names = [one["name"] for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)]
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise wrong(f"two tools are called '{twice[:100]}'; rename one of them")
    return tools


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS), BeforeValidator(named_once)]


class NamedFunction(Strict):
    """The name of a function."""

    name: Name


class NamedTool(Strict):
    """The only tool that an answer may call, and has to."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Strict):
    """A function and its arguments."""

    hints: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})

    name: Name
    arguments: Text
    """A JSON object; an empty text is one without fields."""

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, given: str) -> str:
        try:
            found = json.loads(given or "{}")
        except (ValueError, RecursionError):
            raise wrong("it is not JSON; send the arguments as they were received") from None
        if not isinstance(found, dict):
            raise wrong("it is JSON, but not an object; send the arguments as they were received")
        readable(found)
        return given


class ToolCall(Strict):
    """A call in an answer that a client sends back."""

    id: Annotated[Name, Field(min_length=1)]
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction

    def described(self) -> dict[str, Any]:
        """Return the call as chat templates take it: its arguments are an object."""
        return called(self.id, self.function.name, json.loads(self.function.arguments or "{}"))
