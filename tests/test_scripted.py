"""Scripted models say what their scripts say, in memory and from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from scripted import CONTENTS, END, Vocabulary, byte_level, scripted, sentencepiece, write_gguf

import kvkeep
from kvkeep import KeepCache, generate
from kvkeep.models.loading import Loaded

ANSWER = ["Q", "def", "\n", "    ", "é"]


def spoken(loaded: Loaded, vocabulary: Vocabulary) -> list[str]:
    """The tokens that the model writes after a text that ends with Q."""
    ids = loaded.tokenizer("the Q", add_special_tokens=False).input_ids
    cache = KeepCache(loaded.model)
    return [vocabulary.tokens[one] for one in generate(loaded.model, loaded.tokenizer, ids, cache).tokens]


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_a_model_says_its_script_in_memory_and_from_a_file(kind: Callable[..., Vocabulary], tmp_path: Path) -> None:
    vocabulary = kind(*ANSWER[1:])
    script = vocabulary.script([*ANSWER, END])
    wanted = [vocabulary.spelt(piece) for piece in [*ANSWER[1:], END]]
    assert spoken(scripted(vocabulary, script, CONTENTS), vocabulary) == wanted
    write_gguf(tmp_path / "scripted.gguf", vocabulary, script, CONTENTS)
    loaded = kvkeep.load(tmp_path / "scripted.gguf")
    assert spoken(loaded, vocabulary) == wanted and loaded.tokenizer.chat_template == CONTENTS


def test_an_answer_without_an_end_goes_on_with_its_last_token() -> None:
    vocabulary = byte_level()
    loaded = scripted(vocabulary, vocabulary.script(["Q", "a", "b"]))
    ids = loaded.tokenizer("Q").input_ids
    assert generate(loaded.model, loaded.tokenizer, ids, KeepCache(loaded.model), max_new_tokens=5).text == "abbbb"
