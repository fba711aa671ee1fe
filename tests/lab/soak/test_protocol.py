"""The protocol: OpenAI's own client, wrong requests, and sessions of several keys."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from answering import small
from running import BODY, KEYS, bearer, crowded, held, serving, within

import kvkeep
from kvkeep import KeepCache
from kvkeep.blocks.store import Store
from kvkeep.decode.prompt import encode
from kvkeep.models.loading import Loaded
from kvkeep.serve.engine import Engine
from kvkeep.serve.http.events import Limits
from kvkeep.serve.http.keys import Keys

QUESTIONS = [
    "What is the capital of France?",
    "Count to ten.",
    "Write a line about the sea.",
    "Who wrote Hamlet?",
    "Name three colours.",
    "What is 2 + 2?",
    "Say hello.",
    "Why is the sky blue?",
]
NEW = 32


def asking(question: str) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": NEW, "temperature": 0}


@pytest.mark.real
@pytest.mark.soak(1)
def test_openais_client_gets_correct_answers_and_typed_errors(real: Loaded, say: Any, tmp_path: Path) -> None:
    single = {}
    for question in QUESTIONS:
        ids = encode(real.tokenizer, asking(question)["messages"])
        made = kvkeep.generate(real.model, real.tokenizer, ids, KeepCache(real.model, "full"), max_new_tokens=NEW)
        single[question] = made.text, len(ids), len(made.tokens)
    streaming: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    seen = Counter[str]()

    def check(question: str, text: str | None, usage: Any) -> None:
        assert (text, usage.prompt_tokens, usage.completion_tokens) == single[question], question
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        seen["answers"] += 1
        seen["tokens"] += usage.completion_tokens

    def joined(chunks: list[Any]) -> str:
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason
        assert not chunks[-1].choices and all(one.usage is None for one in chunks[:-1])
        return "".join(one.choices[0].delta.content or "" for one in chunks[:-1])

    with serving(engine=Engine(real, 10**9, method="full")) as (address, _):
        given: dict[str, Any] = {"base_url": f"{address}/v1", "api_key": KEYS[0], "max_retries": 0}
        with openai.OpenAI(**given) as client:
            for question in QUESTIONS:
                complete = client.chat.completions.create(**asking(question))
                check(question, complete.choices[0].message.content, complete.usage)
                chunks = [*client.chat.completions.create(**asking(question), **streaming)]
                check(question, joined(chunks), chunks[-1].usage)
                say.progress(f"{seen['answers']} answers")

        async def at_once() -> None:
            async with openai.AsyncOpenAI(**given) as client:

                async def one(question: str, stream: bool) -> None:
                    if not stream:
                        complete = await client.chat.completions.create(**asking(question))
                        check(question, complete.choices[0].message.content, complete.usage)
                        return
                    chunks = [
                        chunk async for chunk in await client.chat.completions.create(**asking(question), **streaming)
                    ]
                    check(question, joined(chunks), chunks[-1].usage)

                await asyncio.gather(*(one(question, stream) for question in QUESTIONS for stream in (False, True)))

        asyncio.run(at_once())
    kinds = errors(tmp_path)
    say(
        f"{seen['answers']} answers by the openai client, whole and streamed, one by one and 16 at once: text and "
        f"usage ({seen['tokens']} tokens) as generate alone; {len(kinds)} of its typed exceptions: {', '.join(kinds)}"
    )


def errors(folder: Path) -> list[str]:
    """Provoke every error that the client has a class for; return their names."""
    found = []
    engine = Engine(small(), 10**8, waiting=3, store=Store(folder))
    with serving(engine=engine, limits=Limits(answers=2)) as (address, _):

        def client(key: str = KEYS[0], timeout: float = 30) -> Any:
            return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=timeout).chat.completions

        def fails(kind: type[openai.APIError], code: str | None, asks: Any, **change: Any) -> None:
            with pytest.raises(kind) as error:
                asks.create(**{**BODY, **change})
            assert type(error.value) is kind and (code is None or error.value.code == code), error.value
            found.append(kind.__name__)

        fails(openai.AuthenticationError, "invalid_api_key", client("wrong"))
        fails(openai.NotFoundError, "model_not_found", client(), model="gpt-4")
        fails(openai.BadRequestError, "invalid_value", client(), n=2)
        fails(openai.BadRequestError, "context_length_exceeded", client(), max_tokens=10**6)
        other = Store(folder).open(f"{Keys(KEYS).owner(bearer()['Authorization'])}/taken")
        fails(openai.ConflictError, "session_in_use", client(), extra_body={"kvkeep": {"session": "taken"}})
        other.close()
        with crowded(engine):
            threads = [
                threading.Thread(target=lambda key=key: client(key).create(**BODY))
                for key in (KEYS[0], KEYS[0], KEYS[1])
            ]
            for thread in threads:
                thread.start()
            assert within(10, lambda: engine.waiting == 3)
            fails(openai.RateLimitError, "too_many_answers", client())
            fails(openai.InternalServerError, "overloaded", client(KEYS[1]))
        for thread in threads:
            thread.join(30)
        with held(engine):
            fails(openai.APITimeoutError, None, client(timeout=0.3))
    fails(openai.APIConnectionError, None, client())
    return sorted({*found})
