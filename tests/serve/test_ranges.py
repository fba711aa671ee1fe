"""Numbers at both ends of the ranges that OpenAI documents, and beyond them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from running import ASK, CHAT, TEXT, post, serving

Range = tuple[list[Any], list[Any]]
"""Values that are accepted, and values that are not."""
COMMON: dict[str, Range] = {
    "temperature": ([0, 2], [-0.01, 2.01]),
    "top_p": ([0, 1e-300, 1], [-0.01, 1.01]),
    "presence_penalty": ([-2, 2], [-2.01, 2.01]),
    "frequency_penalty": ([-2, 2], [-2.01, 2.01]),
    "seed": ([-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63, 1.5]),
    "n": ([1], [0, 2]),
    "stop": ([None, [], "zz", ["a", "b", "c", "d"]], [""]),
    "top_k": ([0, 1, 2**40], [-1]),
    "min_p": ([0, 1], [-0.01, 1.01]),
    "repetition_penalty": ([0.001, 100], [0, 101]),
}
ONLY: dict[str, dict[str, Range]] = {
    CHAT: {"max_tokens": ([1], [0, -1, 1.5]), "max_completion_tokens": ([1], [0]), "top_logprobs": ([0, 20], [-1, 21])},
    TEXT: {"max_tokens": ([0, 1], [-1, 1.5]), "logprobs": ([0, 5], [-1]), "best_of": ([1], [0])},
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as (address, _):
        yield address


def asked(address: str, path: str, **fields: Any) -> Any:
    prompt = {"messages": ASK} if path == CHAT else {"prompt": "the river and"}
    needs = {"logprobs": True} if "top_logprobs" in fields else {}
    limit = {} if "max_completion_tokens" in fields else {"max_tokens": 3}
    return post(address, {"model": "tiny", **prompt, **limit, **needs, **fields}, path=path)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_ends_of_ranges_are_accepted_and_what_is_beyond_is_named(address: str, path: str) -> None:
    for field, (inside, outside) in (COMMON | ONLY[path]).items():
        for value in inside:
            reply = asked(address, path, **{field: value})
            assert reply.status_code == 200, (field, value, reply.text)
        for value in outside:
            reply = asked(address, path, **{field: value})
            assert reply.status_code == 400 and field in reply.json()["error"]["message"], (field, value)


def test_a_top_p_of_0_is_greedy(address: str) -> None:
    """And so is the least one above it."""
    texts = {
        asked(address, TEXT, **settings, max_tokens=20).json()["choices"][0]["text"]
        for settings in ({"temperature": 0}, {"temperature": 2, "top_p": 0}, {"temperature": 2, "top_p": 1e-300})
    }
    assert len(texts) == 1


def test_a_completion_of_no_tokens_reads_the_prompt(address: str) -> None:
    for more in ({}, {"stream": True}):
        reply = asked(address, TEXT, max_tokens=0, prompt="was it for on " * 12, **more)
        assert reply.status_code == 200 and '"finish_reason":"length"' in reply.text
    found = asked(address, TEXT, max_tokens=0, prompt="was it for on " * 12).json()
    assert found["choices"][0]["text"] == "" and found["usage"]["completion_tokens"] == 0
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
