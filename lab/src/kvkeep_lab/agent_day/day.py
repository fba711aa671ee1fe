"""The requests of a day, which a seed and sizes determine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from kvkeep_lab.agent_day.texts import Texts

Kind = Literal["title", "call", "text", "reasoned"]
"""The answer of a request: a title, a call of a tool, a text, or a text whose first half is reasoning, which its client
does not send back."""
HEADER = "x-anthropic-billing-header"
"""Name of the line that begins the instructions of a conversation, and differs in each session of an agent."""
MAIN = ("first", "second")
"""The conversations of the main agent, one in each session."""
MAX_CALL_TOKENS, MAX_TEXT_TOKENS = 64, 32
"""Maximum tokens of an answer that has to call, and of others."""
_TURN_TOKENS, _TOOLS_TOKENS = 20, 250
"""Tokens that a template adds to a request and its answer, and to a conversation with tools, at most."""
_SEGMENTS = (
    ("first title", 0), ("first", 14), ("explorer", 6), ("first", 5), ("reviewer", 11), ("first", 8), ("", 0),
    ("first", 9), ("second title", 0), ("second", 15), ("second explorer", 5), ("second", 16),
)  # fmt: skip
"""Conversations in their order. Each segment has one request, and its share of the others: so many of 100 requests. The
server is killed in the segment without a name."""
MIN_REQUESTS = len(_SEGMENTS) - 1
_PATTERNS: Mapping[str, Sequence[Kind]] = {
    "title": ("title",),
    "main": ("text", "call", "reasoned", "text", "call", "call", "text", "text", "reasoned", "text"),
    "subagent": ("call", "text", "text"),
}
_AGENTS = {"main": (1.0, 15), "explorer": (0.2, 7), "reviewer": (0.15, 5)}
"""Agents: the tokens of their instructions and tools as a share of the day's start, and the number of tools."""
_INSTRUCTIONS = 0.45
"""The share of an agent's tokens that are its instructions."""


@dataclass(frozen=True)
class AgentConversation:
    """One conversation of an agent."""

    header: str
    """The first line of its instructions; "" for none."""
    instructions: str
    tools: Sequence[Mapping[str, Any]]

    @property
    def system(self) -> dict[str, str]:
        """The first message."""
        return {
            "role": "system",
            "content": f"{self.header}\n{self.instructions}" if self.header else self.instructions,
        }


@dataclass(frozen=True)
class DayRequest:
    """One request: what the client adds to a conversation, and which answer it wants."""

    number: int
    conversation: str
    kind: Kind
    text: str
    """The text of the message from the user, or of the result of the call before it."""
    is_result: bool

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of the answer."""
        return MAX_CALL_TOKENS if self.kind == "call" else MAX_TEXT_TOKENS


@dataclass(frozen=True)
class Day:
    """All requests. The server is killed before the request ``killed``."""

    conversations: Mapping[str, AgentConversation]
    requests: Sequence[DayRequest]
    killed: int
    tokens: int
    """Tokens of the longest conversation, at most."""


def make_day(count: Callable[[str], int], start: int, requests: int, seed: int) -> Day:
    """Return a day. count: returns the number of tokens of a text. start: tokens of the main agent's instructions and
    tools; messages are as long in proportion. requests: their number, at least :data:`MIN_REQUESTS`."""
    texts = Texts(seed, count)
    agents = {name: _agent(texts, round(start * share), tools) for name, (share, tools) in _AGENTS.items()}
    headers = {name: f"{HEADER}: version=1.0; session={texts.name()}" for name in MAIN}
    title = "Answer with a title of at most six words for the conversation that begins so."
    conversations = {name: AgentConversation(headers[name], *agents["main"]) for name in headers}
    conversations |= {f"{name} title": AgentConversation("", title, ()) for name in headers}
    conversations |= {
        name: AgentConversation(headers[session], *agents[agent])
        for name, session, agent in (
            ("explorer", "first", "explorer"), ("reviewer", "first", "reviewer"),
            ("second explorer", "second", "explorer"),
        )
    }  # fmt: skip
    order, killed = _order(requests)
    kinds = [*_kinds(order)]
    results = iter(texts.sizes(sum(kind == "call" for kind in kinds), max(8, start // 400), max(16, start // 10)))
    turns = {name: iter(texts.sizes(order.count(name), max(8, start // 1000), max(8, start // 100))) for name in order}
    lengths = {
        name: _TOOLS_TOKENS + count(f"{one.system}{json.dumps(one.tools)}") for name, one in conversations.items()
    }
    calling, found = dict.fromkeys(order, False), list[DayRequest]()
    for number, (name, kind) in enumerate(zip(order, kinds, strict=True)):
        is_result = calling[name]
        size = next(results) if is_result else start // 100 if number == killed else next(turns[name])
        text = texts.code(size) if is_result else texts.prose(size)
        found.append(DayRequest(number, name, kind, text, is_result))
        calling[name] = kind == "call"
        lengths[name] += count(text) + found[-1].max_tokens + _TURN_TOKENS
    return Day(conversations, found, killed, max(lengths.values()))


def _agent(texts: Texts, tokens: int, tools: int) -> tuple[str, list[dict[str, Any]]]:
    """Return the instructions and tools of an agent. Small ones have fewer tools."""
    tools = max(1, min(tools, tokens // 300))
    instructions, size = texts.prose(round(_INSTRUCTIONS * tokens)), round((1 - _INSTRUCTIONS) * tokens / tools)
    return instructions, [texts.tool(f"{texts.name()}_{number}", size) for number in range(tools)]


def _order(requests: int) -> tuple[list[str], int]:
    """Return the conversation of each request, and the number of the first request after the kill."""
    shares = sum(share for _, share in _SEGMENTS)
    ends = [round((requests - MIN_REQUESTS) * part / shares) for part in accumulate(share for _, share in _SEGMENTS)]
    order, killed = list[str](), 0
    for (name, _), begin, end in zip(_SEGMENTS, [0, *ends], ends, strict=False):
        if name:
            order += [name] * (1 + end - begin)
        else:
            killed = len(order)
    return order, killed


def _kinds(order: Sequence[str]) -> Iterator[Kind]:
    """Yield the kinds of requests. The last one of a conversation is no call: its result would never be sent."""
    for place, name in enumerate(order):
        role = "title" if name.endswith("title") else "main" if name in MAIN else "subagent"
        pattern = _PATTERNS[role]
        kind = pattern[order[:place].count(name) % len(pattern)]
        yield "text" if kind == "call" and name not in order[place + 1 :] else kind
