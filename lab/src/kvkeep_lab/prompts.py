"""Prompts made of one text, of the kinds that people write: for measuring on what is real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.decode.prompt import Messages, encode, question
from kvkeep.errors import UsageError

KINDS = ("summary", "question", "continuation", "chat")

SUMMARIES = (
    "Summarise the text in detail, point by point.",
    "Write a long and detailed essay about the ideas of this text.",
    "Explain at length what the author thinks, and why.",
)


@dataclass(frozen=True)
class Prompt:
    """Token ids of about so many tokens; ``kind``: one of :data:`KINDS`."""

    kind: str
    ids: list[int]


def prompts(
    tokenizer: Any, text: str, lengths: Sequence[int], count: int, kinds: Sequence[str] = KINDS
) -> list[Prompt]:
    """Return ``count`` prompts from different places of ``text``, kinds and ``lengths`` (tokens) taking turns.

    A *question* asks for a number that stands in the text's first half, which is evicted by then; a *chat* is several
    turns about consecutive pieces; a *continuation* is the text itself, without a template. Raises UsageError for a
    text that is too short.
    """
    tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(tokens) < max(lengths):
        raise UsageError(
            f"The text has {len(tokens):,} tokens and prompts of {max(lengths):,} are wanted; give a longer text or "
            "shorter lengths."
        )
    made = []
    for number in range(count):
        kind, length = kinds[number % len(kinds)], lengths[(number // len(kinds)) % len(lengths)]
        start = (number * 977) % (len(tokens) - length + 1)
        piece = tokens[start : start + length]
        if kind == "continuation":
            made.append(Prompt(kind, list(piece)))
            continue
        messages = _messages(kind, number, lambda part: str(tokenizer.decode(part)), piece)
        made.append(Prompt(kind, encode(tokenizer, messages)))
    return made


def _messages(kind: str, number: int, decode: Any, piece: list[int]) -> Messages:
    if kind == "summary":
        return question(decode(piece), SUMMARIES[number % len(SUMMARIES)])
    if kind == "question":
        place = len(piece) * (1 + number % 5) // 10
        key = f" The pass key is {10007 + 7919 * number % 89989}. Remember it. "
        text = decode(piece[:place]) + key + decode(piece[place:])
        return question(text, "What is the pass key in the text above? Then say more.")
    turns = 4
    size = len(piece) // (2 * turns)
    parts = [decode(piece[low : low + size]) for low in range(0, 2 * turns * size, size)]
    messages: Messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"I read this: {parts[2 * turn]}\nWhat comes next?"})
        messages.append({"role": "assistant", "content": parts[2 * turn + 1]})
    return [*messages, {"role": "user", "content": "And what do you make of all this? Answer at length."}]
