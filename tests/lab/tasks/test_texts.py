"""Where passages of texts begin."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvkeep_lab.tasks.texts import passage, read_once, text_files

from kvkeep.errors import UsageError


def letters(text: str, add_special_tokens: bool) -> Any:
    """A tokenizer whose tokens are letters."""
    return SimpleNamespace(input_ids=text)


def begins(text: str, tokens: int = 9) -> set[str]:
    """What passages of ``text`` begin with, over many seeds."""
    return {"".join(passage(letters, text, tokens, random.Random(seed))) for seed in range(400)}


def test_passages_begin_with_paragraphs_and_without_them_with_sentences() -> None:
    paragraphs = "".join(f"Part {n} is. Not here. Nor here.\n" for n in range(4, 8))
    assert begins(paragraphs) == {f"Part {n} is" for n in range(4, 8)} | {"Not here.", "\n\nPart 4 "}
    line = "".join(f"Part {n:02} ends. " for n in range(40))
    assert begins(line) == {f"Part {n:02} e" for n in range(40)} | {"\n\nPart 00"}
    long = f"{'Here a sentence ends. ' * 2000}\nNew line. " * 2  # its end of a line is far
    assert len({random.Random(seed).randrange(len(long)) for seed in range(400)}) > 300
    assert begins(long, 4) == {"Here"}


def test_a_text_without_sentences_is_read_from_its_start_and_a_short_one_refused() -> None:
    assert begins("one two three four") == {"one two t"}
    with pytest.raises(UsageError, match="too few words"):
        begins("one", 200)


def test_a_text_that_is_read_once_ends_where_questions_differ() -> None:
    """Joined to its prompts again, it is what they were; a token of text and question counts as of the question."""
    prompts = [[1, 2, 7, 8, 3, 30], [1, 2, 7, 8, 9, 4]]
    text, questions = read_once(prompts, [1, 2, 7, 8, 9, 5], [1, 2, 5], 9)
    assert (text.ids, text.head, text.context) == ((1, 2, 7, 8), 2, 9)
    assert [[*text.ids, *rest] for rest in questions] == prompts


def test_a_folder_whose_texts_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for content, sentence in ((b"", "it is empty"), (b"a\0b", "it is binary"), (b"\xff", "is not UTF-8")):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(UsageError, match=sentence):
            text_files(tmp_path)
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(UsageError, match="cannot be read: is a directory"):
        text_files(tmp_path)
