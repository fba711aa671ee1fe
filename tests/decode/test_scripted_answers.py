"""Whole answers that are known to the letter, through ``generate`` and a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted import CONTENTS, END, START, TURN, byte_level, scripted, sentencepiece, write_gguf

import kvkeep
from kvkeep import Conversation, KeepCache, generate

KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece}
PIECES = ("  ", "    ", " def", "return", " x", "y")
ANSWER = [" def", ":", "\n", "    ", "return", " x", "  ", b"\xc3", b"\xa9", "\t", "y", b"\xe2", END]
WRITTEN = " def:\n    return x  é\ty\ufffd"


def model(kind: str, start: str, answer: list[Any], template: str | None = CONTENTS) -> Any:
    vocabulary = KINDS[kind](*PIECES)
    return vocabulary, scripted(vocabulary, vocabulary.script([start, *answer]), template)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_its_text_with_all_spaces(kind: str) -> None:
    _, loaded = model(kind, "Q", ANSWER)
    ids = loaded.tokenizer("the Q").input_ids
    told: list[str] = []
    seen: list[str] = []
    options: dict[str, Any] = {"on_text": told.append, "interrupted": lambda: bool(seen.append("".join(told)))}
    found = generate(loaded.model, loaded.tokenizer, ids, KeepCache(loaded.model), **options)
    assert found.text == "".join(told) == WRITTEN and found.stopped == "eos"
    assert found.text == generate(loaded.model, loaded.tokenizer, ids, KeepCache(loaded.model)).text
    assert all(WRITTEN.startswith(text) for text in seen) and seen[-1] == WRITTEN[:-1] and "é" not in seen[7]
    for count in range(1, len(ANSWER)):
        cut = generate(loaded.model, loaded.tokenizer, ids, KeepCache(loaded.model), max_new_tokens=count)
        assert cut.text.rstrip("\ufffd") == seen[count - 1] and cut.stopped == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_the_space_of_a_tokenizers_own_is_no_part_of_an_answer_after_a_special_token(kind: str) -> None:
    vocabulary, loaded = model(kind, START, [" x", "y", TURN, END], None)
    ids = loaded.tokenizer(f"Q{START}").input_ids
    found = generate(loaded.model, loaded.tokenizer, ids, KeepCache(loaded.model))
    assert found.text == (" xy" if kind == "byte level" else "xy")
    assert [vocabulary.tokens[one] for one in found.tokens[-2:]] == [TURN, END]
    again = loaded.tokenizer(f"Q{START}{found.text}").input_ids
    assert again == [*ids, *found.tokens[:-2]], "the text is read as it was written"


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on_within_a_character(kind: str) -> None:
    _, loaded = model(kind, "Q", [" x", b"\xe2", b"\x82", b"\xac", "y", END])
    talk = Conversation(loaded.model, loaded.tokenizer, KeepCache(loaded.model))
    assert talk.answer("Q", max_new_tokens=2).text == " x\ufffd"
    told: list[str] = []
    result = talk.continue_answer(max_new_tokens=9, on_text=told.append)
    assert result.text == "".join(told) == "\N{EURO SIGN}y"
    assert talk.messages[-1]["content"] == " x\N{EURO SIGN}y"


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_of_a_file_is_that_of_the_model_in_memory(kind: str, tmp_path: Path) -> None:
    vocabulary = KINDS[kind](*PIECES)
    write_gguf(tmp_path / "one.gguf", vocabulary, vocabulary.script(["Q", *ANSWER]), CONTENTS)
    loaded = kvkeep.load(tmp_path / "one.gguf")
    talk = Conversation(loaded.model, loaded.tokenizer, KeepCache(loaded.model))
    assert talk.answer("the Q").text == WRITTEN
