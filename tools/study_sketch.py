"""At which load is a count sketch of entries that left better than nothing? KVReviver's, and its relatives.

    python tools/study_sketch.py --file TEXT --tokens 2048 --new 64 [--heads 9] [--only shares] [--json FILE]
    python tools/study_sketch.py --file TEXT --needle
    python tools/study_sketch.py --speed 1 4 --tokens 4096

The prompt is read once, with full attention; then every method takes its entries, with the attention they received,
in one piece, and is given the full cache's continuation token by token. So no estimate reaches the prompt itself, which
is the kindest way to measure (``kvkeep compare`` reads the prompt through each cache). Printed are the mean KL from the
full cache's predictions in nats, the share of positions at which the largest agrees, and the load: entries that share a
slot.

With ``--needle`` a code is planted in the text and asked for at its end: the log-probability of its tokens. ``--speed``
tells the processor time of a decoding step after ``--tokens`` random entries, median of 8 interleaved ones, for batches
of so many rows: the stock cache's, and the methods' at 25 %; and what of kvreviver's step its estimates take alone:
finding the cells, medians and the two products, without swaps and marks. ``--heads`` makes the model one with so many
KV heads, by copies of those it has: the full cache's output is the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from kvkeep_lab.compare import Position, judge
from torch import Tensor
from transformers import DynamicCache

import kvkeep
from kvkeep import KeepCache
from kvkeep.geometry import ModelGeometry
from kvkeep.policies.fates import sketched
from kvkeep.stores.selected import SelectedLayer

Read = list[tuple[Tensor, Tensor, Tensor]]  # by layer: keys, values (1, heads, tokens, dim), marks (lanes, tokens)

QUARTER = "25%"
NEVER = 1e30  # times the lowest rank: attention is noted, and nothing comes back
STUDIES: dict[str, list[tuple[str, str]]] = {
    "fates": [
        ("h2o", QUARTER),
        ("h2o+sketch", QUARTER),
        ("kvreviver", QUARTER),
        ("h2o+sketch:keys=signed", QUARTER),
        ("h2o+sketch:estimate=centred", QUARTER),
        ("h2o+sketch:estimate=centred,keys=signed", QUARTER),
        ("h2o+sketch:estimate=shrunk", QUARTER),
        ("h2o+sketch:estimate=shrunk,by=mean", QUARTER),
        ("h2o+sketch:estimate=shrunk,by=mean,keys=signed", QUARTER),
        ("kvreviver:estimate=shrunk,by=mean", QUARTER),
        ("h2o+quantize:4", QUARTER),
        ("h2o+quantize:2", QUARTER),
    ],
    "shares": [
        (f"h2o+sketch:vague={share}{how}", QUARTER)
        for share in (0.02, 0.25, 0.5)
        for how in ("", ",estimate=shrunk,by=mean")
    ],
    "evicted": [
        (method, budget)
        for budget in ("50%", "75%", "90%", "97%")
        for method in ("h2o", "h2o+sketch", "h2o+sketch:estimate=shrunk,by=mean")
    ],
    "seen": [
        (f"{method} seen {seen}", QUARTER)
        for method in ("kvreviver", f"h2o+sketch:swap={NEVER}")
        for seen in (1, 4, 16, 64, 10_000)
    ],
}


@dataclass(frozen=True)
class Given:
    """What all methods are measured against: the text's entries, and the tokens and logits that continue it."""

    model: Any
    ids: Tensor
    read: Read
    tokens: list[int]
    logits: list[Tensor]


def read(model: Any, ids: Tensor, new: int, answer: list[int] | None) -> Given:
    """Read a text in a cache that keeps everything and continue it, with ``answer`` or greedily."""
    cache = KeepCache(model, "h2o", ids.shape[1] + new + 512, chunk=512)
    logits = [_step(model, cache, ids)]
    taken = []
    for layer in cache.layers:
        assert isinstance(layer, SelectedLayer)
        (bank,) = layer.banks
        own = slice(0, ids.shape[1])
        assert bank.marks is not None
        keys, values = (rows[:, own].clone()[None] for rows in (bank.keys, bank.values))
        taken.append((keys, values, bank.marks[:, own].clone()))
    tokens = [int(logits[0].argmax()) if answer is None else answer[0]]
    for number in range(1, new):
        logits.append(_step(model, cache, ids.new_tensor([[tokens[-1]]])))
        tokens.append(int(logits[-1].argmax()) if answer is None else answer[number])
    return Given(model, ids, taken, tokens, logits)


@torch.no_grad()
def _step(model: Any, cache: KeepCache, ids: Tensor) -> Tensor:
    return model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()


@torch.no_grad()
def handed(given: Given, method: str, budget: str) -> KeepCache:
    """Return a cache of ``method`` that was handed the text's entries in one piece."""
    context = given.ids.shape[1] + len(given.tokens)
    cache = KeepCache(given.model, method, budget, context=context)
    cache.ledger.append(given.ids, None, None, None)
    for layer, (keys, values, marks) in zip(cache.layers, given.read, strict=True):
        assert isinstance(layer, SelectedLayer)
        layer.update(keys, values)
        layer._new_marks = {0: marks}
        layer.settle()
        if layer.listener is not None:
            layer.listener.exchange(layer)
    return cache


@contextmanager
def watched(count: int, shares: list[Tensor]) -> Iterator[None]:
    """Where entries may come back: note the share of attention that each KV head gives to the sketch, and let it see
    only the ``count`` entries there that received most so far."""
    recall, hear = sketched._Reviving.recall, sketched._Reviving.hear

    def fewer(self: Any, layer: SelectedLayer, query: Tensor) -> Iterator[Any]:
        for slots, holes, *estimates in recall(self, layer, query):
            marks = sketched._got(self.marks[layer.index], slots).masked_fill(slots < 0, float("-inf"))
            best = marks.topk(min(count, slots.shape[1]), dim=1).indices
            self._asked[layer.index] = [slots.gather(1, best)]
            keys, values = (replace(one, index=_at(one.index, best)) for one in estimates)
            yield self._asked[layer.index][0], holes, keys, values

    def noting(self: Any, layer: SelectedLayer, weights: Sequence[Tensor], queries: int) -> None:
        shares.append(torch.cat(list(weights), 1).sum(1))
        hear(self, layer, weights, queries)

    sketched._Reviving.recall, sketched._Reviving.hear = fewer, noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        sketched._Reviving.recall, sketched._Reviving.hear = recall, hear  # type: ignore[method-assign]


def _at(index: Tensor, entries: Tensor) -> Tensor:
    return index.gather(2, entries.expand(len(index), -1, -1))


def measure(given: Given, method: str, budget: str) -> dict[str, Any]:
    """Return what one method made of the continuation."""
    name, _, seen = method.partition(" seen ")
    cache = handed(given, name, budget)
    judged: list[Position] = []
    shares: list[Tensor] = []
    start = time.perf_counter()
    with watched(int(seen) if seen else sys.maxsize, shares):
        for number, token in enumerate(given.tokens[:-1], start=1):
            logits = _step(given.model, cache, given.ids.new_tensor([[token]]))
            judged.append(judge(given.logits[number], logits, given.tokens[number]))
    seconds = time.perf_counter() - start
    live: Any = cache.fate
    slots = next(iter(live.slots.values())) if hasattr(live, "slots") else None
    return {
        "method": method,
        "budget": budget,
        "kl": fmean(one.kl for one in judged),
        "kl_max": max(one.kl for one in judged),
        "top1": fmean(one.agrees for one in judged),
        "log_p": -sum(one.nll for one in judged),
        "slots": slots,
        "attention": float(torch.stack(shares).mean()) if shares else None,
        "swamped": float((torch.stack(shares) > 0.5).float().mean()) if shares else None,
        "ignored": float((torch.stack(shares) < 0.01).float().mean()) if shares else None,
        "load": fmean(inside.sum(1).float().mean().item() for inside in live.inside.values()) / slots
        if slots
        else None,
        "bytes": cache.resident_bytes() + live.compressed_bytes,
        "tokens_per_s": len(judged) / seconds,
    }


def with_heads(model: Any, heads: int) -> None:
    """Give the model ``heads`` KV heads, copies of those it has."""
    config = model.config
    copies, dim = heads // config.num_key_value_heads, config.head_dim
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.k_proj, attention.v_proj):
            weight = projection.weight.data.unflatten(0, (-1, dim)).repeat_interleave(copies, 0).flatten(0, 1)
            projection.weight = torch.nn.Parameter(weight, requires_grad=False)
        attention.num_key_value_groups //= copies
    config.num_key_value_heads = heads


def speed(model: Any, tokens: int, batches: list[int]) -> None:
    """Print the processor time of decoding steps."""
    geometry = ModelGeometry.from_config(model.config)
    methods = ("stock", "h2o", "h2o+quantize:4", "kvreviver", "h2o+sketch:by=mean", "kvreviver:estimate=shrunk,by=mean")
    for batch in batches:
        caches: dict[str, Any] = {}
        for method in methods:
            random = []
            for layer in geometry.layers:
                shape = batch, layer.kv_heads, tokens
                keys, values = (torch.randn(*shape, dim) / 4 for dim in (layer.key_dim, layer.value_dim))
                random.append((keys, values, torch.rand(batch * layer.kv_heads, tokens)))
            ids = torch.zeros(batch, tokens, dtype=torch.int64)
            if method == "stock":
                caches[method] = DynamicCache(config=model.config)
                for index, (keys, values, _) in enumerate(random):
                    caches[method].update(keys, values, index)
            else:
                caches[method] = handed(Given(model, ids, random, [0], []), method, QUARTER)
        times: dict[str, list[float]] = {method: [] for method in methods}
        for _ in range(8):
            for method, cache in caches.items():
                start = time.process_time()
                with torch.no_grad():
                    model(ids[:, :1] + 5, past_key_values=cache, position_ids=torch.full((batch, 1), tokens))
                times[method].append(time.process_time() - start)
        for method, own in times.items():
            took, stock = median(own), median(times["stock"])
            tokens_per_s = f"{batch / took:5.1f} tokens/s, {stock / took:.2f} x stock"
            print(f"batch {batch:2} {method:36} {1e3 * took:6.0f} ms a step, {tokens_per_s}", flush=True)
        alone = median(estimates_alone(model, caches["kvreviver"]) for _ in range(8))
        print(f"batch {batch:2} {'estimates alone':36} {1e3 * alone:6.0f} ms of a step of kvreviver", flush=True)


@torch.inference_mode()
def estimates_alone(model: Any, cache: KeepCache) -> float:
    """Return the processor seconds of finding cells and of one query's products with estimates, in all layers."""
    start, heads = time.process_time(), model.config.num_attention_heads
    for layer in cache.layers:
        assert isinstance(layer, SelectedLayer) and cache.fate is not None
        for slots, _, keys, values in cache.fate.recall(layer, torch.zeros(1, 1, 1, 1)):
            group = heads // layer.heads
            keys.scores(torch.ones(layer.lanes, group, keys.shape[3]))
            values.mix(torch.ones(layer.lanes, group, slots.shape[1]))
    return time.process_time() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--speed", type=int, nargs="+", help="rows of a batch")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--heads", type=int, help="KV heads, copies of those there are")
    parser.add_argument("--only", default=",".join(STUDIES), help=f"some of: {', '.join(STUDIES)}")
    parser.add_argument("--needle", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    loaded = kvkeep.load("smollm2")
    if options.heads:
        with_heads(loaded.model, options.heads)
    if options.speed:
        speed(loaded.model, options.tokens, options.speed)
        return
    text = loaded.tokenizer(options.file.read_text(encoding="utf-8")).input_ids
    answer = None
    if options.needle:
        needle, code = (loaded.tokenizer(part).input_ids for part in ("\nThe code of the library is", " 48213."))
        depth = options.tokens // 3
        rest = options.tokens - 2 * len(needle) - len(code)
        text, answer = [*text[:depth], *needle, *code, *text[depth:rest], *needle], code
        options.tokens, options.new = len(text), len(code)
    ids = torch.tensor([text[: options.tokens]])
    given = read(loaded.model, ids, options.new, answer)
    judged = [judge(logits, logits, token) for logits, token in zip(given.logits, given.tokens, strict=True)]
    print(
        f"{ids.shape[1]} tokens, then {loaded.tokenizer.decode(given.tokens)!r}; the full cache: "
        f"top-1 {fmean(one.agrees for one in judged[1:]):4.0%}  log p {-sum(one.nll for one in judged[1:]):7.2f}",
        flush=True,
    )
    rows = []
    for study in options.only.split(","):
        for method, budget in STUDIES[study]:
            rows.append({"study": study} | measure(given, method, budget))
            row = rows[-1]
            print(
                f"{study:8} {method:50} {budget:4} KL {row['kl']:8.4f} (most {row['kl_max']:6.2f})  "
                f"top-1 {row['top1']:4.0%}  log p {row['log_p']:7.2f}  {row['bytes'] / 1e6:5.1f} MB  "
                f"{row['tokens_per_s']:4.1f}/s  load {row['load'] or 0:.1f}"
                + (
                    ""
                    if row["attention"] is None
                    else f"  to the sketch {row['attention']:.0%}, above half in {row['swamped']:.0%} of heads, "
                    f"under 1 % in {row['ignored']:.0%}"
                ),
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
