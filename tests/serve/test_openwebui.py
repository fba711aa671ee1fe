"""Open WebUI asks for a title, tags and follow-up questions between the turns of a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from answering import small
from conftest import WORDS
from running import KEYS, serving

from kvkeep.blocks.store import Store
from kvkeep.serve.engine import Engine

KINDS: list[dict[str, Any]] = [{"method": "full"}, {"method": "kv-direct", "budget": 64, "chunk": 64}]
TASKS = (
    ("follow-up questions that the user may ask next", "follow_ups", 20),
    ("a concise title with an emoji that summarizes the chat history", "title", 10),
    ("1-3 broad tags for the main themes of the chat history", "tags", 10),
)


def words(count: int, step: int) -> str:
    return " ".join(WORDS[(number * step) % len(WORDS)] for number in range(count))


def task(messages: list[Any], what: str, field: str) -> list[Any]:
    """The messages of one of Open WebUI's tasks: the conversation within one message."""
    history = "\n".join(f"{one['role'].upper()}: {one['content']}" for one in messages)
    form = f'JSON format: {{ "{field}": "..." }}'
    asked = f"### Task:\nGenerate {what}.\n\n### Output:\n{form}\n\n### Chat History:\n"
    return [{"role": "user", "content": f"{asked}<chat_history>\n{history}\n</chat_history>"}]


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["method"])
@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "stored"])
def test_requests_between_turns_take_nothing_from_the_conversation(
    kind: dict[str, Any], stored: bool, tmp_path: Path
) -> None:
    engine = Engine(small(positions=4096), 10**8, store=Store(tmp_path) if stored else None, **kind)
    system = {"role": "system", "content": words(40, 3)}
    messages: list[Any] = [system, {"role": "user", "content": words(120, 5)}]
    with serving(engine=engine) as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEYS[0], max_retries=0)

        def ask(given: list[Any], new: int) -> tuple[str, int, int]:
            stream = client.chat.completions.create(
                model="tiny", messages=given, max_tokens=new, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            pieces = [*stream]
            usage = pieces[-1].usage
            assert usage is not None and usage.prompt_tokens_details is not None
            content = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
            return content, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0

        known = 0
        for turn in range(3):
            content, prompt, cached = ask(messages, 8)
            assert cached >= known - 3  # the end of an answer's text may have other tokens
            known = prompt + 8
            messages.append({"role": "assistant", "content": content})
            for what, field, new in TASKS:  # in a message, and after the conversation itself
                ask([system, *task(messages[1:], what, field)], new)
                ask([*messages, {"role": "user", "content": f"Generate {what}."}], new)
            messages.append({"role": "user", "content": words(10, 7 + turn)})
