"""transformers' own caches as peers: the tokens are what they should be, and the bytes are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny
from kvkeep_lab.peers import PEERS, peer_of
from kvkeep_lab.reading import cache_for, read, takes
from measuring import subject
from transformers.utils import is_optimum_quanto_available

from kvkeep.errors import UnsupportedModelError, UsageError
from kvkeep.stock import memory_of

IDS = torch.randint(2, 97, (1, 60), generator=torch.Generator().manual_seed(3))


def logits(method: str, new: int = 6) -> tuple[list[Any], Any]:
    model = tiny("llama")
    cache = cache_for(model, method, None, IDS.shape[1] + new)
    return [one for one, _ in read(model, IDS, cache, new, [5] * new)], cache


def test_peers_are_named_and_others_are_not() -> None:
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


def test_a_static_cache_is_exact_and_allocated_at_once() -> None:
    expected, stock = logits("stock")
    got, cache = logits("stock-static")
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, got, strict=True))
    held, room = memory_of(stock).resident_bytes, memory_of(cache).resident_bytes
    assert held == room * 65 // 66  # the last token is not read


def test_offloading_is_refused_on_a_cpu() -> None:
    with pytest.raises(UsageError, match=r"this model is on the cpu: .* 'stock' is the same cache"):
        subject("stock-offloaded").write(IDS[0].tolist(), 4)


def test_eight_bit_floats_are_near_and_their_bytes_a_quarter() -> None:
    expected, stock = logits("stock")
    got, cache = logits("stock-quantized:fp8")
    assert torch.equal(expected[0], got[0])  # the prompt itself is attended to in full
    gap = max(float((a - b).abs().max()) for a, b in zip(expected[1:], got[1:], strict=True))
    spread = max(float(a.std()) for a in expected)
    assert 0 < gap < 0.2 * spread
    memory, full = memory_of(cache), memory_of(stock).resident_bytes
    assert (memory.resident_bytes, memory.compressed_bytes) == (0, full // 4 + 4 * 2 * 4)  # 4 layers' pairs of scales
    assert memory.peak_workspace_bytes == full // 4
    answer = subject("stock-quantized:fp8").write(IDS[0].tolist(), 4)
    assert answer.cost.exactness == "lossy" and answer.cost.entries is None and len(answer.tokens) == 4


def test_few_bits_take_few_bytes_where_quanto_is_installed() -> None:
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


def test_what_cannot_be_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="takes 2 or 4 bits, or fp8, not '8'"):
        logits("stock-quantized:8")
    with pytest.raises(UnsupportedModelError, match="only supported for models with only full attention"):
        subject("stock-quantized:fp8", family="gemma3").write(IDS[0].tolist(), 2)


def test_peers_are_compared() -> None:
    compared = subject("stock-quantized:fp8").compare(IDS[0].tolist(), 5)
    assert compared.kl_mean is not None and 0 < compared.kl_mean < 0.1 and compared.exactness == "lossy"
