"""Every selector keeps what a slow reference keeps, written from the papers' formulas in NumPy.

A small model reads a text in chunks and then token by token. The queries and keys that its attention was called with
are recorded; the reference computes softmax attention of its own over what it kept itself, and after every step both
must hold the same slots, in every layer, row and KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache as memoised
from typing import Any

import numpy as np
import pytest
import torch
from helpers import forward
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from kvkeep import KeepCache
from kvkeep.contracts.selector import Candidates
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.selectors.h2o import H2O
from kvkeep.policies.selectors.pyramidkv import PyramidKV

LAYERS, HEADS, KV_HEADS, WIDTH = 3, 4, 2, 32
Array = np.ndarray[Any, Any]
Rank = Callable[[Array, Array, int, int], Array]


@memoised
def model() -> Any:
    """Three layers of grouped attention that is neither flat nor on one entry only: nothing is near a tie."""
    torch.manual_seed(1)
    config = LlamaConfig(
        **{"vocab_size": 20, "hidden_size": WIDTH, "intermediate_size": 48, "max_position_embeddings": 512},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS},
    )
    made = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10.0)
    return made


# -- what was done ----------------------------------------------------------------------------------


@dataclass
class Step:
    """One call of one layer's attention: (rows, heads, n, dim) each, and what was held after it, (lanes, slots)."""

    query: Array
    key: Array
    value: Array
    output: Array
    scaling: float
    kept_flags: Array


def watched(cache: KeepCache) -> list[list[Step]]:
    """Record the attention calls of every layer. Single tokens of one row attend as others do, and not by a plan."""
    steps: list[list[Step]] = [[] for _ in cache.layers]
    cache.stream.plan = lambda *given: {}
    honest = cache.stream.attend

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float) -> Any:
        output, index = honest(module, query, key, value, mask, scaling), module.layer_idx
        parts = (part.double().numpy() for part in (query, key, value, output))
        steps[index].append(Step(*parts, scaling, cache.layers[index].resident.resident_slots().numpy()))
        return output

    cache.stream.attend = attend
    return steps


def read(cache: KeepCache, chunks: list[int], seed: int, rows: int = 1) -> None:
    """Take in chunks of random vectors, no two of which are alike. A twin, whose single tokens of a row follow a plan,
    holds the same entries after each."""
    generator, twin = torch.Generator().manual_seed(seed), cache.fork()
    twin.stream.chunk = cache.stream.chunk
    for name in ("plan", "attend"):
        vars(twin.stream).pop(name, None)
    for count in chunks:
        vectors = torch.randn(rows, count, WIDTH, generator=generator)
        for each in (cache, twin):
            forward(model(), each, vectors)
        for layer, other in zip(cache.layers, twin.layers, strict=True):
            assert torch.equal(layer.resident.resident_slots(), other.resident.resident_slots())


# -- the reference ----------------------------------------------------------------------------------


class Rule:
    """A reference of one selector. Arrays are (kv_heads, slots) over all slots there ever were. ``ties``: by how much
    ranks may differ, relatively, that count as equal."""

    ties = 0.0

    def inspect(self, step: Step, row: int, keys: Array, values: Array, kept: Array) -> None:
        """Look at a step, and at all keys and values so far, (kv_heads, slots, dim), before :meth:`observe`."""

    def observe(self, scores: Array, weights: Array, kept: Array) -> Array:
        """Return new scores; weights (kv_heads, queries, slots) are means over query heads, 0 where not kept."""
        return scores

    def rank(self, scores: Array, keys: Array, budget: Any) -> Array:
        """Return what decides, the highest stay: the scores, unless it says otherwise. keys: (kv_heads, slots, dim),
        NaN where not kept. budget: of every head, or (kv_heads, 1)."""
        return scores

    def divide(self, rank: Array, kept: Array, budget: int) -> Any:
        """Return the budget of every head, or (kv_heads, 1), after a chunk that overflows it."""
        return budget


class Newest(Rule):
    def __init__(self, sinks: int = 0) -> None:
        self.sinks = sinks

    def rank(self, scores: Array, keys: Array, budget: int) -> Array:
        slots = np.broadcast_to(np.arange(scores.shape[1], dtype=float), scores.shape)
        return np.where(slots < self.sinks, np.inf, slots)


class HeavyHitters(Rule):
    def __init__(self, recent: float = 0.5) -> None:
        self.recent = recent

    def observe(self, scores: Array, weights: Array, kept: Array) -> Array:
        return scores + weights.sum(1)

    def rank(self, scores: Array, keys: Array, budget: int) -> Array:
        newest = np.arange(scores.shape[1]) >= scores.shape[1] - int(self.recent * budget)
        return np.where(newest, np.inf, scores)


class LastQuery(Rule):
    def observe(self, scores: Array, weights: Array, kept: Array) -> Array:
        return np.broadcast_to(weights[:, -1].mean(0), scores.shape)


class Votes(Rule):
    """Max-pooling makes neighbours equal, and no formula says which of them stays: there it does as was done."""

    ties = 1e-6

    def __init__(self, window: int, kernel: int) -> None:
        self.window, self.kernel = window, kernel

    def observe(self, scores: Array, weights: Array, kept: Array) -> Array:
        voters, slots = min(self.window, weights.shape[1]), scores.shape[1]
        votes = weights[:, -voters:].mean(1)
        for head in range(len(votes)) if weights.shape[1] > 1 else ():
            past = np.flatnonzero(kept[head] & (np.arange(slots) < slots - self.window))
            near = np.pad(votes[head, past], self.kernel // 2)
            votes[head, past] = [near[place : place + self.kernel].max() for place in range(len(past))]
        return scores + (votes - scores) * voters / self.window

    def rank(self, scores: Array, keys: Array, budget: Any) -> Array:
        window = np.arange(scores.shape[1]) >= scores.shape[1] - np.minimum(self.window, budget // 2)
        return np.where(window, np.inf, scores)


class DividedVotes(Votes):
    """arXiv:2407.11550: one entry of the pool of all heads at a time."""

    def __init__(self, window: int, kernel: int, least: float = 0.2) -> None:
        super().__init__(window, kernel)
        self.least = least

    def divide(self, rank: Array, kept: Array, budget: int) -> Array:
        heads, window = len(rank), min(self.window, budget // 2)
        pool = sorted((-value, head) for head in range(heads) for value in rank[head, kept[head]])[: heads * budget]
        beside = [sum(head == winner for _, winner in pool) - window for head in range(heads)]
        even = self.least * (budget - window)
        shares = [window + int((1 - self.least) * count + even) for count in beside]
        for spare in range(heads * budget - sum(shares)):
            shares[spare % heads] += 1
        return np.array(shares)[:, None]


class DistinctKeys(Rule):
    """Keys that point in another direction than the mean of all directions (arXiv:2504.15364)."""

    def rank(self, scores: Array, keys: Array, budget: Any) -> Array:
        directions = keys / np.sqrt((keys**2).sum(-1, keepdims=True))
        anchor = np.nanmean(directions, axis=1, keepdims=True)
        return -(directions * anchor).sum(-1) / np.sqrt((anchor**2).sum(-1))


class SmallKeys(Rule):
    def rank(self, scores: Array, keys: Array, budget: int) -> Array:
        return -np.sqrt((keys**2).sum(-1))


class Expected(Rule):
    """Section 3 of arXiv:2510.00636, with rotations as matrices and one head, entry and position at a time."""

    def __init__(self, future: int, sinks: int, epsilon: float = 0.0) -> None:
        self.future, self.sinks, self.epsilon = future, sinks, epsilon

    def inspect(self, step: Step, row: int, keys: Array, values: Array, kept: Array) -> None:
        self.fresh, slots, query = None, keys.shape[1], step.query[row]
        first, dim = slots - query.shape[1], keys.shape[2]
        asking = [place for place in range(first, slots) if place >= self.sinks]
        if query.shape[1] < 16 or len(asking) < 16:
            return
        mean_rotation = np.mean([rotation(slots + ahead, dim) for ahead in range(self.future)], axis=0)
        group = len(query) // len(keys)
        self.fresh = np.zeros(keys.shape[:2])
        for head in range(len(query)):
            before = np.stack([rotation(place, dim).T @ query[head, place - first] for place in asking])
            mean = mean_rotation @ before.mean(0)
            covariance = mean_rotation @ np.cov(before.T, bias=True) @ mean_rotation.T
            kv_head = head // group
            scored = [slot for slot in range(self.sinks, slots) if kept[kv_head, slot]]
            exponents = np.array(
                [
                    mean @ keys[kv_head, slot] * step.scaling
                    + keys[kv_head, slot] @ covariance @ keys[kv_head, slot] * step.scaling**2 / 2
                    for slot in scored
                ]
            )
            weights = np.exp(exponents - exponents.max())
            self.fresh[kv_head, scored] += weights / weights.sum() / group
        self.fresh = (self.fresh + self.epsilon) * np.sqrt((values**2).sum(-1))

    def observe(self, scores: Array, weights: Array, kept: Array) -> Array:
        late = np.broadcast_to(1e9 + np.arange(scores.shape[1]), scores.shape)  # what is not scored stays
        if self.fresh is None:
            return np.where(scores == 0, late, scores)
        return np.where(np.arange(scores.shape[1]) < self.sinks, late, self.fresh)

    def rank(self, scores: Array, keys: Array, budget: int) -> Array:
        slots = np.arange(scores.shape[1])
        late = np.where(scores == 0, 1e9 + slots, scores)  # a single token competes before it is seen
        return np.where(slots < self.sinks, np.inf, late)


def rotation(position: int, dim: int) -> Array:
    """Return the rotary embedding of one position as a matrix: Llama's, base 10,000, halves of channels paired."""
    angles = position / 10_000.0 ** (np.arange(0, dim, 2) / dim)
    cos, sin = np.diag(np.cos(angles)), np.diag(np.sin(angles))
    return np.block([[cos, -sin], [sin, cos]])


def best(rank: Array, kept: Array, count: Any) -> Array:
    """Return the ``count`` highest of those kept; count: for every head, or (kv_heads, 1)."""
    order = np.argsort(-np.where(kept, rank, -np.inf), axis=1, kind="stable")
    return (np.argsort(order, axis=1) < count) & kept


def attention(query: Array, keys: Array, seen: Array, scaling: float) -> Array:
    """Return softmax weights (kv_heads, group, queries, slots) of query (heads, queries, dim)."""
    grouped = query.reshape(len(keys), -1, *query.shape[1:])
    scores = np.where(seen[:, None], np.einsum("hgqd,hsd->hgqs", grouped, keys) * scaling, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def where(kept: Array, keys: Array) -> Array:
    """Return the keys, NaN where none is kept."""
    return np.where(kept[..., None], keys, np.nan)


def followed(rule: Rule, steps: list[Step], row: int, budget: int) -> Iterator[tuple[Array, Array]]:
    """Yield, after every step of one row, what is kept and what attention returned."""
    heads, dim = steps[0].key.shape[1], steps[0].key.shape[3]
    keys = values = np.zeros((heads, 0, dim))
    scores, kept = np.zeros((heads, 0)), np.zeros((heads, 0), dtype=bool)
    budgets: Any = budget
    for step in steps:
        new = step.key.shape[2]
        keys, values = np.append(keys, step.key[row], 1), np.append(values, step.value[row], 1)
        scores, kept = (np.pad(rows, ((0, 0), (0, new))) for rows in (scores, kept))
        slots = keys.shape[1]
        lanes = slice(row * heads, (row + 1) * heads)
        nudge = 1 + rule.ties * step.kept_flags[lanes]
        if new == 1:  # a single token takes its place before it attends
            kept = best(rule.rank(scores, where(kept, keys), budgets) * nudge, kept, budgets - 1)
        kept[:, slots - new :] = True
        causal = np.arange(slots)[None, :] <= np.arange(slots - new, slots)[:, None]
        weights = attention(step.query[row], keys, kept[:, None] & causal, step.scaling)
        rule.inspect(step, row, keys, values, kept)
        scores = rule.observe(scores, weights.mean(1), kept)
        if new > 1:
            rank = rule.rank(scores, where(kept, keys), budget)
            if (kept.sum(1, keepdims=True) > budgets).any():
                budgets = rule.divide(rank, kept, budget)
            kept = best(rank * nudge, kept, budgets)
        yield kept, np.einsum("hgqs,hsd->hgqd", weights, values).reshape(step.output[row].shape)


def assert_follows(cache: KeepCache, steps: list[list[Step]], rule: Rule, budgets: list[int]) -> None:
    for index, (layer, layer_steps) in enumerate(zip(cache.layers, steps, strict=True)):
        for row in range(layer.rows):
            lanes = slice(row * layer.heads, (row + 1) * layer.heads)
            found = zip(layer_steps, followed(rule, layer_steps, row, budgets[index]), strict=True)
            for number, (step, (kept, output)) in enumerate(found):
                where = f"layer {index}, row {row}, step {number}"
                np.testing.assert_array_equal(step.kept_flags[lanes], kept, where)
                np.testing.assert_allclose(step.output[row], output, atol=2e-5, rtol=2e-4, err_msg=where)


RULES: dict[str, Rule] = {
    "window": Newest(),
    "streaming-llm:positions=absolute": Newest(sinks=4),
    "streaming-llm:sinks=7,positions=absolute": Newest(sinks=7),
    "h2o": HeavyHitters(),
    "h2o:recent=0.2": HeavyHitters(0.2),
    "h2o:recent=0": HeavyHitters(0.0),
    "tova": LastQuery(),
    "snapkv": Votes(32, 7),  # its window is wider than some of the budgets below
    "snapkv:window=4,kernel=3": Votes(4, 3),
    "snapkv:window=6,kernel=1": Votes(6, 1),
    "adakv": DividedVotes(32, 7),
    "adakv:window=4,kernel=3": DividedVotes(4, 3),
    "adakv:window=5,kernel=1,least=0": DividedVotes(5, 1, 0.0),
    "keydiff": DistinctKeys(),
    "knorm": SmallKeys(),
    "expected-attention": Expected(512, 4),
    "expected-attention:future=5,sinks=1,epsilon=0.02": Expected(5, 1, 0.02),
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("method", RULES)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    chunks=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    budget=st.integers(16, 40),
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 2),
)
def test_every_selector_keeps_what_its_reference_keeps(
    method: str, chunks: list[int], budget: int, seed: int, rows: int
) -> None:
    cache = KeepCache(model(), method, budget)
    cache.stream.chunk = 100  # as they are given, also those longer than the budget, which layers with smaller ones see
    steps = watched(cache)
    read(cache, [*chunks, *[1] * 8], seed, rows)
    assert_follows(cache, steps, RULES[method], [budget] * LAYERS)


@pytest.mark.turns(5)
@pytest.mark.parametrize(
    ("recall", "lengths", "taken"),
    [
        # A first chunk that fits, one that overflows, decoding, a second turn, and decoding again.
        ("", [5, 30, *[1] * 8, 9, 2, *[1] * 4], [5, 14, 16, *[1] * 8, 9, 2, *[1] * 4]),
        # All of a prompt is attended, whatever the budget, and all its entries compete once; so in a second turn.
        ("+oneshot", [50, *[1] * 6, 40, *[1] * 3], [50, *[1] * 6, 40, *[1] * 3]),
    ],
    ids=["chunks", "oneshot"],
)
@pytest.mark.parametrize("method", RULES)
def test_every_selector_keeps_what_its_reference_keeps_in_two_turns(
    method: str, recall: str, lengths: list[int], taken: list[int]
) -> None:
    """The comparison also tells selectors apart: only ``window`` follows the rule of ``window``."""
    cache = KeepCache(model(), method + recall, 18, chunk=None if recall else 16)
    steps = watched(cache)
    read(cache, lengths, seed=3, rows=2)
    assert [step.key.shape[2] for step in steps[0]] == taken
    assert_follows(cache, steps, RULES[method], [18] * LAYERS)
    held = steps[0][-1].kept_flags.sum(1)
    assert held.tolist() == [18] * 4 or (method.startswith("adakv") and held.reshape(2, 2).sum(1).tolist() == [36, 36])
    if method != "window":
        with pytest.raises(AssertionError, match="layer"):
            assert_follows(cache, steps, RULES["window"], [18] * LAYERS)


# -- pyramidkv: the same votes, other budgets --------------------------------------------------------


def pyramid(entries: int, window: int, beta: float, layers: int) -> list[int]:
    """Section 3.3 of the paper: besides the window, a straight line of mean k from 2k - k / beta to k / beta."""
    mean = entries - window
    first, last = 2 * mean - mean / beta, mean / beta
    return [window + int(first + (last - first) * layer / (layers - 1)) for layer in range(layers)]


@pytest.mark.parametrize(
    ("text", "entries", "window", "kernel", "beta"),
    [
        ("pyramidkv:window=4,kernel=3", 24, 4, 3, 20.0),
        ("pyramidkv:window=6,kernel=5,beta=2", 20, 6, 5, 2.0),
        ("pyramidkv:window=5,kernel=3,beta=1", 17, 5, 3, 1.0),  # beta 1: no pyramid
    ],
)
def test_pyramidkv_keeps_what_its_reference_keeps(
    text: str, entries: int, window: int, kernel: int, beta: float
) -> None:
    cache = KeepCache(model(), text, entries, chunk=16)
    budgets = pyramid(entries, window, beta, LAYERS)
    steps = watched(cache)
    read(cache, [7, 40, *[1] * 20], seed=5)  # the chunk is longer than the last layer's budget
    assert_follows(cache, steps, Votes(window, kernel), budgets)
    assert [int(layer_steps[-1].kept_flags[0].sum()) for layer_steps in steps] == budgets


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layers=st.integers(1, 60), entries=st.integers(1, 300), window=st.integers(1, 64), beta=st.floats(1, 50))
def test_pyramidkv_spends_the_budget_and_limits_its_window_to_half_of_it(
    layers: int, entries: int, window: int, beta: float
) -> None:
    geometry = ModelGeometry.from_config(LlamaConfig(num_hidden_layers=layers))
    budgets = [entry_count for (entry_count,) in PyramidKV(window=window, beta=beta).budgets(None, geometry, entries)]
    assert budgets == sorted(budgets, reverse=True) and budgets[-1] >= min(window, entries // 2)
    assert entries * layers - layers <= sum(budgets) <= entries * layers
    if layers > 1:
        expected = pyramid(entries, min(window, entries // 2), beta, layers)
        assert np.abs(np.subtract(budgets, expected)).max() <= 1  # floats are cut to whole numbers


# -- random: chance, but the same chance every time --------------------------------------------------


def draws(seed: int, chunks: list[int]) -> list[Array]:
    """Return what every slot drew, (kv_heads, slots) by layer: with room for all, nothing is reordered."""
    cache = KeepCache(model(), f"random:seed={seed}", 90, chunk=20)
    read(cache, chunks, seed=0)
    found = []
    for layer in cache.layers:
        (bank,) = layer.resident.banks
        assert bank.slots[0, :60].tolist() == list(range(60))
        found.append(bank.scores[:, :60].numpy())
    return found


def test_random_keeps_the_highest_of_its_draws() -> None:
    by_layer = draws(4, [60])
    cache = KeepCache(model(), "random:seed=4", 16)
    steps = watched(cache)
    read(cache, [33, 7, *[1] * 20], seed=9, rows=2)  # another text, other chunks, more rows: the same draws
    for layer_steps, scores in zip(steps, by_layer, strict=True):
        length, previous = 0, np.zeros((4, 0), dtype=bool)
        for step in layer_steps:
            before, length = length, length + step.key.shape[2]
            kept = np.pad(previous, ((0, 0), (0, length - before)))
            rank = np.tile(scores[:, :length], (2, 1))
            if length - before == 1:
                kept = best(rank, kept, 15)
            kept[:, before:] = True
            previous = best(rank, kept, 16)
            assert (step.kept_flags == previous).all()


def test_random_draws_are_reproducible_and_differ_by_seed_layer_and_head() -> None:
    one, again, other = draws(4, [60]), draws(4, [13, *[1] * 7, 40]), draws(5, [60])
    rows = [tuple(row) for drawn in (one, other) for layer in drawn for row in layer]
    assert all((a == b).all() for a, b in zip(one, again, strict=True))
    assert len(set(rows)) == 2 * LAYERS * KV_HEADS
    assert len({tuple(np.argsort(row)) for row in rows}) == len(rows)  # not one order shifted


def test_random_draws_are_uniform() -> None:
    """Mean and deviation of [0, 1), within four standard errors, for first and last slots."""
    drawn = np.stack([layer for seed in range(20) for layer in draws(seed, [60])]).reshape(-1, 60)
    assert drawn.min() >= 0 and drawn.max() < 1
    error = (1 / 12 / drawn.size) ** 0.5
    assert abs(drawn.mean() - 0.5) < 4 * error
    assert abs(drawn.std() - 12**-0.5) < 0.01
    assert abs(drawn.mean(0) - 0.5).max() < 4 * (1 / 12 / len(drawn)) ** 0.5
    neighbours = np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1]
    assert abs(neighbours) < 4 / drawn.size**0.5


# -- h2o with a half-life ------------------------------------------------------------------------------


def test_a_half_life_makes_scores_independent_of_arrival() -> None:
    """The score is the attention received per query, whether the entry came in a chunk or in a step."""
    selector, given, scores = H2O(halflife=50), torch.rand(1, 120) + 0.1, torch.zeros(1, 0)
    for low, high in [(0, 30), (30, 70), *((slot, slot + 1) for slot in range(70, 120))]:
        scores = torch.cat([scores, torch.zeros(1, high - low)], 1)
        slots = torch.arange(high)[None]
        queries = (high - slots).clamp(max=high - low)  # of this step, that can see it
        entries = Candidates(slots, scores, 0, high, high - low, 40, 1, 0)
        scores = selector.observe(entries, given[:, :high] * queries, high - low)
        torch.testing.assert_close(scores, given[:, :high])


def test_a_half_life_halves_old_attention() -> None:
    selector, slots, scores = H2O(halflife=50), torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.0]])
    for step in range(500, 550):
        scores = selector.observe(Candidates(slots, scores, 0, step, 1, 2, 1, 0), torch.tensor([[0.0, 1.0]]), 1)
    torch.testing.assert_close(scores, torch.tensor([[0.5, 0.5]]))
