"""A built-in text, and several kinds of prompts made from a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.decode.prompt import Messages, encode, question
from kvkeep.errors import UsageError

KINDS = ("summary", "question", "continuation", "chat")

SUMMARIES = (
    "Summarise the text in detail, point by point.",
    "Write a long and detailed essay about the ideas of this text.",
    "Explain at length what the author thinks, and why.",
)


TEXT = (
    "A library keeps its books on shelves that a reader can reach, and the rest in a store below. When a shelf is "
    "full, the books that nobody has asked for leave it first; they are carried down, not thrown away, and "
    "whoever wants one of them later waits a moment while it is brought up again. The catalogue does not change: "
    "every book is still in the house, and the reader who asks for a page gets that page, word for word. What "
    "changes is only how long it takes, and how much room the shelves need. A good librarian knows which books "
    "are asked for every day, which are read once and then forgotten, and which are so thin that copying them "
    "anew is quicker than walking down the stairs. There are houses that keep every book within reach, and build "
    "another hall whenever the last one is full. There are houses that burn what does not fit, and hope that "
    "nobody will ask. And there are houses that write a short summary of what they burn, which serves well until "
    "somebody needs the very sentence that the summary left out. This house does none of these. It counts its "
    "shelves before the first reader comes in, and it tells the readers how many there are. It writes down, for "
    "every book that is carried below, from what it can be set again, letter by letter: from the author's "
    "manuscript, from the printer's plates, or from the book itself. In the evening, when the doors are closed, "
    "the librarian takes a few books at random, sets them again from the manuscript, and lays the new pages over "
    "the old ones, against the light. If a single letter differs, the house does not open in the morning."
)


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    kind: str
    """One of :data:`KINDS`."""
    ids: list[int]
    """Token ids, about the requested number."""


def built_in(tokenizer: Any, count: int) -> Tensor:
    """Return the first ``count`` tokens of the built-in text, repeated if it is shorter, (1, count)."""
    ids = tokenizer(TEXT).input_ids
    return torch.tensor([(ids * (count // len(ids) + 1))[:count]])


def prompts(
    tokenizer: Any, text: str, lengths: Sequence[int], count: int, kinds: Sequence[str] = KINDS
) -> list[Prompt]:
    """Return ``count`` prompts from different places of ``text``, which alternate between kinds and ``lengths``
    (tokens).

    A *question* asks for a number in the first half of the text, which is evicted at that time. A *chat* has several
    turns about consecutive pieces. A *continuation* is the text without a template. Raises UsageError for a text that
    is too short.
    """
    tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(tokens) < max(lengths):
        raise UsageError(
            f"The text has {len(tokens):,} tokens, too few for prompts of {max(lengths):,}; give a longer text or "
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
