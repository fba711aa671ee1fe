"""The state of every token in every layer and head, at each step of one generation."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from kvkeep.cache import KeepCache
from kvkeep.contracts.entries import EntryState
from kvkeep.decode.generate import Generation, generate
from kvkeep.engine.pieces import token_texts
from kvkeep.errors import UsageError
from kvkeep_lab.drafts import without_drafts

STATES = [code.name.lower() for code in EntryState]
"""States of an entry, by their codes."""


@dataclass(frozen=True)
class RecordedStep:
    """One forward pass."""

    tokens: int
    """Tokens in the cache after the pass."""
    changes: bytes
    """Changed states; see :func:`encoded`."""


@dataclass(frozen=True)
class Trace:
    """States of entries over time. A lane is one KV head of one layer; lanes are ordered by layer."""

    heads: list[int]
    """KV heads of each layer."""
    steps: list[RecordedStep]
    counts: dict[str, int]
    """Number of entries of all lanes in each final state; states without entries are left out."""

    @property
    def lanes(self) -> int:
        """KV heads of all layers together."""
        return sum(self.heads)

    @property
    def tokens(self) -> int:
        """Tokens in the cache after the last step."""
        return self.steps[-1].tokens if self.steps else 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain types for the page."""
        return {
            "heads": self.heads,
            "steps": [[step.tokens, base64.b64encode(step.changes).decode("ascii")] for step in self.steps],
        }


@dataclass(frozen=True)
class Inspection:
    """The record of one generation."""

    model: str
    budget: str | None
    entries: int | None
    """Effective budget of each layer; None without a budget."""
    texts: list[str]
    """Text of every token of prompt and answer; joined, they give the complete text. The last token was generated but
    not read."""
    trace: Trace
    generation: Generation


class Recorder:
    """Records the changes in a cache of one row whenever it has grown."""

    def __init__(self, cache: KeepCache) -> None:
        self.cache = cache
        self.heads: list[int] = []
        self.steps: list[RecordedStep] = []
        self._state = torch.zeros(0, 0, dtype=torch.int8)

    def record(self) -> None:
        """Record a step if there was one since the last call."""
        layers = entry_states(self.cache)
        now = torch.cat(layers) if layers else self._state
        if now.shape[1] <= self._state.shape[1]:
            return
        if not self.heads:
            self.heads = [layer.shape[0] for layer in layers]
            self._state = now.new_zeros(len(now), 0)
        self.steps.append(RecordedStep(now.shape[1], encoded(arrived(self._state, now.shape[1]), now)))
        self._state = now.clone()  # the cache may return the same tensor again

    def trace(self) -> Trace:
        """Return the recorded trace."""
        found = torch.bincount(self._state.flatten().long(), minlength=len(STATES)).tolist()
        return Trace(
            self.heads, self.steps, {state: count for state, count in zip(STATES, found, strict=True) if count}
        )


def entry_states(cache: KeepCache) -> list[Tensor]:
    """Return the state of every entry of a cache with one row: for each layer (kv_heads, tokens) int8, an index of
    :data:`STATES`."""
    return [layer[0] for layer in cache.entry_states()]


def arrived(state: Tensor, tokens: int) -> Tensor:
    """Return ``state`` (lanes, before) extended to ``tokens``; new entries are resident."""
    new = state.new_full((state.shape[0], tokens - state.shape[1]), EntryState.RESIDENT)
    return torch.cat([state, new], dim=1)


def encoded(before: Tensor, now: Tensor) -> bytes:
    """Return the differences of two states of one shape (lanes, tokens) int8, as runs of slots with one new code.

    A run stays within one lane. It has two numbers: the unchanged entries since the end of the last run (lane after
    lane), and ``(length - 1) * 8 + code``. Numbers are LEB128: seven bits per byte, the lowest first; the eighth bit
    marks that more bytes follow. A short run near the previous one takes two bytes. New tokens that stay resident need
    no run.
    """
    at = (before != now).flatten().nonzero().squeeze(-1)
    if not len(at):
        return b""
    codes = now.flatten()[at].long()
    begins = torch.ones(len(at), dtype=torch.bool)
    begins[1:] = (at[1:] != at[:-1] + 1) | (codes[1:] != codes[:-1]) | (at[1:] % now.shape[1] == 0)
    first = begins.nonzero().squeeze(-1)
    lengths = torch.diff(first, append=first.new_tensor([len(at)]))
    starts = at[first]
    gaps = torch.diff(starts, prepend=starts.new_zeros(1))
    gaps[1:] -= lengths[:-1]
    out = bytearray()
    for number in torch.stack([gaps, (lengths - 1) * 8 + codes[first]], dim=1).flatten().tolist():
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)


def inspect(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    cache: Cache,
    name: str = "",
    *,
    budget: str | None = None,
    interrupted: Callable[[], bool] | None = None,
    **options: Any,
) -> Inspection:
    """Continue ``prompt`` greedily and record the states of its tokens. The arguments and ``options`` are those of
    ``generate``. budget: the requested budget, for display. Raises UsageError for a cache of transformers."""
    if not isinstance(cache, KeepCache):
        raise UsageError(
            "transformers' own cache ('stock') keeps every entry, so there is nothing to inspect; use method "
            "'full', which shows the same."
        )
    recorder = Recorder(cache)

    def between_steps() -> bool:
        recorder.record()
        return interrupted() if interrupted else False

    with without_drafts(model, unless=cache.method.recall.drafts):  # the cache would hold them beside the answer
        generation = generate(model, tokenizer, prompt, cache, interrupted=between_steps, **options)
    texts = token_texts(tokenizer, generation.sequence)
    return Inspection(name, budget, cache.entries, texts, recorder.trace(), generation)
