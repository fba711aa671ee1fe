"""Text files that prompts are cut from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvkeep.decode.prompt import encode, question, read_text
from kvkeep.errors import UsageError

_CHARACTERS = 8  # cut for each token wanted: more than a token of any usual text is long


def text_files(data: Path | None, folder: str = "haystack") -> list[Path]:
    """Return the ``.txt`` files of ``data``/``folder``, or of ``data`` itself, by name; raises UsageError if there are
    none."""
    if data is None:
        raise UsageError(f"This task cuts its prompts from texts: give --data FOLDER, with .txt files in {folder}/.")
    found = sorted((data / folder).glob("*.txt")) or sorted(data.glob("*.txt"))
    if not found:
        raise UsageError(f"There are no .txt files in '{data / folder}' or '{data}'; give another folder (--data).")
    return found


def begun(tokenizer: Any, text: str, asked: str | None, lead: str, gap: str) -> list[int]:
    """Return a message's token ids with the answer's first words after them, ``gap`` between without a template."""
    lead = lead if getattr(tokenizer, "chat_template", None) else f"{gap}{lead}"
    return encode(tokenizer, question(text, asked)) + list(tokenizer(lead, add_special_tokens=False).input_ids)


def joined(sources: Sequence[Path]) -> str:
    """Return all texts in a row."""
    return "\n\n".join(read_text(str(path)).strip() for path in sources)


def passage(tokenizer: Any, text: str, tokens: int, draw: random.Random) -> list[int]:
    """Return ``tokens`` token ids of ``text``, from the first sentence after a place that ``draw`` chooses; a text that
    ends begins again. Raises UsageError where the text is shorter than that."""
    place = draw.randrange(len(text))
    start = max(text.find(". ", place) + 2, text.find(".\n", place) + 2, 0)
    ids = list(
        tokenizer((text + "\n\n" + text)[start : start + _CHARACTERS * tokens], add_special_tokens=False).input_ids
    )
    if len(ids) < tokens:
        raise UsageError(f"The texts have too few words for a prompt of {tokens:,} tokens; give more of them (--data).")
    return ids[:tokens]
