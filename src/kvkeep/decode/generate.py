"""Generation with any cache by transformers' ``generate``, with timings and measured memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from kvkeep.cache import KeepCache
from kvkeep.contracts.exactness import Exactness
from kvkeep.engine.pieces import Pieces
from kvkeep.engine.verified import verified
from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.meter import Memory
from kvkeep.stock import STOCK, memory_of
from kvkeep.stores.readers.round import RoundStatistics

SEEDS = range(-(2**63), 2**64)
"""Seeds that torch accepts."""


@dataclass(frozen=True)
class Timing:
    """Seconds and tokens per second of prefill and decoding. ``prefill_tokens``: prompt tokens that were not in the
    cache. The first new token counts as prefill. ``reconstruction_s``: those in which the text was read once more to
    choose what stays, part of the prefill, or of decoding where the text outgrew the budget only then."""

    prefill_tokens: int
    prefill_s: float
    decode_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    reconstruction_s: float = 0.0


@dataclass(frozen=True)
class Generation:
    """An answer with its memory and timing. ``tokens``: new token ids; ``stopped``: "eos", "length", "positions" (the
    model has no more), "ended" (the caller's condition) or "interrupted"; ``rounds``: those of draft and verify."""

    text: str
    tokens: list[int]
    prompt_tokens: int
    stopped: str
    method: str
    exactness: str
    memory: Memory
    timing: Timing
    sequence: list[int] = field(repr=False)
    rounds: RoundStatistics | None = None


@dataclass(eq=False)
class _Run(BaseStreamer, StoppingCriteria):
    """One call of :func:`generate`: streamer, stopping criterion and progress of the prompt in one object."""

    model: Any
    tokenizer: Any
    cache: Cache
    prompt: list[int]
    on_text: Callable[[str], None] | None
    on_progress: Callable[[int], None] | None
    interrupted: Callable[[], bool]
    ended: Callable[[str], bool] | None
    written: int

    def __post_init__(self) -> None:
        self.bounded = self.cache if isinstance(self.cache, KeepCache) else None
        self.start, self.known = 0.0, self.cache.get_seq_length()
        self.before = 0.0 if self.bounded is None else self.bounded.meter.reconstruction_s
        self.times: list[float] = []  # one for each new token
        self.met = False  # ``ended`` returned True
        self._started, self._read = False, 0  # prompt received; prompt tokens reported
        self._pieces = Pieces(self.tokenizer)
        if self.written and self.tokenizer is not None:
            self._pieces.add(self.prompt[-self.written :])

    def room(self) -> int:
        """Return how many tokens fit after the prompt. Raises UsageError if it is empty or too long."""
        if not self.prompt:
            raise UsageError("There is nothing to answer: the prompt is empty.")
        return room_after(len(self.prompt), positions_of(self.model, self.cache))

    def decode(self, max_new_tokens: int, copies: int | None, options: dict[str, Any]) -> list[int]:
        """Return all token ids, the prompt's included."""
        if self.bounded is not None and self.bounded.method.recall.drafts:
            options |= {"custom_generate": verified, "listener": self, "prompt_lookup_num_tokens": copies}
        else:
            options |= {"streamer": self, "prompt_lookup_num_tokens": copies or None}
        if self.bounded is not None:
            self.bounded.stream.on_progress = self.progress
        ids = torch.tensor([self.prompt], device=next(self.model.parameters()).device)
        self.start = time.perf_counter()
        try:
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=self.cache,
                max_new_tokens=max_new_tokens,
                stopping_criteria=StoppingCriteriaList([self]),
                **options,
            )
        finally:
            if self.bounded is not None:
                self.bounded.stream.on_progress = None
        return output[0].tolist()

    def progress(self, done: int) -> None:
        """Report ``done`` prompt tokens, each number once. Raises KeyboardInterrupt if interrupted before the last."""
        if self._read < done <= len(self.prompt):
            self._read = done
            if self.on_progress is not None:
                self.on_progress(done)
        if done < len(self.prompt) and self.interrupted():
            raise KeyboardInterrupt

    def put(self, value: Tensor) -> None:
        """Receive the prompt first, then one new token at a time."""
        if not self._started:
            self._started = True
            return
        if not self.times:  # a stock cache reads the prompt in one pass and reports no progress
            self.progress(len(self.prompt))
        self.times.append(time.perf_counter())
        if self.on_text is None or self.tokenizer is None:
            return
        if text := self._pieces.add(value.flatten().tolist()):
            self.on_text(text)

    def end(self) -> None:
        """Nothing is buffered."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return, for the one row, whether it stops: interrupted, or ended by the caller's condition."""
        if self.ended is not None:
            self.met = self.ended(self._text(input_ids[0, len(self.prompt) :].tolist()))
        return torch.tensor([self.interrupted() or self.met], device=input_ids.device)

    def report(self, sequence: list[int], max_new_tokens: int, ignore_eos: bool) -> Generation:
        """Return the finished generation, with memory and timing."""
        tokens, fresh = sequence[len(self.prompt) :], len(self.prompt) - self.known
        eos = self.model.generation_config.eos_token_id
        if tokens and not ignore_eos and tokens[-1] in (eos if isinstance(eos, list) else [eos]):
            stopped = "eos"
        elif self.interrupted() or self.met:
            stopped = "interrupted" if self.interrupted() else "ended"
        else:
            stopped = "length" if len(tokens) >= max_new_tokens else "positions"
        times, own = self.times or [self.start], self.bounded
        prefill, decode = times[0] - self.start, times[-1] - times[0]
        rates = fresh / prefill if prefill else 0.0, (len(times) - 1) / decode if decode else 0.0
        once_more = 0.0 if own is None else own.meter.reconstruction_s - self.before
        return Generation(
            text=self._text(tokens),
            tokens=tokens,
            prompt_tokens=len(self.prompt),
            stopped=stopped,
            method=STOCK if own is None else own.method.name,
            exactness=str(Exactness.EXACT if own is None else own.exactness),
            memory=memory_of(self.cache),
            timing=Timing(fresh, prefill, decode, *rates, once_more),
            sequence=sequence,
            rounds=None if own is None or own.round is None else own.round.statistics,
        )

    def _text(self, tokens: list[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)


def room_after(count: int, positions: int | None) -> int:
    """Return how many tokens fit after a prompt of ``count`` within ``positions`` (None: they do not run out). Raises
    UsageError where none does."""
    if positions is None:
        return 2**31
    if count >= positions:
        raise UsageError(
            f"The prompt has {count} tokens and the model has {positions} positions; shorten the text to "
            f"at most {positions - 1} tokens or take a model with more."
        )
    return positions - count


def positions_of(model: Any, cache: Cache) -> int | None:
    """Return how many tokens the model can read and write with this cache; None where its positions do not run out."""
    if isinstance(cache, KeepCache) and cache.positions is not None:
        return None  # positions are within the cache
    return ModelGeometry.from_config(model.config).max_positions


class GenerateOptions(TypedDict, total=False):
    """What :func:`generate` takes by name; :class:`~kvkeep.decode.chat.Conversation` passes it on."""

    max_new_tokens: int
    on_text: Callable[[str], None] | None
    on_progress: Callable[[int], None] | None
    interrupted: Callable[[], bool] | None
    ended: Callable[[str], bool] | None
    ignore_eos: bool
    temperature: float
    seed: int | None
    copies: int | None


def generate(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    cache: Cache,
    *,
    max_new_tokens: int = 128,
    on_text: Callable[[str], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
    interrupted: Callable[[], bool] | None = None,
    ended: Callable[[str], bool] | None = None,
    ignore_eos: bool = False,
    temperature: float = 0.0,
    seed: int | None = None,
    copies: int | None = None,
    written: int = 0,
) -> Generation:
    """Continue ``prompt`` (all token ids, those already in ``cache`` included) by up to ``max_new_tokens``.

    Args:
        on_text: receives pieces of text as they are decoded.
        on_progress: receives the number of prompt tokens read; all are reported before the first piece of text.
        interrupted: called between chunks and between tokens; True stops.
        ended: called with the new text after each token; True stops.
        ignore_eos: do not stop at the end-of-sequence token.
        temperature: 0 is greedy; above, tokens are sampled.
        seed: makes samples repeatable.
        copies: draft tokens copied from the text per step; None: the cache's default, 0: none.
        written: so many of the prompt's last tokens are of an answer that goes on: ``on_text`` receives what follows.

    Raises:
        UsageError: the prompt is empty or exceeds the model's positions, or seed or temperature is out of range.
        KeyboardInterrupt: interrupted while the prompt is read.
    """
    if seed is not None and seed not in SEEDS:
        raise UsageError(f"A seed is a whole number from {SEEDS.start} to {SEEDS.stop - 1}, not {seed}.")
    if isinstance(prompt, str):
        raise UsageError("A prompt is a list of token ids; encode a text first, as tokenizer(text).input_ids.")
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"A temperature is a number from 0 on, not {temperature}.")
    told = on_text, on_progress, interrupted or (lambda: False), ended
    run = _Run(model, tokenizer, cache, list(prompt), *told, written)
    limit = min(max_new_tokens, run.room())
    options: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    if ignore_eos:
        options["eos_token_id"] = None
    if seed is not None:
        torch.manual_seed(seed)
    return run.report(run.decode(limit, copies, options), max_new_tokens, ignore_eos)
