"""Chat templates: from messages to a text in which every message stands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvkeep.errors import UsageError, out_of_memory, ran_out_of_memory
from kvkeep.models.chat_templates import TemplateTooCostly, filled

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class _Form:
    """How a template takes the messages of a conversation."""

    parts: bool = False
    """Whether a content is a list of parts; otherwise it is a string."""
    dropped: tuple[str, ...] = ()
    """The roles of messages that the template leaves out."""


def fill(tokenizer: Any, messages: Messages) -> str:
    """Return the text of a conversation up to its answer. Raises UsageError if the template rejects the conversation,
    leaves a message out or takes too many steps."""
    try:
        form = _form(tokenizer, tokenizer.get_chat_template(), tuple(one["role"] for one in messages))
        text = _filled(tokenizer, messages, form.parts)
    except TemplateTooCostly:
        raise
    except Exception as error:  # a template is the model's code and may raise anything
        if ran_out_of_memory(error):
            raise out_of_memory("a chat template", error) from error
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        system = any(message["role"] == "system" for message in messages)
        remedy = "leave the system prompt out" if system else "give a plain prompt (--raw) or take another model"
        raise UsageError(f"The model's chat template does not take this conversation ({first}); {remedy}.") from error
    if form.dropped:
        roles = " and ".join(f"'{one}'" for one in form.dropped)
        raise UsageError(
            f"The model's chat template leaves out a message of the role {roles} of this conversation, so the model "
            "would not read it; put its text into the question."
        )
    return text


@lru_cache(maxsize=64)
def _form(tokenizer: Any, template: str, roles: Sequence[str]) -> _Form:
    """Return how a template takes messages of these roles. It is filled with a mark for each message: a template that
    goes through the parts of a content leaves a string out, and one that writes strings may fail with parts."""
    marked = [{"role": role, "content": f"kept{number}q"} for number, role in enumerate(roles)]
    forms = []
    for parts in (False, True):
        try:
            text = _filled(tokenizer, marked, parts)
        except TemplateTooCostly:
            raise
        except Exception as error:  # the conversation itself tells whether the template takes it
            if ran_out_of_memory(error):
                raise
            continue
        found = {int(number) for number in re.findall(r"kept(\d+)q", text)}
        missing = (role for number, role in enumerate(roles) if number not in found)
        forms.append(_Form(parts, tuple(dict.fromkeys(missing))))
        if not forms[-1].dropped:
            return forms[-1]
    return forms[0] if forms else _Form()


def _filled(tokenizer: Any, messages: Messages, parts: bool) -> str:
    given: list[Any] = [
        one | {"content": [{"type": "text", "text": one["content"]}]} if parts else one for one in messages
    ]
    return filled(tokenizer, given)
