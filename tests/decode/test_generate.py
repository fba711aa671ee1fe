"""Generation: text as it comes, timings, stops, limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import tokenizer
from families import tiny

from kvkeep import KeepCache, UsageError, generate
from kvkeep.decode.prompt import encode, question, read_text

PROMPT = list(range(5, 60))


def test_the_pieces_are_the_text() -> None:
    pieces: list[str] = []
    result = generate(
        tiny("llama"), tokenizer(), PROMPT, KeepCache(tiny("llama")), max_new_tokens=20, on_text=pieces.append
    )
    assert "".join(pieces) == result.text and result.text
    assert len(result.tokens) == 20 and result.stopped == "length"
    assert result.sequence == PROMPT + result.tokens


def test_progress_is_told_chunk_by_chunk() -> None:
    told: list[int] = []
    cache = KeepCache(tiny("llama"), budget=16)
    generate(tiny("llama"), tokenizer(), PROMPT, cache, max_new_tokens=2, on_progress=told.append)
    assert told[:4] == [7, 23, 39, 55]


def test_interrupting_stops_between_tokens() -> None:
    pieces: list[str] = []
    cache = KeepCache(tiny("llama"), budget=16)
    result = generate(
        tiny("llama"),
        tokenizer(),
        PROMPT,
        cache,
        max_new_tokens=50,
        on_text=pieces.append,
        interrupted=lambda: len(pieces) >= 3,
    )
    assert result.stopped == "interrupted" and 3 <= len(result.tokens) < 10
    assert cache.get_seq_length() == len(PROMPT) + len(result.tokens) - 1


def test_interrupting_the_prompt_keeps_whole_chunks() -> None:
    told: list[int] = []
    cache = KeepCache(tiny("llama"), budget=16)
    with pytest.raises(KeyboardInterrupt):
        generate(tiny("llama"), tokenizer(), PROMPT, cache, on_progress=told.append, interrupted=lambda: len(told) >= 2)
    assert cache.get_seq_length() == 23  # 7 and 16
    result = generate(tiny("llama"), tokenizer(), PROMPT, cache, max_new_tokens=9)
    assert (
        result.tokens == generate(tiny("llama"), tokenizer(), PROMPT, KeepCache(tiny("llama")), max_new_tokens=9).tokens
    )


def test_sampling_is_repeatable() -> None:
    runs = [
        generate(
            tiny("llama"), tokenizer(), PROMPT, KeepCache(tiny("llama")), max_new_tokens=9, temperature=1.0, seed=seed
        )
        for seed in (1, 1, 2)
    ]
    assert runs[0].tokens == runs[1].tokens != runs[2].tokens


def test_a_prompt_beyond_the_positions_is_refused() -> None:
    with pytest.raises(UsageError, match="600 tokens and the model has 512 positions"):
        generate(tiny("llama"), tokenizer(), [5] * 600, KeepCache(tiny("llama")))


def test_writing_ends_with_the_positions() -> None:
    result = generate(tiny("llama"), tokenizer(), [5] * 508, KeepCache(tiny("llama")), max_new_tokens=50)
    assert len(result.tokens) == 4 and result.stopped == "positions"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to answer"):
        generate(tiny("llama"), tokenizer(), [], KeepCache(tiny("llama")))
    with pytest.raises(UsageError, match="nothing to answer"):
        question(None, "  ")


def test_texts_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"ab\0cd")
    (tmp_path / "latin").write_bytes("caf\u00e9".encode("latin-1"))
    for name, why in (("none", "no such file"), ("empty", "is empty"), ("binary", "is binary"), ("latin", "not UTF-8")):
        with pytest.raises(UsageError, match=why):
            read_text(str(tmp_path / name))
    with pytest.raises(UsageError, match="is a directory"):
        read_text(str(tmp_path))


def test_chat_templates_are_applied_unless_raw() -> None:
    messages = question("the a of", "and to")
    assert encode(tokenizer(), messages)[0] == tokenizer().convert_tokens_to_ids("<user>")
    assert encode(tokenizer(), messages, raw=True) == tokenizer()("the a of and to").input_ids
