"""Generation with any cache, with timings and measured memory: a scheduler with one answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode

from kvkeep.cache import KeepCache
from kvkeep.contracts.exactness import Exactness
from kvkeep.engine.answer import Answer, Ask, Scheduler, end_ids
from kvkeep.engine.sampling import SMALLEST, Sampler
from kvkeep.errors import UsageError, naming_memory
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.meter import Memory
from kvkeep.models.same_text import check_text, digest_text
from kvkeep.policies.names import STOCK
from kvkeep.stock import memory_of

SEEDS = range(-(2**63), 2**64)
"""Seeds that torch accepts."""
MODES = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION
"""The modes of transformers that generate one text token by token. Drafts do not change it."""


@dataclass(frozen=True)
class Timing:
    """Seconds and tokens per second of prefill and decoding. The first new token counts as prefill."""

    prefill_tokens: int
    """Prompt tokens that the cache did not hold."""
    prefill_s: float
    decode_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    reconstruction_s: float = 0.0
    """Seconds of reading the text a second time to choose the resident entries. They are part of the prefill, or of
    decoding if the text exceeded the budget then."""


@dataclass(frozen=True)
class Generation:
    """An answer with its memory and timing."""

    text: str
    tokens: list[int]
    """New token ids."""
    prompt_tokens: int
    stopped: str
    """"eos", "length", "positions" (the model has no more), "ended" (a stopping criterion) or "interrupted"."""
    method: str
    exactness: str
    memory: Memory
    timing: Timing
    sequence: list[int] = field(repr=False)
    exact_tokens: int | None = None
    """The number of tokens up to which the text is exact, where it is longer; None: the class holds for all of it."""
    lost_tokens: int = 0
    """The number of tokens whose entries a checkpoint of limited capacity has discarded."""
    drafted: int = 0
    """The number of drafts that passes read beside the answer's tokens (:mod:`kvkeep.engine.drafts`)."""
    accepted: int = 0
    """The number of them that were right."""


@dataclass(eq=False)
class _Caller:
    """The callbacks of :func:`generate`'s caller."""

    prompt: list[int]
    on_progress: Callable[[int], None] | None
    interrupted: Callable[[], bool]
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    """Stopping criteria of the model's generation_config."""
    _reported: int = 0

    def progress(self, done: int) -> None:
        """Report ``done`` prompt tokens, each number once. Raises KeyboardInterrupt if interrupted before the last
        token."""
        if self._reported < done <= len(self.prompt):
            self._reported = done
            if self.on_progress is not None:
                self.on_progress(done)
        if done < len(self.prompt) and self.interrupted():
            raise KeyboardInterrupt

    def check(self, tokens: Sequence[int]) -> str:
        """Return the reason why an answer ends with ``tokens``; an empty string if it continues."""
        if self.interrupted():
            return "interrupted"
        ended = self.criteria and bool(self.criteria(torch.tensor([[*self.prompt, *tokens]]), None))
        return "ended" if ended else ""


def room_after(
    count: int, positions: int | None, remedy: str = "continue past them with KeepCache(model, 'endless', 1024)"
) -> int:
    """Return the number of tokens that fit after ``count`` prompt tokens within ``positions`` (None: no limit). Raises
    UsageError if none fits; ``remedy`` says what to do then."""
    if positions is None:
        return 2**31
    if count >= positions:
        raise UsageError(
            f"The prompt has {count} tokens, but the model has {positions} positions; {remedy}, shorten the text to at "
            f"most {positions - 1} tokens, or use a model with more positions."
        )
    return positions - count


def positions_of(model: Any, cache: Cache) -> int | None:
    """Return the number of tokens that the model can read and generate with this cache; None: no limit."""
    if isinstance(cache, KeepCache) and cache.method.any_length:
        return None  # the cache limits its positions
    return ModelGeometry.from_config(model.config).max_positions


@naming_memory("an answer")
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
    ignore_eos: bool = False,
    temperature: float = 0.0,
    seed: int | None = None,
    settings: Mapping[str, float] = MappingProxyType({}),
) -> Generation:
    """Continue ``prompt`` (all token ids, including those in ``cache``) by up to ``max_new_tokens``.

    The text of the answer continues that of the prompt: after "The capital is" it is " Paris". At the beginning of a
    text, and after a special token, it does not have the space that sentencepiece's tokenizers put there. The model's
    generation_config holds as in transformers. Its ``prompt_lookup_num_tokens=0`` disables :mod:`drafts
    <kvkeep.engine.drafts>`, which change no token.

    Args:
        on_text: receives pieces of text as they are decoded.
        on_progress: receives the number of prompt tokens read; all are reported before the first piece of text.
        interrupted: called between chunks and between tokens; True stops.
        ignore_eos: continue after the end-of-sequence token.
        temperature: 0 is greedy; above, tokens are sampled.
        seed: makes samples repeatable.
        settings: other settings of sampling (top_k, top_p, min_p, repetition_penalty) in place of the model's own.

    Raises:
        UsageError: the prompt is empty or exceeds the model's positions, a number is out of range, or the model's
            generation_config asks for beams or another search.
        KeyboardInterrupt: interrupted while the prompt is read.
    """
    _check(prompt, temperature, seed, max_new_tokens)
    vocabulary = ModelGeometry.from_config(model.config).vocab_size
    if wrong := [token for token in prompt if not 0 <= token < vocabulary]:
        raise UsageError(f"The prompt contains the token id {wrong[0]}, but the model's ids are 0 to {vocabulary - 1}.")
    _check_mode(model, bool(temperature))
    limit = min(max_new_tokens, room_after(len(prompt), positions_of(model, cache)))
    options: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    options |= {name: one for name, one in settings.items() if temperature or name == "repetition_penalty"}
    if ignore_eos:
        options["eos_token_id"] = None
    if seed is not None:
        torch.manual_seed(seed)
    caller = _Caller(list(prompt), on_progress, interrupted or (lambda: False))
    start, known, reread_s = time.perf_counter(), cache.get_seq_length(), _reconstruction_s(cache)
    ids = torch.tensor([caller.prompt], device=next(model.parameters()).device)
    call = {"attention_mask": torch.ones_like(ids), "cache": cache, "max_new_tokens": limit, **options}
    answer = Answer(
        _request(model, ids, caller, limit, call),
        cache,
        tokenizer,
        [] if ignore_eos else end_ids(model),
        None if tokenizer is None else lambda piece: None if on_text is None else on_text(piece.text),
        caller.check,
    )
    _schedule(model, answer, caller)
    tokens = answer.tokens
    timing = _timing(len(prompt) - known, start, answer, _reconstruction_s(cache) - reread_s)
    cut = "length" if len(tokens) >= max_new_tokens else "positions"
    stopped = cut if answer.reason == "length" else answer.reason
    return _generation(caller, answer, stopped, timing)


def _check(prompt: Sequence[int], temperature: float, seed: int | None, max_new_tokens: int) -> None:
    """Raise UsageError for arguments that :func:`generate` does not accept."""
    if seed is not None and (not _is_whole(seed) or seed not in SEEDS):
        raise UsageError(f"A seed is a whole number from {SEEDS.start} to {SEEDS.stop - 1}, not {seed}.")
    if isinstance(prompt, str):
        raise UsageError("A prompt is a list of token ids; encode a text first, as tokenizer(text).input_ids.")
    if not isinstance(temperature, Real) or not 0 <= temperature < float("inf"):
        raise UsageError(f"A temperature is a number of at least 0, not {temperature}.")
    if 0 < temperature < SMALLEST:  # the logits divided by it are not finite
        raise UsageError(f"A temperature above 0 is at least {SMALLEST:g}, not {temperature}; 0 is greedy.")
    if not len(prompt):
        raise UsageError("There is nothing to answer: the prompt is empty.")
    if not _is_whole(max_new_tokens) or max_new_tokens < 1:
        raise UsageError(f"'max_new_tokens' is a whole number of at least 1, not {max_new_tokens!r}.")


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_mode(model: Any, sampled: bool) -> None:
    """Raise UsageError if the model's generation_config asks for beams or another search."""
    config = copy(model.generation_config)
    config.do_sample = sampled
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise UsageError(
            f"The model's generation_config asks for {mode.value.replace('_', ' ')}, and an answer is greedy or "
            "sampled; change model.generation_config, or call model.generate(cache=...)."
        )


def _generation(caller: _Caller, answer: Answer, stopped: str, timing: Timing) -> Generation:
    cache: Cache = answer.cache
    bounded = cache if isinstance(cache, KeepCache) else None
    exactness = Exactness.EXACT if bounded is None else bounded.exactness
    return Generation(
        text=answer.text,
        tokens=answer.tokens,
        prompt_tokens=len(caller.prompt),
        stopped=stopped,
        method=STOCK if bounded is None else bounded.method.name,
        exactness=str(exactness),
        exact_tokens=None if bounded is None else bounded.exact_part,
        lost_tokens=0 if bounded is None else bounded.lost_tokens,
        memory=memory_of(cache),
        timing=timing,
        sequence=[*caller.prompt, *answer.tokens],
        drafted=answer.drafted,
        accepted=answer.accepted,
    )


def _request(model: Any, ids: Tensor, caller: _Caller, limit: int, call: dict[str, Any]) -> Ask:
    """Return the request for an answer of at most ``limit`` tokens, as a ``call`` of transformers' ``generate`` and the
    model's generation_config ask for it. Raises UsageError if the cache has read another text, or if the prompt is too
    long for it."""
    if isinstance(call["cache"], KeepCache):
        stream = call["cache"].stream
        if stream.length:
            check_text(stream, ids, ids.shape[1] - stream.length, ids.shape[1])
        stream.admit(ids.shape[1] - stream.length)

    def prepare(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **others: Any,
    ) -> Ask:
        known = MaxLengthCriteria, EosTokenCriteria  # the answer checks these itself
        caller.criteria.extend(one for one in stopping_criteria if not isinstance(one, known))
        sampler = Sampler(logits_processor, generation_config.do_sample)
        return Ask(caller.prompt, limit, sampler)

    ask: Ask = model.generate(ids, custom_generate=prepare, **call)
    return ask


def _schedule(model: Any, answer: Answer, caller: _Caller) -> None:
    """Run a scheduler until the answer is complete."""
    scheduler, cache, complete = Scheduler(model, packed=False), answer.cache, False
    scheduled = scheduler.add(answer)
    try:
        while not complete:
            for result in scheduler.step():
                if not isinstance(result.logits, Exception):
                    caller.progress(cache.get_seq_length())
                complete = scheduled.give(result.logits)
    finally:
        scheduler.remove(scheduled)
        if isinstance(cache, KeepCache):
            read = [*caller.prompt, *answer.tokens][: cache.get_seq_length()]
            cache.stream.record.note_text(digest_text(torch.tensor([read])) if read else None)


def _timing(fresh: int, start: float, answer: Answer, reconstruction_s: float) -> Timing:
    """Return the timing of an answer. fresh: prompt tokens that were read; start: the time when reading began."""
    prefill, decode = answer.first_at - start, answer.last_at - answer.first_at
    rates = fresh / prefill, (len(answer.tokens) - 1) / decode if decode else 0.0
    return Timing(fresh, prefill, decode, *rates, reconstruction_s)


def _reconstruction_s(cache: Cache) -> float:
    """Return the seconds so far of reading a cache's text again."""
    return cache.meter.reconstruction_s if isinstance(cache, KeepCache) else 0.0
