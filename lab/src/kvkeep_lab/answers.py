"""Answers from a cache, judged token by token against transformers' own cache's.

Where a token differs, the exact model gives the *gap* between their logits at that position,
and the *noise*, the most by which the stock model's logits of that answer differ when it reads all of it at once, not
one token at a time. A gap of at most twice the noise is a tie that rounding decides; any other difference is an error.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvkeep.cache import KeepCache
from kvkeep.decode.generate import Generation, generate
from kvkeep.models.loading import Loaded
from kvkeep.stock import new_cache
from kvkeep_lab.prompts import Prompt


@dataclass(frozen=True)
class AnswerCase:
    """One cache. ``copies``: as in :func:`~kvkeep.decode.generate.generate`; for "stock", transformers' own lookup."""

    method: str
    budget: str | None = None
    checkpoint: str | None = None
    where: str | None = None
    copies: int | None = None

    @property
    def label(self) -> str:
        """The case as a person reads it."""
        kind = "" if self.checkpoint is None and self.where is None else f" {self.checkpoint or ''}@{self.where or ''}"
        copies = "" if self.copies is None else ", no copies" if self.copies == 0 else f", copies of {self.copies}"
        return f"{self.method}{kind}{'' if self.budget is None else f' at {self.budget}'}{copies}"

    def options(self, context: int) -> dict[str, Any]:
        """Return the options of its cache, for ``context`` tokens of prompt and answer."""
        return {"budget": self.budget, "checkpoint": self.checkpoint, "where": self.where, "context": context}


@dataclass(frozen=True)
class ComparedAnswer:
    """One case's answer to one prompt.

    key: what a store knows it by. same: leading tokens that are the stock cache's, of ``tokens``; differs_at: the first
    that is not. gap, noise: of logits, see above. resident_bytes: entries held at their peak, in full or smaller, the
    chunk in hand not counted. logits: the greatest difference of any logit of prompt and answer, read in chunks and in
    a batch, from those of one token at a time through the unbounded cache, if that was asked for.
    """

    key: str
    label: str
    kind: str
    prompt_tokens: int
    tokens: int
    same: int
    differs_at: int | None
    gap: float | None
    noise: float | None
    prefill_s: float
    decode_s: float
    prefill_ratio: float
    decode_ratio: float
    resident_bytes: int
    budget_bytes: int | None
    rounds: dict[str, Any] | None
    logits: tuple[float, float] | None = None

    @property
    def tie(self) -> bool:
        """Whether the first difference is one that rounding decides."""
        return self.gap is not None and self.noise is not None and self.gap <= 2 * self.noise


def written(loaded: Loaded, prompt: Prompt, case: AnswerCase, new: int) -> tuple[Generation, Any]:
    """Return ``new`` greedy tokens after a prompt, ends of text ignored, and the cache that they were written with."""
    cache = new_cache(loaded.model, case.method, **case.options(len(prompt.ids) + new))
    options: dict[str, Any] = {"max_new_tokens": new, "ignore_eos": True, "copies": case.copies}
    return generate(loaded.model, loaded.tokenizer, prompt.ids, cache, **options), cache


def judged(
    model: Any, prompt: Prompt, case: AnswerCase, key: str, result: Generation, reference: Generation, cache: Any
) -> ComparedAnswer:
    """Return how an answer, written with ``cache``, stands beside the stock cache's."""
    pairs = list(zip(result.tokens, reference.tokens, strict=False))
    differs_at = next((place for place, (ours, their_timing) in enumerate(pairs) if ours != their_timing), None)
    gap = noise = None
    if differs_at is not None:
        gap, noise = _margin(model, list(prompt.ids), list(reference.tokens), differs_at, pairs[differs_at][0])
    budget = None
    if isinstance(cache, KeepCache) and cache.entries is not None:
        budget = cache.entries * cache.geometry.kv_bytes_per_token
        budget += sum(  # sliding windows are the model's own, and bounded by it
            layer.keys.nbytes + layer.values.nbytes
            for layer, sliding in zip(cache.layers, cache.is_sliding, strict=True)
            if sliding
        )
    timing, their_timing = result.timing, reference.timing
    seconds = (
        timing.prefill_s,
        timing.decode_s,
        timing.prefill_s / their_timing.prefill_s,
        timing.decode_s / their_timing.decode_s,
    )
    about = key, case.label, prompt.kind, len(prompt.ids), len(result.tokens)
    same, held_bytes = len(pairs) if differs_at is None else differs_at, result.memory.resident_bytes
    rounds = None if result.rounds is None else asdict(result.rounds)
    held_bytes += result.memory.compressed_bytes
    return ComparedAnswer(*about, same, differs_at, gap, noise, *seconds, held_bytes, budget, rounds)


@torch.no_grad()
def _margin(model: Any, prompt: list[int], answer: list[int], place: int, ours: int) -> tuple[float, float]:
    """Return by how much the stock model prefers token ``place`` of its answer to ``ours``, and the most by which its
    two largest logits differ, at any token of the answer, when it reads all at once."""
    text = torch.tensor([[*prompt, *answer[:-1]]], device=next(model.parameters()).device)
    cache = DynamicCache(config=model.config)
    parts = text.split([len(prompt), *[1] * (len(answer) - 1)], 1)
    steps = torch.stack([model(part, past_key_values=cache, logits_to_keep=1).logits[0, -1].float() for part in parts])
    at_once = model(text, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
    noise = (steps - at_once).gather(1, steps.topk(2).indices).abs().max()
    return float(steps[place, answer[place]] - steps[place, ours]), float(noise)
