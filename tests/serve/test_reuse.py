"""What a conversation does not read again: its answers as they were generated, whatever protocol sends them back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from running import KEYS, post, serving
from scripted import END as EOS
from scripted import byte_level, scripted

from kvkeep.blocks.store import Store
from kvkeep.models.loading import Loaded
from kvkeep.serve.engine import Engine

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] }}"
    '{% for c in m.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' + c.function.name + '
    "'\", \"arguments\": ' + c.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}<|turn|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SYSTEM, ASK = "Be brief. " * 30, "the Q"


@lru_cache
def model() -> Loaded:
    """One that calls a tool. Its weights are random, so it is made once."""
    vocabulary = byte_level("<tool_call>", "</tool_call>", "weather")
    script = vocabulary.script(['"', "weather"], [">", EOS])
    return scripted(vocabulary, script, TEMPLATE, positions=4096)


def engine(**options: Any) -> Engine:
    return Engine(model(), 10**8, **options)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(engine=engine()) as (found, _):
        yield found


def chat(address: str, answer: Any = None, key: str = KEYS[0], **options: Any) -> tuple[Any, int, str]:
    """The answer's message, the number of tokens read, and what the reply tells."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASK}]
    if answer is not None:
        call = answer["tool_calls"][0]["id"]
        messages += [answer, {"role": "tool", "tool_call_id": call, "content": "20"}]
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    body = {"model": "tiny", "messages": messages, "tools": [tool], "tool_choice": "required", "max_tokens": 200,
            "parallel_tool_calls": False, "temperature": 0}  # fmt: skip
    reply = post(address, body | options, key).json()
    usage = reply["usage"]
    read = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    return reply["choices"][0]["message"], read, reply["kvkeep"]["reuse"]


def rewritten(answer: Any) -> Any:
    """The answer as another program writes it: its arguments have other spaces."""
    changed = json.loads(json.dumps(answer))
    function = changed["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(json.loads(function["arguments"]), separators=(" ,", " :  "))
    return changed


def test_a_call_in_other_words_is_not_read_again(address: str) -> None:
    answer, _, _ = chat(address)
    _, read, reuse = chat(address, rewritten(answer))
    result = "<|turn|><|start|>tool\n20<|turn|><|start|>assistant\n"
    assert (
        read <= len(result.replace("<|turn|>", "t").replace("<|start|>", "s")) + 1
        and reuse.startswith("reused ")
        and "differs" not in reuse
    )


def test_an_answer_is_known_by_what_it_says_without_the_id_of_its_call(address: str) -> None:
    answer, _, _ = chat(address)
    answer["tool_calls"][0]["id"] = "another"
    assert chat(address, answer)[1] < 40


def test_another_owner_has_other_answers(address: str) -> None:
    answer, _, _ = chat(address)
    first, alone = chat(address, rewritten(answer), KEYS[1]), chat(address, None, KEYS[1])
    assert first[1] > 100 and alone[1] < 10  # it began as the first one did


def test_a_prompt_that_is_answered_once_more_differs_nowhere(address: str) -> None:
    answer, _, _ = chat(address, kvkeep={"session": "again"})
    found = [chat(address, answer, kvkeep={"session": "again"})[2] for _ in range(2)]
    assert all(one.startswith("reused ") and "differs" not in one for one in found), found


def test_a_message_that_differs_is_named(address: str) -> None:
    answer, _, _ = chat(address)
    chat(address, answer)
    changed = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "the Z"}, answer]
    found = chat(address, messages=[*changed, {"role": "user", "content": "And?"}])[2]
    assert found.endswith("; message 1 (user) differs from what was read before"), found


def test_answers_are_known_after_a_restart_in_every_protocol(tmp_path: Path) -> None:
    tool = {"name": "weather", "input_schema": SCHEMA}
    with serving(engine=engine(store=Store(tmp_path / "store"))) as (address, running):
        answer, _, _ = chat(address)
        while running.call(lambda: bool(running.sessions.storing)).result():
            time.sleep(0.01)
    (call,) = answer["tool_calls"]
    use = {"type": "tool_use", "id": "x", "name": "weather", "input": json.loads(call["function"]["arguments"])}
    with serving(engine=engine(store=Store(tmp_path / "store"))) as (address, _):
        assert chat(address, rewritten(answer))[1] < 64 + 40  # blocks are stored whole
        sent = {"model": "tiny", "max_tokens": 4, "system": SYSTEM, "tools": [tool], "messages": [
            {"role": "user", "content": ASK}, {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "20"}]},
        ]}  # fmt: skip
        assert post(address, sent, path="/v1/messages").json()["usage"]["input_tokens"] < 40
        items = [
            {"role": "user", "content": ASK},
            {"type": "function_call", "call_id": "y", "name": "weather", "arguments": call["function"]["arguments"]},
            {"type": "function_call_output", "call_id": "y", "output": "20"},
        ]
        tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
        given = {"model": "tiny", "max_output_tokens": 4, "instructions": SYSTEM, "tools": [tool], "input": items}
        usage = post(address, given, path="/v1/responses").json()["usage"]
        assert usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"] < 40
