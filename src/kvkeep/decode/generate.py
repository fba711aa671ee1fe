"""Generating with any cache, by transformers' own ``generate``, with timings and measured memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from kvkeep.cache import KeepCache
from kvkeep.contracts import Exactness
from kvkeep.decode.verified import verified
from kvkeep.errors import UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.meter import Memory
from kvkeep.stock import STOCK, memory_of
from kvkeep.stores.round import RoundStatistics

SEEDS = range(-(2**63), 2**64)
"""What torch takes as a seed."""


@dataclass(frozen=True)
class Timing:
    """Seconds, and tokens per second, of reading the prompt and of writing the answer. ``prefill_tokens`` were not in
    the cache yet; the first token's time is the prompt's."""

    prefill_tokens: int
    prefill_s: float
    decode_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True)
class Generation:
    """One answer and what it cost. ``tokens``: the new token ids; ``stopped``: "eos", "length", "positions" (the model
    has no more), "ended" (as asked for) or "interrupted". ``rounds``: of draft and verify, where it was decoded so."""

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


class _Listener(BaseStreamer):
    """Hears of each token as it is chosen: notes the time, and passes new text on. on_prompt: called once the prompt
    has been read, before anything is passed on."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None] | None, on_prompt: Callable[[], None]) -> None:
        self.tokenizer, self.on_text, self.on_prompt = tokenizer, on_text, on_prompt
        self.times: list[float] = []
        self._prompt_seen = False
        self._tokens: list[int] = []
        self._told = 0  # characters of the current line already passed on

    def put(self, value: Tensor) -> None:
        """Take the prompt first, then one token at a time."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if not self.times:
            self.on_prompt()
        self.times.append(time.perf_counter())
        if self.on_text is None or self.tokenizer is None:
            return
        self._tokens.extend(value.flatten().tolist())
        text = self.tokenizer.decode(self._tokens, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character; wait for the rest
            return
        if len(text) > self._told:
            self.on_text(text[self._told :])
        self._told = len(text)
        if text.endswith("\n"):  # start afresh, so that a long answer is not decoded over and over
            self._tokens, self._told = [], 0

    def end(self) -> None:
        """Nothing more to do."""


class _Reading:
    """How much of a prompt of ``total`` tokens has been read; each number is told once."""

    def __init__(
        self, total: int, on_progress: Callable[[int], None] | None, interrupted: Callable[[], bool] | None
    ) -> None:
        self.total, self.on_progress, self.interrupted = total, on_progress, interrupted
        self._told = 0

    def between_chunks(self, done: int) -> None:
        """Hear from the cache after each step: only those of the prompt are told, and may be interrupted."""
        if done <= self.total:
            self._tell(done)
        if done < self.total and self.interrupted is not None and self.interrupted():
            raise KeyboardInterrupt

    def end(self) -> None:
        """Tell that all of it has been read, where that was not told yet."""
        self._tell(self.total)

    def _tell(self, done: int) -> None:
        if done > self._told and self.on_progress is not None:
            self.on_progress(done)
        self._told = max(self._told, done)


class _Ended(StoppingCriteria):
    """Stops a row as soon as ``ended`` says so of its new text."""

    def __init__(self, tokenizer: Any, prompt_tokens: int, ended: Callable[[str], bool]) -> None:
        self.tokenizer, self.prompt_tokens, self.ended = tokenizer, prompt_tokens, ended
        self.met = False

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        new = [row[self.prompt_tokens :] for row in input_ids.tolist()]
        found = [self.ended(self.tokenizer.decode(row, skip_special_tokens=True)) for row in new]
        self.met = any(found)
        return torch.tensor(found, device=input_ids.device)


class _Stop(StoppingCriteria):
    def __init__(self, wanted: Callable[[], bool]) -> None:
        self.wanted = wanted

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.wanted(), device=input_ids.device, dtype=torch.bool)


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
) -> Generation:
    """Continue ``prompt`` (all token ids, those already in ``cache`` included) by up to ``max_new_tokens``.

    Greedy at ``temperature`` 0, else sampled (``seed`` for repeatable samples). ``copies``: tokens found in the text
    that are tried as drafts at a time; None: what the cache does by itself, 0: none. ``on_text`` gets pieces of text as
    they come, ``on_progress`` the prompt tokens read so far: all of them before the first piece of text, whatever the
    cache. ``interrupted`` is asked between tokens and between chunks; ``ended`` is asked of the text so far after each
    token. Raises UsageError for a prompt that the model has no positions for, a seed or a temperature that cannot be
    meant, KeyboardInterrupt if interrupted in the prompt.
    """
    if seed is not None and seed not in SEEDS:
        raise UsageError(f"A seed is a whole number from {SEEDS.start} to {SEEDS.stop - 1}, not {seed}.")
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"A temperature is a number from 0 on, not {temperature}.")
    endless = isinstance(cache, KeepCache) and cache.positions is not None
    room = _room(model, len(prompt), endless)
    known = cache.get_seq_length()
    device = next(model.parameters()).device
    ids = torch.tensor([list(prompt)], device=device)
    reading = _Reading(len(prompt), on_progress, interrupted)
    # A cache that is not streamed reads the prompt in one go: that it was read is known by the first token.
    listener = _Listener(tokenizer, on_text, reading.end)
    criteria = StoppingCriteriaList([_Stop(interrupted)] if interrupted else [])
    ending = _Ended(tokenizer, len(prompt), ended) if ended else None
    if ending is not None:
        criteria.append(ending)
    if isinstance(cache, KeepCache):
        cache.stream.on_progress = reading.between_chunks
    if seed is not None:
        torch.manual_seed(seed)
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    )
    if ignore_eos:
        sampling["eos_token_id"] = None
    if isinstance(cache, KeepCache) and cache.round is not None:
        sampling |= {"custom_generate": verified, "listener": listener, "prompt_lookup_num_tokens": copies}
    else:
        sampling |= {"streamer": listener, "prompt_lookup_num_tokens": copies or None}
    start = time.perf_counter()
    try:
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=min(max_new_tokens, room),
            stopping_criteria=criteria,
            **sampling,
        )
    finally:
        if isinstance(cache, KeepCache):
            cache.stream.on_progress = None
    sequence = output[0].tolist()
    return _report(
        model,
        tokenizer,
        cache,
        sequence,
        len(prompt),
        known,
        start,
        listener.times,
        max_new_tokens,
        "interrupted" if interrupted and interrupted() else "ended" if ending is not None and ending.met else None,
        ignore_eos,
    )


def _room(model: Any, prompt_tokens: int, endless: bool) -> int:
    """Return how many tokens the model has positions for after the prompt; ``endless``: the cache gives it its own."""
    positions = ModelGeometry.from_config(model.config).max_positions
    if prompt_tokens == 0:
        raise UsageError("There is nothing to answer: the prompt is empty.")
    if positions is None or endless:
        return 2**31
    if prompt_tokens >= positions:
        raise UsageError(
            f"The prompt has {prompt_tokens} tokens and the model has {positions} positions; shorten the text to "
            f"at most {positions - 1} tokens or take a model with more."
        )
    return positions - prompt_tokens


def _report(
    model: Any,
    tokenizer: Any,
    cache: Cache,
    sequence: list[int],
    prompt_tokens: int,
    known: int,
    start: float,
    times: list[float],
    wanted: int,
    stopped_by: str | None,
    ignore_eos: bool,
) -> Generation:
    tokens = sequence[prompt_tokens:]
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if tokens and tokens[-1] in ends and not ignore_eos:
        stopped = "eos"
    elif stopped_by is not None:
        stopped = stopped_by
    else:
        stopped = "length" if len(tokens) >= wanted else "positions"
    prefill = times[0] - start if times else 0.0
    decode = times[-1] - times[0] if times else 0.0
    own = isinstance(cache, KeepCache)
    return Generation(
        text=tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer is not None else "",
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        stopped=stopped,
        method=cache.method.name if own else STOCK,
        exactness=str(getattr(cache, "exactness", Exactness.EXACT)),
        memory=memory_of(cache),
        timing=Timing(
            prompt_tokens - known,
            prefill,
            decode,
            (prompt_tokens - known) / prefill if prefill else 0.0,
            (len(times) - 1) / decode if decode else 0.0,
        ),
        sequence=sequence,
        rounds=cache.round.statistics if own and cache.round is not None else None,
    )
