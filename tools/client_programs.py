"""Programs of Python clients, each with one tool: the model calls it, gets its result, and answers.

python client_programs.py NAME URL KEY MODEL

prints one object of JSON: which arguments the tool got, and the answer. It runs where the client's package is
installed; kvkeep need not be there (tools/clients.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

QUESTION = "Read the file notes.txt with the tool, and say what it says."
RESULT = "hello"
DESCRIPTION = "Read a file."
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}
TOOL = "read_notes"
MINI_COMMAND = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat notes.txt"
"""The command with which mini-swe-agent ends."""
Outcome = tuple[list[str], str]
"""The paths that the tool was called with, and the answer."""
PROGRAMS: dict[str, tuple[str, Callable[[str, str, str], Outcome]]] = {}
"""Programs by name: the package that has to be there, and the function of URL (without a path), key and model."""


def program(name: str, package: str) -> Callable[[Any], Any]:
    """Return a decorator that adds a program to :data:`PROGRAMS`."""

    def add(function: Callable[[str, str, str], Outcome]) -> Callable[[str, str, str], Outcome]:
        PROGRAMS[name] = package, function
        return function

    return add


# -- the two packages ---------------------------------------------------------------------------------------


@program("openai chat", "openai")
def openai_chat(url: str, key: str, model: str, stream: bool = False) -> Outcome:
    """Chat completions."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    function = {"name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA, "strict": True}
    given: dict[str, Any] = {"model": model, "tools": [{"type": "function", "function": function}]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    paths = list[str]()
    while True:
        if stream:
            with client.chat.completions.stream(messages=messages, **given) as events:
                for _ in events:
                    pass
                said = events.get_final_completion().choices[0].message
        else:
            said = client.chat.completions.create(messages=messages, **given).choices[0].message
        if not said.tool_calls:
            return paths, said.content or ""
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            paths.append(json.loads(call.function.arguments)["path"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})


@program("openai chat, stream", "openai")
def openai_chat_stream(url: str, key: str, model: str) -> Outcome:
    """Chat completions, as a stream."""
    return openai_chat(url, key, model, stream=True)


@program("openai responses", "openai")
def openai_responses(url: str, key: str, model: str, stream: bool = False) -> Outcome:
    """Responses."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    tool = {"type": "function", "name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA, "strict": True}
    given: dict[str, Any] = {"model": model, "tools": [tool], "store": False}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    paths = list[str]()
    while True:
        if stream:
            with client.responses.stream(input=items, **given) as events:
                for _ in events:
                    pass
                said = events.get_final_response()
        else:
            said = client.responses.create(input=items, **given)
        calls = [one for one in said.output if one.type == "function_call"]
        if not calls:
            return paths, said.output_text
        items += [one.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for one in said.output]
        for call in calls:
            paths.append(json.loads(call.arguments)["path"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})


@program("openai responses, stream", "openai")
def openai_responses_stream(url: str, key: str, model: str) -> Outcome:
    """Responses, as a stream."""
    return openai_responses(url, key, model, stream=True)


@program("anthropic messages", "anthropic")
def anthropic_messages(url: str, key: str, model: str, stream: bool = False) -> Outcome:
    """Messages. Their tokens are counted first."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    tool = {"name": TOOL, "description": DESCRIPTION, "input_schema": SCHEMA}
    given: dict[str, Any] = {"model": model, "tools": [tool]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    paths = list[str]()
    while True:
        assert client.messages.count_tokens(messages=messages, **given).input_tokens
        if stream:
            with client.messages.stream(messages=messages, max_tokens=300, **given) as events:
                said = events.get_final_message()
        else:
            said = client.messages.create(messages=messages, max_tokens=300, **given)
        if said.stop_reason != "tool_use":
            return paths, "".join(one.text for one in said.content if one.type == "text")
        messages.append({"role": "assistant", "content": said.content})
        calls = [one for one in said.content if one.type == "tool_use"]
        paths += [call.input["path"] for call in calls]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in calls]
        messages.append({"role": "user", "content": results})


@program("anthropic messages, stream", "anthropic")
def anthropic_messages_stream(url: str, key: str, model: str) -> Outcome:
    """Messages, as a stream."""
    return anthropic_messages(url, key, model, stream=True)


# -- packages above them ------------------------------------------------------------------------------------


def recorded() -> tuple[list[str], Callable[[str], str]]:
    """Return the tool as a function, and the list to which it adds the paths that it gets."""
    paths = list[str]()

    def read_notes(path: str) -> str:
        """Read a file."""
        paths.append(path)
        return RESULT

    return paths, read_notes


def openai_agents(url: str, key: str, model: str, chat: bool) -> Outcome:
    """OpenAI's agents, over chat completions or responses."""
    import agents
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    agents.set_tracing_disabled(True)
    kind = agents.OpenAIChatCompletionsModel if chat else agents.OpenAIResponsesModel
    paths, tool = recorded()
    made = agents.Agent(name="reader", model=kind(model, client), tools=[agents.function_tool(tool)])

    async def run() -> str:
        found = agents.Runner.run_streamed(made, QUESTION)
        async for _ in found.stream_events():
            pass
        return str(found.final_output)

    return paths, asyncio.run(run())


@program("openai-agents chat, stream", "agents")
def openai_agents_chat(url: str, key: str, model: str) -> Outcome:
    """OpenAI's agents over chat completions."""
    return openai_agents(url, key, model, chat=True)


@program("openai-agents responses, stream", "agents")
def openai_agents_responses(url: str, key: str, model: str) -> Outcome:
    """OpenAI's agents over responses."""
    return openai_agents(url, key, model, chat=False)


def pydantic_ai(model: Any) -> Outcome:
    """Pydantic AI with a model of any protocol."""
    from pydantic_ai import Agent

    paths, tool = recorded()
    return paths, Agent(model, tools=[tool]).run_sync(QUESTION).output


@program("pydantic-ai chat", "pydantic_ai")
def pydantic_chat(url: str, key: str, model: str) -> Outcome:
    """Pydantic AI over chat completions."""
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return pydantic_ai(OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key)))


@program("pydantic-ai responses", "pydantic_ai")
def pydantic_responses(url: str, key: str, model: str) -> Outcome:
    """Pydantic AI over responses."""
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return pydantic_ai(OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key)))


@program("pydantic-ai messages", "pydantic_ai")
def pydantic_messages(url: str, key: str, model: str) -> Outcome:
    """Pydantic AI over messages."""
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    return pydantic_ai(AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key=key)))


def langchain(url: str, key: str, model: str, responses: bool) -> Outcome:
    """LangChain's ChatOpenAI, streamed."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    paths, function = recorded()
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=model, use_responses_api=responses, max_retries=0)  # type: ignore[arg-type]
    bound = chat.bind_tools([tool(function)])
    messages: list[Any] = [HumanMessage(QUESTION)]
    while True:
        said: Any = None
        for chunk in bound.stream(messages):
            said = chunk if said is None else said + chunk
        if not said.tool_calls:
            return paths, said.text
        messages.append(said)
        messages += [ToolMessage(function(**one["args"]), tool_call_id=one["id"]) for one in said.tool_calls]


@program("langchain-openai chat, stream", "langchain_openai")
def langchain_chat(url: str, key: str, model: str) -> Outcome:
    """LangChain over chat completions."""
    return langchain(url, key, model, responses=False)


@program("langchain-openai responses, stream", "langchain_openai")
def langchain_responses(url: str, key: str, model: str) -> Outcome:
    """LangChain over responses."""
    return langchain(url, key, model, responses=True)


@program("mini-swe-agent chat", "minisweagent")
def mini_swe_agent(url: str, key: str, model: str) -> Outcome:
    """mini-swe-agent, whose one tool is a shell. A command ends it, and the output is the answer."""
    os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    address = {"api_base": f"{url}/v1", "api_key": key}
    made = DefaultAgent(
        LitellmModel(model_name=f"openai/{model}", model_kwargs=address, cost_tracking="ignore_errors"),
        LocalEnvironment(),
        system_template="You use a shell.",
        instance_template="{{task}}",
        step_limit=4,
    )
    said = made.run(QUESTION)
    actions = [one for message in made.messages for one in message.get("extra", {}).get("actions", ())]
    return [one["command"] for one in actions], said.get("submission", "").strip()


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    called, answer = PROGRAMS[name][1](*given)
    print(json.dumps({"called": called, "answer": answer}))
