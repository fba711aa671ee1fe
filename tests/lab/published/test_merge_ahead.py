"""Merging by the next chunk's queries, against the published protocol in plain loops: a written-out model whose keys
are rotated anew for every query."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from families import COMMON, tiny
from helpers import bounded, broken, prompt, step
from kvkeep_lab.published.ahead_pairs import Seen, cheapest, costs
from kvkeep_lab.published.lookahead import loss
from kvkeep_lab.reference import merges
from safetensors.torch import save_file
from torch import Tensor

from kvkeep import BudgetError, KeepCache, UnsupportedModelError, UsageError

METHODS = ("kvslimmer-published", "asymkv-published")
ROOT = Path(__file__).parents[3]
GAMMA = 4096 / math.log(512)
SINKS, CHUNK, BUDGET, SLACK = 2, 8, 24, 3


class Layer:
    """Entries of one layer: keys before rotation (heads, n, dim), values added up, counts and last slots (n)."""

    def __init__(self, keys: Tensor, values: Tensor, start: int) -> None:
        self.keys, self.values = keys, values
        self.counts, self.slots = [1] * keys.shape[1], list(range(start, start + keys.shape[1]))
        self.sensitivity: Tensor | None = None  # (heads, n)


class Published:
    """The authors' protocol on a tiny Llama: a chunk looks at what is there, which is merged to ``size`` entries, and
    is then read again and kept whole; decoded tokens are only added."""

    def __init__(self, model: Any, name: str, size: int, cap: int) -> None:
        self.model, self.name, self.size, self.cap = model, name, size, cap
        self.layers: list[Layer] = []
        self.length = self.chunks = 0

    def turned(self, rows: Tensor, positions: list[int]) -> Tensor:
        cos, sin = self.model.model.rotary_emb(rows, torch.tensor([positions]))
        half = rows.shape[-1] // 2
        return rows * cos + torch.cat([-rows[..., half:], rows[..., :half]], -1) * sin

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Return logits (n, vocabulary), weights of earlier entries by layer (heads, n, past), and new entries."""
        config, n = self.model.config, len(ids)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        hidden, found, new = self.model.model.embed_tokens(ids), [], []
        for number, block in enumerate(self.model.model.layers):
            x, mine = block.input_layernorm(hidden), block.self_attn
            query, key, value = (
                part(x).view(n, count, -1).transpose(0, 1)
                for part, count in ((mine.q_proj, heads), (mine.k_proj, kv_heads), (mine.v_proj, kv_heads))
            )
            new.append((key.detach(), value.detach()))
            past = self.layers[number] if self.layers else None
            counts = [] if past is None else past.counts
            places = [sum(counts[: at + 1]) - counts[0] for at in range(len(counts))]
            ahead = [sum(counts) + at for at in range(n)]
            keys = key if past is None else torch.cat([past.keys, key], 1)
            values = value if past is None else torch.cat([past.values, value], 1)
            keys = self.turned(keys, places + ahead).repeat_interleave(heads // kv_heads, 0)
            scores = self.turned(query, ahead) @ keys.transpose(1, 2) / math.sqrt(keys.shape[-1])
            later = torch.ones(n, n, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(torch.cat([torch.zeros(n, len(counts), dtype=torch.bool), later], 1), -1e20)
            weights = scores.exp() / (scores.exp() * torch.tensor([*counts, *[1] * n])).sum(-1, keepdim=True)
            found.append(weights[..., : len(counts)])
            output = weights @ values.repeat_interleave(heads // kv_heads, 0)
            hidden = hidden + mine.o_proj(output.transpose(0, 1).reshape(n, -1))
            hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return self.model.lm_head(self.model.model.norm(hidden)), found, new

    def read(self, ids: Tensor) -> Tensor:
        if self.layers and len(ids) > 1:
            self.chunks += 1
            for layer in self.layers:
                layer.keys.requires_grad_(self.name == METHODS[1])
            with torch.enable_grad():
                logits, found, _ = self.forward(ids)
                cost = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
            for layer, weights in zip(self.layers, found, strict=True):
                gradient = None
                if self.name == METHODS[1]:
                    (gradient,) = torch.autograd.grad(cost, layer.keys, retain_graph=True)
                layer.keys = layer.keys.detach()
                self.merge(layer, weights.detach(), gradient)
        with torch.no_grad():
            logits, _, new = self.forward(ids)
        for number, (key, value) in enumerate(new):
            if len(self.layers) == number:
                self.layers.append(Layer(key, value, self.length))
                continue
            layer, fresh = self.layers[number], Layer(key, value, self.length)
            layer.keys, layer.values = torch.cat([layer.keys, key], 1), torch.cat([layer.values, value], 1)
            layer.counts, layer.slots = layer.counts + fresh.counts, layer.slots + fresh.slots
        self.length += len(ids)
        return logits

    def roll_back(self, length: int) -> None:
        """Forget the slots from ``length`` on, with the entries that stand for one of them."""
        self.length = length
        for layer in self.layers:
            stays = torch.tensor([slot < length for slot in layer.slots])
            layer.keys, layer.values = layer.keys[:, stays], layer.values[:, stays]
            layer.counts = layer.counts[: int(stays.sum())]
            layer.slots = layer.slots[: len(layer.counts)]
            if layer.sensitivity is not None:
                layer.sensitivity = layer.sensitivity[:, : len(layer.counts)]

    def merge(self, layer: Layer, weights: Tensor, gradient: Tensor | None) -> None:
        """weights: (query heads, queries, entries), of each entry as if it counted once."""
        entries, kv_heads = len(layer.counts), len(layer.keys)
        heard = weights.sum(1).unflatten(0, (kv_heads, -1)).mean(1)  # (heads, entries)
        counts = torch.tensor(layer.counts, dtype=torch.float32)
        heard = heard * counts
        middle = heard[:, SINKS:]
        alpha = torch.cat([torch.zeros(kv_heads, SINKS), middle / middle.sum(1, keepdim=True)], 1)
        output = (alpha[..., None] * layer.values).sum(1, keepdim=True)
        local = alpha * (1 - 2 * alpha) * (layer.values - output).abs().sum(-1)
        if layer.sensitivity is not None:  # a running mean, of entries that were there before
            old = layer.sensitivity.shape[1]
            share = 1 / self.chunks
            local = torch.cat([share * local[:, :old] + (1 - share) * layer.sensitivity, local[:, old:]], 1)
        layer.sensitivity = local
        if (excess := entries - self.size) <= 0:
            return
        cost = {
            at: float(heard[:, at : at + 2].sum())
            * (layer.counts[at] + layer.counts[at + 1])
            / math.exp((at - SINKS + 1) / GAMMA)
            for at in range(SINKS, entries - 1)
        }
        chosen = sorted(sorted(cost, key=lambda at: cost[at])[:excess])
        before, kept = list(zip(layer.counts, layer.slots, strict=True)), [True] * entries
        keys, values, curvature = layer.keys.clone(), layer.values.clone(), local.clone()
        for at in chosen:
            kept[at + 1] = False
            if gradient is None:
                # The norms are found back from what is averaged, with this chunk's attention.
                norms = [local[:, each] / (alpha[:, each] * (1 - 2 * alpha[:, each])) for each in (at, at + 1)]
                both = alpha[:, at] * alpha[:, at + 1] * (norms[0] + norms[1])
                mine, other = ((local[:, each] - both)[:, None] for each in (at, at + 1))
            else:
                mine, other = gradient[:, at].square(), gradient[:, at + 1].square()
            mine, other = mine / (mine + other), other / (mine + other)
            keys[:, at] = mine * layer.keys[:, at] + other * layer.keys[:, at + 1]
            values[:, at] = layer.values[:, at] + layer.values[:, at + 1]
            if gradient is None:
                curvature[:, at] = mine[:, 0] ** 2 * local[:, at] + other[:, 0] ** 2 * local[:, at + 1]
            count = before[at][0] + before[at + 1][0]
            layer.counts[at] = min(count, self.cap) if self.cap else count
            layer.slots[at] = before[at + 1][1]
        flags = torch.tensor(kept)
        layer.keys, layer.values, layer.sensitivity = keys[:, flags], values[:, flags], curvature[:, flags]
        layer.counts = [count for count, stays in zip(layer.counts, kept, strict=True) if stays]
        layer.slots = [slot for slot, stays in zip(layer.slots, kept, strict=True) if stays]


@pytest.mark.parametrize("cap", [0, 3])
@pytest.mark.parametrize("name", METHODS)
def test_logits_entries_and_counts_equal_the_published_protocol(name: str, cap: int) -> None:
    """Compares every chunk and token, until the budget is full."""
    model, ids = tiny("llama"), prompt(1, 6 * CHUNK + SLACK - 1)
    cache = KeepCache(model, f"{name}:sinks={SINKS},cap={cap},slack={SLACK}", BUDGET, chunk=CHUNK)
    theirs = Published(model, name, BUDGET - CHUNK - SLACK + 1, cap)
    stops = [*range(CHUNK, 6 * CHUNK + 1, CHUNK), *range(6 * CHUNK + 1, ids.shape[1] + 1)]
    for low, high in zip([0, *stops], stops, strict=False):
        logits = step("llama", cache, ids[:, low:high], logits_to_keep=0)
        torch.testing.assert_close(logits[0], theirs.read(ids[0, low:high]), atol=2e-3, rtol=2e-3)
        for ours, layer in zip(bounded(cache), theirs.layers, strict=True):
            (bank,) = ours.resident.banks
            assert bank.used <= BUDGET
            entry_counts = [1] * bank.used if bank.extra is None else (1 + bank.extra[:, : bank.used]).tolist()
            for lane in range(2):
                assert bank.slots[lane, : bank.used].tolist() == layer.slots
                assert (entry_counts if bank.extra is None else entry_counts[lane]) == layer.counts
    assert bank.used == BUDGET and max(layer.counts) >= 3
    assert len({tuple(layer.slots) for layer in theirs.layers}) > 1  # each layer chooses for itself
    if not cap:  # pairs overlapped, and what the second of them had is lost
        assert any(sum(layer.counts) < theirs.length for layer in theirs.layers)
    assert merges(cache) == (4 * 2 * 26, 0)


@pytest.mark.parametrize("cap", [0, 3])
@pytest.mark.parametrize("name", METHODS)
def test_after_a_rollback_positions_follow_from_the_remaining_entries(name: str, cap: int) -> None:
    """One rollback removes two tokens; another reaches into merged entries, which are removed completely."""
    model, ids = tiny("llama"), prompt(1, 100)
    cache = KeepCache(model, f"{name}:sinks={SINKS},cap={cap},slack={SLACK}", BUDGET, chunk=CHUNK)
    theirs, low, gone = Published(model, name, BUDGET - CHUNK - SLACK + 1, cap), 0, 0
    for count in (*[CHUNK] * 6, 1, -2, CHUNK, 1, -(CHUNK + 7), *[CHUNK] * 3):
        if count < 0:
            cache.crop(count)
            theirs.roll_back(low + count)
            gone += sum(layer.slots[-1] != low + count - 1 for layer in theirs.layers)
        else:
            logits = step("llama", cache, ids[:, low : low + count], logits_to_keep=0)
            torch.testing.assert_close(logits[0], theirs.read(ids[0, low : low + count]), atol=2e-3, rtol=2e-3)
        low += count
        for ours, layer in zip(bounded(cache), theirs.layers, strict=True):
            (bank,) = ours.resident.banks
            assert [slot for slot in bank.slots[0].tolist() if slot >= 0] == layer.slots
    assert gone


@pytest.mark.parametrize("name", METHODS)
def test_a_long_prompt_is_read_in_chunks(name: str) -> None:
    one, other = (KeepCache(tiny("llama"), f"{name}:sinks=2,slack=3", BUDGET, chunk=CHUNK) for _ in range(2))
    ids = prompt(2, 5 * CHUNK)
    at_once = step("llama", one, ids, logits_to_keep=0)
    parts = [step("llama", other, part, logits_to_keep=0) for part in ids.split(CHUNK, 1)]
    torch.testing.assert_close(at_once, torch.cat(parts, 1))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_no_gradient_or_graph_is_left_behind(name: str, mode: Any) -> None:
    """In every grad mode of the caller."""
    model, cache = tiny("llama"), KeepCache(tiny("llama"), f"{name}:sinks=2,slack=3", BUDGET, chunk=CHUNK)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with mode():
        step("llama", cache, prompt(1, 30))
        step("llama", cache, prompt(1, 1))
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())
    for layer in bounded(cache):
        (bank,) = layer.resident.banks
        assert not bank.keys.requires_grad and not bank.keys.is_inference()
        assert layer.pending is None
    assert cache.meter.workspace == 0
    assert (cache.memory().peak_workspace_bytes > 50_000) == (name == "asymkv-published")


def test_a_token_without_free_slots_merges_entries_too() -> None:
    """It frees as many slots as ``slack``."""
    cache, ids = KeepCache(tiny("llama"), "kvslimmer-published:sinks=2,slack=3", BUDGET, chunk=CHUNK), prompt(1, 60)
    step("llama", cache, ids[:, :40])
    used = []
    for at in range(40, 50):
        step("llama", cache, ids[:, at : at + 1])
        used.append(bounded(cache)[0].resident.banks.banks[0].used)
    assert used == [23, 24, 22, 23, 24, 22, 23, 24, 22, 23]


def test_an_interrupted_lookahead_leaves_the_cache_unchanged() -> None:
    model, ids = tiny("llama"), prompt(1, 40)
    cache, other = (KeepCache(model, "asymkv-published:sinks=2,slack=3", BUDGET, chunk=CHUNK) for _ in range(2))
    for each in (cache, other):
        step("llama", each, ids[:, :24])
    with broken(model, 2, KeyboardInterrupt):
        step("llama", cache, ids[:, 24:32])
    assert cache.get_seq_length() == 24
    torch.testing.assert_close(*(step("llama", each, ids[:, 24:32]) for each in (cache, other)))


def test_pair_costs_follow_the_paper_and_chosen_pairs_may_overlap() -> None:
    """Two KV heads of one row; the first entry is a sink."""
    attention, counts = torch.rand(2, 6), torch.tensor([[1.0, 2, 1, 3, 1, 1]]).expand(2, -1)
    seen = Seen(attention, torch.zeros(2, 6, 1), torch.tensor([[False] + [True] * 5]).expand(2, -1))
    found = costs(seen, counts, 2)
    assert found.shape == (1, 5) and found[0, 0] == math.inf
    for at in range(1, 5):
        expected = float(attention[:, at : at + 2].sum()) * float(counts[0, at : at + 2].sum()) / math.exp(at / GAMMA)
        assert float(found[0, at]) == pytest.approx(expected)
    assert cheapest(torch.tensor([[math.inf, 3.0, 1, 2]]), torch.tensor([[2]])).tolist() == [[False, False, True, True]]
    assert not cheapest(found, torch.tensor([[0]])).any()


def test_the_lookahead_loss_ignores_padding() -> None:
    logits, ids = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    real = torch.tensor([[True] * 5, [False, False, True, True, True]])
    entropy = torch.nn.functional.cross_entropy
    rows = entropy(logits[0, :-1], ids[0, 1:]) + entropy(logits[1, 2:-1], ids[1, 3:])
    torch.testing.assert_close(loss(logits, ids, real), rows)
    single = loss(logits[:, :1], ids[:, :1], real[:, :1])
    torch.testing.assert_close(single, -logits[:, 0].log_softmax(-1).amax(-1).sum())


@pytest.mark.parametrize(
    ("error", "method", "given", "words"),
    [
        (BudgetError, "kvslimmer-published", {"budget": 40}, "32 sinks and a chunk of 16 that stays whole"),
        (BudgetError, "kvslimmer-published:sinks=2", {"budget": 64, "chunk": 60}, "a chunk of 60"),
        (UsageError, "h2o+kvslimmer-published", {"budget": 64}, "ranks of a selector have no effect"),
        (UsageError, "asymkv-published+verified", {"budget": 64}, "reads each chunk twice"),
    ],
)
def test_unsupported_combinations_are_refused(error: Any, method: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(error, match=words):
        KeepCache(tiny("llama"), method, **given)


def test_embeddings_and_sliding_windows_are_refused() -> None:
    cache = KeepCache(tiny("llama"), "asymkv-published:sinks=2,slack=3", BUDGET, chunk=CHUNK)
    step("llama", cache, prompt(1, 8))
    with pytest.raises(UsageError, match="of token ids"), torch.no_grad():
        tiny("llama")(inputs_embeds=torch.randn(1, 4, 32), cache=cache)
    with pytest.raises(UnsupportedModelError, match="sliding windows"):
        KeepCache(tiny("gemma3"), "kvslimmer-published:sinks=2", 40)


PEERS = Path(os.environ.get("KVKEEP_MERGING_PEERS", "none"))
"""A folder with the authors' repositories and an environment that runs them (tools/published_merging.py)."""


@pytest.mark.skipif(not PEERS.is_dir(), reason="KVKEEP_MERGING_PEERS names no folder with the authors' code")
@pytest.mark.parametrize("name", METHODS)
def test_counts_and_logits_equal_the_authors_code(name: str, tmp_path: Path) -> None:
    model, ids = tiny("llama"), prompt(1, 10 * CHUNK)
    save_file({key: part.clone() for key, part in model.state_dict().items()}, tmp_path / "weights.safetensors")
    size = BUDGET - CHUNK - SLACK + 1
    request = {"config": COMMON, "weights": str(tmp_path / "weights.safetensors"), "ids": ids[0].tolist()}
    request |= {"chunk": CHUNK, "sinks": SINKS, "size": size}
    command = [PEERS / "bin" / "python", ROOT / "tools" / "published_merging.py", PEERS, name.partition("-")[0]]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout)
    cache = KeepCache(model, f"{name}:sinks={SINKS},slack={SLACK}", BUDGET, chunk=CHUNK)
    for number, part in enumerate(ids.split(CHUNK, 1)):
        logits = step("llama", cache, part)
        for ours, counts in zip(bounded(cache), theirs["counts"][number], strict=True):
            (bank,) = ours.resident.banks
            entry_counts = torch.ones(bank.used) if bank.extra is None else 1 + bank.extra[0, : bank.used]
            assert entry_counts.int().tolist() == counts, number
        torch.testing.assert_close(logits[0, 0], torch.tensor(theirs["logits"][number]), atol=5e-3, rtol=5e-3)
