"""Answers as server-sent events, for clients that read them line by line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvkeep.decode.answer_form import Answers, Calls
from kvkeep.decode.answer_format import AnswerFormat
from kvkeep.engine.pieces import TextPiece
from kvkeep.serve.http import answering
from kvkeep.serve.http.completion_reply import CompletionReply
from kvkeep.serve.http.conversation import AnswerParts
from kvkeep.serve.http.errors import api_error
from kvkeep.serve.http.protocol import Context, Progress
from kvkeep.serve.session import Finished

BREAKS = "a\nb\rc\vd\fe\x1cf\x1dg\x1eh\x85i\u2028j\u2029k"
"""Every character at which ``str.splitlines`` cuts."""


def test_streams_of_several_answers_are_sent_as_they_come() -> None:
    async def counted(name: str, delays: list[int]) -> AsyncIterator[str]:
        for number, delay in enumerate(delays):
            for _ in range(delay):
                await asyncio.sleep(0)
            yield f"{name}{number}"

    async def read() -> list[str]:
        return [one async for one in answering._closing([counted("a", [1, 60]), counted("b", [20, 1, 1])], [])]

    assert asyncio.run(read()) == ["a0", "b0", "b1", "b2", "a1"]


def streamed(text: str, chat: bool, with_usage: bool) -> list[str]:
    """The lines of a stream with one piece of text."""

    async def events() -> AsyncIterator[Any]:
        yield TextPiece(text)
        yield Progress(1024, 20_000)
        yield Finished("stop", text, (1, 2), 3, 4, 2)

    async def read() -> str:
        context = Context("tiny", "0" * 32, 7, api_error, Answers(AnswerFormat(), None))
        reply = CompletionReply(context, 1, with_usage, False, AnswerParts(context, Calls()) if chat else None)
        return "".join([one async for one in reply.stream(events())])

    return asyncio.run(read()).splitlines()


@pytest.mark.parametrize("chat", [True, False])
def test_an_event_is_one_line_whatever_the_text(chat: bool) -> None:
    assert len(BREAKS.splitlines()) == 11
    lines = [line for line in streamed(BREAKS, chat, False) if line]
    lines.remove(": reading 1024 of 20000 tokens")
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    choices = [json.loads(line[6:])["choices"][0] for line in lines[:-1]]
    assert BREAKS in [one["delta"].get("content") if chat else one["text"] for one in choices]
    assert "\u00e9\u20ac" in "".join(streamed("\u00e9\u20ac", chat, False)), "what ends no line is sent as it is"


@pytest.mark.parametrize("chat", [True, False])
def test_chunks_before_the_usage_have_none(chat: bool) -> None:
    """OpenAI's clients tell by it that one with usage follows."""
    for with_usage in (True, False):
        lines = [line for line in streamed("text", chat, with_usage) if line.startswith("data: {")]
        *chunks, last = [json.loads(line[6:]) for line in lines]
        assert all(("usage" in one) == with_usage and one.get("usage") is None for one in chunks)
        assert with_usage == ("usage" in last)
        if with_usage:
            assert last["usage"]["total_tokens"] == 9 and last["choices"] == []


@pytest.mark.parametrize("fails", [False, True])
def test_only_the_last_of_several_streams_ends_the_reply(fails: bool) -> None:
    """All are stepped alike, so they have all sent their last chunk before one of them is at its end."""

    async def events() -> AsyncIterator[Any]:
        yield TextPiece("text")
        yield RuntimeError("a fault") if fails else Finished("stop", "text", (1, 2), 3, 4, 2)

    async def read() -> list[str]:
        context = Context("tiny", "0" * 32, 7, api_error, Answers(AnswerFormat(), None))
        streams = [
            CompletionReply(replace(context, index=number), 3, True, False).stream(events()) for number in range(3)
        ]
        found = list[str]()
        while streams:
            for stream in [*streams]:
                try:
                    found.append(await anext(stream))
                except StopAsyncIteration:
                    streams.remove(stream)
        return found

    found = asyncio.run(read())
    assert [one for one in found if one == "data: [DONE]\n\n"] == found[-1:]
    usages = [usage for one in found[:-1] if (usage := json.loads(one[6:]).get("usage"))]
    assert [one["completion_tokens"] for one in usages] == ([] if fails else [6])
