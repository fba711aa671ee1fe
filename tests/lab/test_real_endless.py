"""``endless`` on the embedded model: a chat, and needles far beyond the part of the text that is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kvkeep_lab.prompts import TEXT
from kvkeep_lab.tasks.needles import Needles
from measuring import tool

from kvkeep import KeepCache

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_a_chat_beyond_the_exact_tokens_answers_from_its_second_turn(smollm2: Any) -> None:
    """Beyond 512 tokens with 384 resident entries; the fact is neither in the first block nor among the newest."""
    endless_chat = tool("endless_chat")
    text = f"{TEXT} {TEXT.replace('library', 'museum').replace('book', 'picture')}"
    fact = endless_chat.Fact(
        "The special magic number for Oslo is 48213.", "What is the special magic number for Oslo?", "48213"
    )
    cache = KeepCache(smollm2.model, "endless+passages:exact=512", 384)
    found = endless_chat.chat(smollm2.model, smollm2.tokenizer, cache, text, 1300, fact, after=1)
    last = found.turns[-1]
    assert last.tokens > 1300 and cache.exactness == "reversible" and 128 < found.place < 512
    assert any(low <= found.place + 20 < high for low, high in last.attended)
    assert found.found, found.answer
    assert cache.memory().resident_bytes <= 384 * cache.geometry.kv_bytes_per_token


def test_needles_far_beyond_the_exact_tokens_are_chosen_and_read(smollm2: Any, tmp_path: Path) -> None:
    """22 blocks, of which a question recalls at most eight. A guess among ten digits has ln p = -2.3 a token."""
    (tmp_path / "unused.txt").write_text(TEXT)
    point = {"length": 2900, "kind": "noise", "question": "unseen"}
    samples = Needles(length=[2900], kind=["noise"]).prepare(smollm2.tokenizer, [tmp_path / "unused.txt"], point, 0)
    cache = KeepCache(smollm2.model, "endless+passages:count=8,exact=1024", 512)
    with torch.no_grad():
        smollm2.model(torch.tensor([samples[0].facts["text"].ids]), cache=cache, use_cache=True, logits_to_keep=1)
        for sample in samples[1:8:3]:
            right, copy = sample.facts["right"], cache.fork()
            logits = smollm2.model(
                torch.tensor([[*sample.ids, *right[:-1]]]), cache=copy, use_cache=True, logits_to_keep=len(right)
            ).logits[0]
            logs = logits.float().log_softmax(-1)[torch.arange(len(right)), torch.tensor(right)]
            assert float(logs.mean()) > -1, sample.facts["depth"]
            spans = tool("endless_chat").attended(copy)
            assert sum(high - low for low, high in spans) < 0.8 * 2900, spans


def test_facts_in_a_long_text_are_recalled_by_questions_in_the_chat_template(smollm2: Any, tmp_path: Path) -> None:
    tool("endless_chat")  # from which the other one imports
    needles = tool("endless_needles")
    file, other = tmp_path / "author.txt", TEXT.replace("library", "museum").replace("book", "picture")
    file.write_text(f"{TEXT} {other} " * 4)
    found = [*needles.ask(smollm2, [file], 0, "endless+passages:exact=512", 384, 1500)]
    assert [(one.depth, one.recalled) for one in found] == [(depth, True) for depth in needles.DEPTHS]
    assert {one.form for one in found} == {*needles.FORMS} and all(one.tokens > 1500 for one in found)
    assert "| smollm2 | endless+passages:exact=512 | 384 | 3 | 3 |" in needles.table(found)
