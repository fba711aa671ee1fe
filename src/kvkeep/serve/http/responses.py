"""OpenAI's responses, ``/v1/responses``: the fields of requests.

A response is recorded (:mod:`kvkeep.blocks.records`) unless its request says ``"store": false``, and a later request
continues it by ``previous_response_id``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from kvkeep.blocks.records import OwnerRecords, Records
from kvkeep.serve.http.conversation import (
    MAX_MESSAGES,
    AnswerForm,
    ConversationRequest,
    conversation,
    effort_variables,
    tool,
)
from kvkeep.serve.http.errors import APIError
from kvkeep.serve.http.protocol import Context, Name, Object, Prompt, Reply, Strict, Text
from kvkeep.serve.http.response_items import AnyItem, Tools, functions, messages_of
from kvkeep.serve.http.response_reply import ResponseReply
from kvkeep.serve.http.tools import MAX_TOOLS

MAX_EARLIER = 1000
"""Earlier responses that a request continues."""

# -- requests ---------------------------------------------------------------------------------------------


class ChosenTool(Strict):
    """A tool that the answer may call."""

    type: Literal["function", "custom"]
    name: Name


class AllowedTools(Strict):
    """The only tools that the answer may call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class TextFormat(Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: Object | None = Field(default=None, alias="schema")
    strict: bool = False
    """Answers always obey the schema."""


class TextOptions(Strict):
    """The form of an answer, and how long it should be."""

    hints: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat = TextFormat(type="text")


class Effort(Strict):
    """How much the model reasons before its answer."""

    hints: ClassVar[frozenset[str]] = frozenset({"context", "generate_summary", "mode", "summary"})

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


_REPEATED = (
    "instructions", "max_output_tokens", "parallel_tool_calls", "previous_response_id", "store", "temperature", "top_p",
)  # fmt: skip
"""Fields that a response repeats as they are."""


class ResponseRequest(ConversationRequest):
    """``POST /v1/responses``."""

    hints: ClassVar[frozenset[str]] = frozenset({
        "client_metadata", "context_management", "include", "max_tool_calls", "metadata", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
        "stream_options", "truncation", "user",
    })  # fmt: skip
    void: ClassVar[Mapping[str, Sequence[Any]]] = {"tools": ([],), "background": (False,), "top_logprobs": (0,)}

    input: Text | Annotated[list[AnyItem], Field(fail_fast=True, max_length=MAX_MESSAGES)] = ""
    instructions: Text | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    """The answer may have several calls."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """The maximum number of tokens of the answer."""
    reasoning: Effort = Effort()
    text: TextOptions = TextOptions()
    previous_response_id: Name | None = None
    store: bool = True
    """Whether the response is recorded."""
    _records: OwnerRecords = PrivateAttr(default_factory=lambda: Records().of(""))

    def using(self, records: OwnerRecords) -> ResponseRequest:
        """Return the request, which continues and adds to these records."""
        self._records = records
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of the input."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else messages_of(self.input)

    def given(self) -> Prompt:
        """Return the conversation up to its answer, the responses that it continues before it."""
        earlier = list[list[dict[str, Any]]]()
        response_id = self.previous_response_id
        while response_id is not None:
            record = self._records.get(response_id) if len(earlier) < MAX_EARLIER else None
            if record is None or "response" not in record:
                raise APIError(
                    404,
                    f"There is no response '{response_id[:100]}' that can be continued; send the conversation itself.",
                    "previous_response_not_found",
                    "previous_response_id",
                )
            earlier.append(record["messages"])
            response_id = record["previous"]
            if sum(map(len, earlier)) > MAX_MESSAGES:
                sentence = f"The responses before this one have more than {MAX_MESSAGES} messages; send fewer of them."
                raise APIError(400, sentence, "context_length_exceeded", "previous_response_id")
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        before = [message for messages in reversed(earlier) for message in messages]
        messages, variables = [*system, *before, *self.messages()], effort_variables(self.reasoning.effort)
        return conversation(messages, self.answer_form, "input", variables=variables)

    @property
    def answer_form(self) -> AnswerForm:
        tools = [tool(name, one.description, one.arguments) for name, _, one in functions(self.tools or ())]
        given, choice, several = self.text.format, self.tool_choice, self.parallel_tool_calls
        schema = None if given.type == "text" else given.schema_ or {"type": "object"}
        if isinstance(choice, ChosenTool):
            return AnswerForm(tools, "required", [choice.name], False, schema, "text.format")
        if isinstance(choice, AllowedTools):
            allowed = [one.name for one in choice.tools]
            return AnswerForm(tools, choice.mode, allowed, several, schema, "text.format")
        return AnswerForm(tools, choice, None, several, schema, "text.format")

    def reply(self, context: Context) -> Reply:
        choice, records = self.tool_choice, self._records if self.store else None
        repeated = {
            **self.model_dump(include={*_REPEATED}),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "text": {"format": self.text.format.model_dump(exclude_none=True, by_alias=True)},
        }
        answered = self.answered(context)
        assert answered is not None  # no response continues a message
        return ResponseReply(context, repeated, self.messages(), self.calls(), self.tools or (), answered, records)
