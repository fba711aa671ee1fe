"""Text files from which prompts are cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any

from kvkeep.decode.cached_text import common_prefix
from kvkeep.decode.prompt import encode, question, shortened
from kvkeep.decode.texts import read_text
from kvkeep.errors import UsageError
from kvkeep_lab.subject import ReadText

_CHARACTERS = 8  # characters cut per requested token; longer than usual tokens
_NEAR = 8192  # maximum distance to the end of a paragraph, in characters
_TRIES = 200  # places that a seed may try before a text is too short


class ShortText(UsageError):
    """A text is too short for the requested passages."""


def text_files(data: Path | None) -> list[Path]:
    """Return the ``.txt`` files of ``data``/haystack, or of ``data`` itself, by name; raises UsageError if there are
    none, or one has no readable text."""
    if data is None:
        raise UsageError("This task cuts its prompts from texts: give --data FOLDER, with .txt files in haystack/.")
    found = sorted((data / "haystack").glob("*.txt")) or sorted(data.glob("*.txt"))
    if not found:
        raise UsageError(f"There are no .txt files in '{data / 'haystack'}' or '{data}'; give another folder (--data).")
    for file in found:
        read_text(str(file))
    return found


def named_files(given: Sequence[str]) -> list[Path]:
    """Return the files of ``given``. An item is a file, a folder (all its ``.txt`` files), a pattern, or several of
    these separated by commas; "-" is standard input. Raises UsageError for a folder or a pattern without files."""
    found: list[Path] = []
    for name in given:
        path = Path(name)
        if path.is_dir():
            if not (matches := sorted(path.glob("*.txt"))):
                raise UsageError(f"There are no .txt files in the folder '{name}'.")
            found += matches
        elif path.exists() or name == "-" or not set(name) & set("*?[,"):
            found.append(path)
        elif "," in name:
            found += named_files([part.strip() for part in name.split(",") if part.strip()])
        elif matches := sorted(map(Path, glob(name, recursive=True))):
            found += matches
        else:
            raise UsageError(f"No file matches '{name}'.")
    return list(dict.fromkeys(found))


def begun(tokenizer: Any, text: str, prompt: str | None, lead: str, gap: str) -> list[int]:
    """Return the token ids of a message and of the answer's first words ``lead``. Without a chat template, ``gap``
    separates them."""
    lead = lead if getattr(tokenizer, "chat_template", None) else f"{gap}{lead}"
    return encode(tokenizer, question(text, prompt)) + list(tokenizer(lead, add_special_tokens=False).input_ids)


def read_once(
    prompts: Sequence[list[int]], shared: Sequence[int], opening: Sequence[int], context: int
) -> tuple[ReadText, list[list[int]]]:
    """Return the text with which all ``prompts`` begin, which is read before their questions are known, and the rest of
    each prompt. All are token ids.

    shared: the text without a question; opening: the same without the text. Where a word of a question joins the last
    word of the text to one token, the text ends before it. context: that of the :class:`ReadText`.
    """
    start = min(common_prefix(ids, shared) for ids in prompts)
    text = ReadText(tuple(shared[:start]), context, common_prefix(shared, opening))
    return text, [ids[start:] for ids in prompts]


def joined(sources: Sequence[Path]) -> str:
    """Return all texts concatenated."""
    return "\n\n".join(read_text(str(path)).strip() for path in sources)


def passage(tokenizer: Any, text: str, tokens: int, draw: random.Random) -> list[int]:
    """Return ``tokens`` token ids of ``text``. They begin at a sentence after a place that ``draw`` chooses, at the
    start of a paragraph if one is near. After its end, the text is repeated. Raises UsageError if the text has fewer
    tokens."""
    ids = list(tokenizer(_drawn(text, tokens, draw), add_special_tokens=False).input_ids)
    if len(ids) < tokens:
        raise _too_few(tokens)
    return ids[:tokens]


def passage_text(tokenizer: Any, text: str, tokens: int, draw: random.Random) -> str:
    """Return the text of :func:`passage`. Raises as it does."""
    found, count = shortened(tokenizer, _drawn(text, tokens, draw), tokens)
    if count < tokens:
        raise _too_few(tokens)
    return found


def _drawn(text: str, tokens: int, draw: random.Random) -> str:
    place = draw.randrange(len(text))
    paragraph = text.find(".\n", place, place + _NEAR)
    start = max(paragraph, text.find(". ", place)) + 2 if paragraph >= 0 else _sentence(text, place) or 0
    return (text + "\n\n" + text)[start : start + _CHARACTERS * tokens]


def _too_few(tokens: int) -> UsageError:
    return UsageError(f"The texts have too few words for a prompt of {tokens:,} tokens; give more of them (--data).")


def _sentence(text: str, place: int) -> int | None:
    """Return the start of the first sentence after ``place``, or None."""
    ends = [end + 2 for mark in (". ", ".\n") if (end := text.find(mark, place)) >= 0]
    return min(ends, default=None)


def pieces(tokenizer: Any, text: str, tokens: int, count: int) -> list[str]:
    """Return ``count`` pieces of ``text`` with ``tokens`` tokens each. A piece begins at the first sentence after a
    place that its seed (0, 1, ...) chooses, or at the first word if no sentence follows. Pieces do not overlap: a seed
    chooses again until its piece is separate from the earlier ones. A seed's piece therefore does not depend on
    ``count``. Raises ShortText if the text is too short for all pieces."""
    found: list[tuple[int, int]] = []
    for seed in range(count):
        draw = random.Random(seed)
        for _ in range(_TRIES):
            place = draw.randrange(len(text))
            start = _sentence(text, place) or text.find(" ", place) + 1
            if any(low <= start < high for low, high in found):
                continue
            piece, there = shortened(tokenizer, text[start : start + _CHARACTERS * tokens], tokens)
            stop = start + len(piece)
            if there >= tokens and not any(start < high and low < stop for low, high in found):
                found.append((start, stop))
                break
        else:
            raise ShortText(
                f"{count} passages of {tokens:,} tokens do not fit into the text without overlap, only {seed}; give a "
                "longer text, shorter passages, or fewer."
            )
    return [text[start:stop] for start, stop in found]
