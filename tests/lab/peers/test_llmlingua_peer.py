"""LLMLingua as a peer: the ends of a prompt stay, the budget holds, and the package is asked as it wants to be."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from measuring import subject

from kvkeep.errors import BudgetError, KvkeepError, UsageError

IDS = torch.randint(2, 97, (80,), generator=torch.Generator().manual_seed(5)).tolist()
METHOD = "peer-llmlingua:edge=6"

PACKAGE = '''
"""Keeps every so manieth token, and always {surplus} more than it should at first."""

__version__ = "made up"
asked = []


class PromptCompressor:
    def __init__(self):
        raise AssertionError("this would fetch something")

    def iterative_compress_prompt(self, context, target_token, iterative_size=200, dynamic_ratio=None):
        given = self.tokenizer("\\n\\n".join(context), return_tensors="pt", add_special_tokens=False)
        ids, mask = given["input_ids"], given["attention_mask"]
        assert len(self.tokenizer("any").input_ids) == ids.shape[1] <= self.max_position_embeddings
        half = ids.shape[1] // 2
        whole = self.model(ids, attention_mask=mask, past_key_values=None, use_cache=True)
        first = self.model(ids[:, :half], attention_mask=mask[:, :half], past_key_values=None, use_cache=True)
        past = [[keys[:, :, : half - 1], values[:, :, : half - 1]] for keys, values in first.past_key_values]
        again = self.model(ids[:, half - 1 :], attention_mask=mask, past_key_values=past, use_cache=True)
        assert (again.logits - whole.logits[:, half - 1 :]).abs().max() < 1e-4
        asked.append(target_token)
        step = ids.shape[1] / (target_token + {surplus})
        kept = [int(step * number) for number in range(int(target_token) + {surplus})]
        return ids[:, kept], mask[:, kept]
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(surplus: int) -> Any:
        (tmp_path / "llmlingua.py").write_text(PACKAGE.replace("{surplus}", str(surplus)))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(__import__("sys").modules, "llmlingua", raising=False)
        return __import__("llmlingua")

    yield made
    __import__("sys").modules.pop("llmlingua", None)


@pytest.mark.parametrize(("surplus", "tries"), [(0, 1), (3, 2)])
def test_the_ends_stay_and_the_budget_holds(package: Any, surplus: int, tries: int) -> None:
    asked = package(surplus).asked
    answer = subject(METHOD, "30").write(IDS, 4)
    assert len(asked) == tries and asked[0] == 18
    kept = 30 if surplus == 0 else 12 + int(asked[-1]) + surplus
    assert kept <= 30 == answer.cost.entries
    expected = subject("stock")
    middle = IDS[6:-6]
    step = len(middle) / (asked[-1] + surplus)
    short = [*IDS[:6], *(middle[int(step * number)] for number in range(kept - 12)), *IDS[-6:]]
    assert answer.tokens == expected.write(short, 4).tokens
    row = 4 * 2 * 2 * 8 * 4
    assert answer.cost.memory["resident_bytes"] == row * (kept + 3)
    assert answer.cost.memory["peak_cache_bytes"] == row * len(middle)  # compressing looks at all of it
    assert (answer.cost.prompt_tokens, answer.cost.exactness) == (80, "lossy")


def test_a_prompt_within_the_budget_is_left_alone(package: Any) -> None:
    asked = package(0).asked
    full = subject("stock")
    assert subject(METHOD, "100").write(IDS, 4).tokens == full.write(IDS, 4).tokens and asked == []


def test_what_cannot_be_is_one_sentence(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package(50)
    with pytest.raises(KvkeepError, match="leaves 51 tokens where 18 are the budget"):
        subject(METHOD, "30").write(IDS, 4)
    with pytest.raises(BudgetError, match="no room between 48 at either end"):
        subject("peer-llmlingua", "30").write(IDS, 4)
    monkeypatch.setattr("kvkeep_lab.peers.llmlingua.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs the package llmlingua, which is missing: pip install llmlingua\."):
        subject(METHOD, "30").write(IDS, 4)


@pytest.mark.skipif(find_spec("llmlingua") is None, reason="llmlingua is not installed")
def test_the_package_itself_keeps_what_surprises() -> None:
    answer = subject(METHOD, "40").write([*IDS, *IDS, *IDS, *IDS], 4)
    row = 4 * 2 * 2 * 8 * 4
    held, most = (answer.cost.memory[f"{name}_bytes"] for name in ("resident", "peak_cache"))
    assert row * 33 < held <= row * 43 and most == row * 308
