"""The instructions of a prompt: the tokens with which every conversation with its system prompt and tools begins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from kvkeep.decode.cached_text import common_prefix
from kvkeep.decode.prompt import EMPTY, Variables, prompt_text
from kvkeep.decode.tool_texts import Messages, Tools

_QUESTIONS = "A", "1"
"""Two questions that begin with different tokens: what precedes both belongs to the instructions."""


def instruction_tokens(
    tokenizer: Any,
    prompt: Sequence[int],
    messages: Messages,
    *,
    raw: bool = False,
    tools: Tools = (),
    variables: Variables = EMPTY,
) -> int:
    """Return the number of first tokens of a ``prompt`` that do not depend on its questions: the system messages at its
    beginning, and the tools if the template writes them there. The other arguments are those of
    :func:`~kvkeep.decode.prompt.prompt_text`, from which the prompt was encoded."""
    head = [*takewhile(lambda one: one["role"] in ("system", "developer"), messages)]
    others = ([*head, {"role": "user", "content": text}] for text in _QUESTIONS)
    texts = (prompt_text(tokenizer, one, raw=raw, tools=tools, variables=variables) for one in others)
    return min(common_prefix(prompt, text.ids(tokenizer)) for text in texts)
