"""Compares the answers of a cache token by token with those of transformers' default cache.

At the first differing token, the exact model gives the *gap* between the logits of both tokens. The *noise* is the
largest difference of the stock model's logits of that answer between reading all of it at once and reading one token at
a time. A gap of at most twice the noise is a tie that rounding decides; any other difference is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvkeep.cache import KeepCache
from kvkeep.decode.generate import Generation, generate
from kvkeep.models.loading import Loaded
from kvkeep.stock import new_cache
from kvkeep_lab.drafts import without_drafts
from kvkeep_lab.prompts import Prompt


@dataclass(frozen=True)
class AnswerCase:
    """One cache."""

    method: str
    budget: str | None = None
    checkpoint: str | None = None
    where: str | None = None
    copies: bool = True
    """Whether drafts may be copied from the text."""

    @property
    def label(self) -> str:
        """The case as text for people."""
        kind = "" if self.checkpoint is None and self.where is None else f" {self.checkpoint or ''}@{self.where or ''}"
        copies = "" if self.copies else ", no copies"
        return f"{self.method}{kind}{'' if self.budget is None else f' at {self.budget}'}{copies}"

    def options(self, context: int) -> dict[str, Any]:
        """Return the options of its cache, for ``context`` tokens of prompt and answer."""
        return {"budget": self.budget, "checkpoint": self.checkpoint, "where": self.where, "context": context}


@dataclass(frozen=True)
class ComparedAnswer:
    """The answer of one case to one prompt."""

    key: str
    """Key of the case in a store."""
    label: str
    kind: str
    prompt_tokens: int
    tokens: int
    """Tokens of the answer."""
    same: int
    """Number of leading tokens that equal the stock cache's."""
    differs_at: int | None
    """Index of the first differing token."""
    gap: float | None
    """Gap of logits; see the module."""
    noise: float | None
    """Noise of logits; see the module."""
    prefill_s: float
    decode_s: float
    prefill_ratio: float
    decode_ratio: float
    resident_bytes: int
    """Peak bytes of entries, in full or compressed, without the current chunk."""
    budget_bytes: int | None
    drafted: int
    """Drafts that passes read beside the tokens."""
    accepted: int
    """Drafts that were right."""
    logits: tuple[float, float] | None = None
    """Largest difference of any logit of prompt and answer from reading one token at a time through the unbounded
    cache: read in chunks, and in a batch. None if it was not requested."""

    @property
    def tie(self) -> bool:
        """Whether rounding decides the first difference."""
        return self.gap is not None and self.noise is not None and self.gap <= 2 * self.noise


def written(loaded: Loaded, prompt: Prompt, case: AnswerCase, new: int) -> tuple[Generation, Any]:
    """Return ``new`` greedy tokens after a prompt and the cache that generated them. Ends of text are ignored."""
    cache = new_cache(loaded.model, case.method, **case.options(len(prompt.ids) + new))
    with without_drafts(loaded.model, unless=case.copies):
        made = generate(loaded.model, loaded.tokenizer, prompt.ids, cache, max_new_tokens=new, ignore_eos=True)
    return made, cache


def judged(
    model: Any, prompt: Prompt, case: AnswerCase, key: str, result: Generation, reference: Generation, cache: Any
) -> ComparedAnswer:
    """Return the comparison of an answer, generated with ``cache``, with the stock cache's answer."""
    pairs = list(zip(result.tokens, reference.tokens, strict=False))
    differs_at = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    gap = noise = None
    if differs_at is not None:
        gap, noise = _margin(model, list(prompt.ids), list(reference.tokens), differs_at, pairs[differs_at][0])
    budget = None
    if isinstance(cache, KeepCache) and cache.entries is not None:
        budget = cache.entries * cache.geometry.kv_bytes_per_token
        budget += sum(  # sliding windows are bounded by the model, not by the budget
            layer.keys.nbytes + layer.values.nbytes
            for layer, sliding in zip(cache.layers, cache.is_sliding, strict=True)
            if sliding
        )
    timing, theirs = result.timing, reference.timing
    seconds = (
        timing.prefill_s,
        timing.decode_s,
        timing.prefill_s / theirs.prefill_s,
        timing.decode_s / theirs.decode_s,
    )
    about = key, case.label, prompt.kind, len(prompt.ids), len(result.tokens)
    same, held_bytes = len(pairs) if differs_at is None else differs_at, result.memory.resident_bytes
    held_bytes += result.memory.compressed_bytes
    return ComparedAnswer(
        *about, same, differs_at, gap, noise, *seconds, held_bytes, budget, result.drafted, result.accepted
    )


@torch.no_grad()
def _margin(model: Any, prompt: list[int], answer: list[int], place: int, ours: int) -> tuple[float, float]:
    """Return the gap between the stock model's logits of token ``place`` of its answer and of ``ours``, and the noise:
    the largest change of its two largest logits at any token of the answer when it reads all at once."""
    text = torch.tensor([[*prompt, *answer[:-1]]], device=next(model.parameters()).device)
    cache = DynamicCache(config=model.config)
    parts = text.split([len(prompt), *[1] * (len(answer) - 1)], 1)
    steps = torch.stack([model(part, cache=cache, logits_to_keep=1).logits[0, -1].float() for part in parts])
    at_once = model(text, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
    noise = (steps - at_once).gather(1, steps.topk(2).indices).abs().max()
    return float(steps[place, answer[place]] - steps[place, ours]), float(noise)
