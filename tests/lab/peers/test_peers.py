"""Peers: transformers' own caches, with counted bytes, and LLMLingua, through a made-up package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from kvkeep_lab.peers import PEERS, peer_of
from kvkeep_lab.reading import cache_for, read, takes
from measuring import subject
from transformers.utils import is_optimum_quanto_available

from kvkeep.errors import BudgetError, KvkeepError, UnsupportedModelError, UsageError
from kvkeep.stock import memory_of

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
def test_llmlingua_keeps_both_ends_of_the_prompt_within_the_budget(package: Any, surplus: int, tries: int) -> None:
    requested = package(surplus).asked
    answer = subject(METHOD, "30").write(IDS, 4)
    assert len(requested) == tries and requested[0] == 18
    kept = 30 if surplus == 0 else 12 + int(requested[-1]) + surplus
    assert kept <= 30 == answer.cost.entries
    expected = subject("stock")
    middle = IDS[6:-6]
    step = len(middle) / (requested[-1] + surplus)
    short = [*IDS[:6], *(middle[int(step * number)] for number in range(kept - 12)), *IDS[-6:]]
    assert answer.tokens == expected.write(short, 4).tokens
    row = 4 * 2 * 2 * 8 * 4
    assert answer.cost.memory["resident_bytes"] == row * (kept + 3)
    assert answer.cost.memory["peak_cache_bytes"] == row * len(middle)  # compressing looks at all of it
    assert (answer.cost.prompt_tokens, answer.cost.exactness) == (80, "lossy")


def test_llmlingua_does_not_change_a_prompt_within_the_budget(package: Any) -> None:
    requested = package(0).asked
    full = subject("stock")
    assert subject(METHOD, "100").write(IDS, 4).tokens == full.write(IDS, 4).tokens and requested == []


def test_llmlingua_failures_are_one_sentence(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package(50)
    with pytest.raises(KvkeepError, match="kept 51 tokens, but the budget is 18"):
        subject(METHOD, "30").write(IDS, 4)
    with pytest.raises(BudgetError, match="too small: 48 tokens at each end always stay"):
        subject("peer-llmlingua", "30").write(IDS, 4)
    monkeypatch.setattr("kvkeep_lab.peers.llmlingua.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs the package llmlingua, which is missing: pip install llmlingua\."):
        subject(METHOD, "30").write(IDS, 4)


@pytest.mark.skipif(find_spec("llmlingua") is None, reason="llmlingua is not installed")
def test_the_real_llmlingua_package_compresses_to_the_budget() -> None:
    answer = subject(METHOD, "40").write([*IDS, *IDS, *IDS, *IDS], 4)
    row = 4 * 2 * 2 * 8 * 4
    resident, peak = (answer.cost.memory[f"{name}_bytes"] for name in ("resident", "peak_cache"))
    assert row * 33 < resident <= row * 43 and peak == row * 308


def logits(method: str, new: int = 6) -> tuple[list[Any], Any]:
    model = tiny("llama")
    cache = cache_for(model, method, None, len(IDS[:60]) + new)
    return [one for one, _ in read(model, torch.tensor([IDS[:60]]), cache, new, [5] * new)], cache


def test_peer_names_and_their_parameters_are_parsed() -> None:
    assert peer_of("snapkv") is peer_of("stock") is peer_of("kvpress:snapkv") is None
    assert takes("stock-quantized:2") == () and takes("peer-kvpress:snapkv") == ("budget",)
    assert takes("peer-kvpress:full") == () and takes("peer-llmlingua:edge=8") == ("budget",)
    assert all(peer.about for peer in PEERS.values())
    for wrong, said in {
        "peer-kvpres:snapkv": "Unknown peer 'peer-kvpres': did you mean peer-kvpress",
        "stock-quantized:4,sinks=2": "'stock-quantized' takes bits",
        "peer-llmlingua:edge=few": "edge is a whole number, not 'few'",
        "peer-kvpress": "needs the name of a press",
        "peer-kvpress:snapkv,unseen=all": "unseen is a whole number, not 'all'",
    }.items():
        with pytest.raises(UsageError, match=said):
            takes(wrong)


def test_stock_static_is_exact_and_allocated_at_once() -> None:
    expected, stock = logits("stock")
    got, cache = logits("stock-static")
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, got, strict=True))
    resident, allocated = memory_of(stock).resident_bytes, memory_of(cache).resident_bytes
    assert resident == allocated * 65 // 66  # the last token is not read


def test_stock_offloaded_is_refused_on_a_cpu() -> None:
    with pytest.raises(UsageError, match=r"this model is on the cpu: .* use 'stock'"):
        subject("stock-offloaded").write(IDS[:60], 4)


def test_fp8_entries_take_a_quarter_of_the_bytes_and_change_logits_little() -> None:
    expected, stock = logits("stock")
    got, cache = logits("stock-quantized:fp8")
    assert torch.equal(expected[0], got[0])  # the prompt itself is attended to in full
    gap = max(float((a - b).abs().max()) for a, b in zip(expected[1:], got[1:], strict=True))
    spread = max(float(a.std()) for a in expected)
    assert 0 < gap < 0.2 * spread
    memory, full = memory_of(cache), memory_of(stock).resident_bytes
    assert (memory.resident_bytes, memory.compressed_bytes) == (0, full // 4 + 4 * 2 * 4)  # 4 layers' pairs of scales
    assert memory.peak_workspace_bytes == full // 4
    answer = subject("stock-quantized:fp8").write(IDS[:60], 4)
    assert answer.cost.exactness == "lossy" and answer.cost.entries is None and len(answer.tokens) == 4


def test_quanto_entries_take_the_bytes_of_their_bits() -> None:
    if not is_optimum_quanto_available():
        with pytest.raises(UsageError, match="needs the package optimum-quanto, which is missing: pip install"):
            logits("stock-quantized")
        return
    full, sizes = memory_of(logits("stock")[1]).resident_bytes, []
    for bits in (4, 2):
        memory = memory_of(logits(f"stock-quantized:{bits}")[1])
        sizes.append(memory.compressed_bytes)
        assert full * bits / 32 * 60 / 65 < memory.compressed_bytes < full * (bits + 4) / 32
        assert memory.resident_bytes == full * 5 // 65  # those that came after the prompt
    assert sizes[1] < sizes[0]


def test_unsupported_bits_and_models_are_refused() -> None:
    with pytest.raises(UsageError, match="takes 2 or 4 bits, or fp8, not '8'"):
        logits("stock-quantized:8")
    with pytest.raises(UnsupportedModelError, match="only supported for models with only full attention"):
        subject("stock-quantized:fp8", family="gemma3").write(IDS[:60], 2)


def test_a_peer_can_be_compared_with_the_reference() -> None:
    compared = subject("stock-quantized:fp8").compare(IDS[:60], 5)
    assert compared.kl_mean is not None and 0 < compared.kl_mean < 0.1 and compared.exactness == "lossy"
