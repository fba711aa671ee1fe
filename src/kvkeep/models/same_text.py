"""Whether transformers' ``generate`` goes on with the text that its cache has read.

``generate`` gives the model only the new tokens, so a cache cannot see that the text before them is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvkeep.errors import UsageError
from kvkeep.models.forward import Hooks, Reading

PREPARE = "prepare_inputs_for_generation"
"""The method that transformers' ``generate`` calls before each pass with the whole text. Passes get only the new
tokens."""
_DROPS_CACHES = ("phi3", "phi4_multimodal", "phimoe")
"""Families whose ``generate`` drops the cache when a text outgrows the model's first rotary frequencies, and reads the
whole text again without a budget."""
GOES_ON = "Call reset() before another text, or use one cache for each text."


def prepare(model: Any, method: Callable[..., Any], input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    """Compare the text that ``generate`` begins with to the text that its cache has read. method: the model's
    own."""
    hooks: Hooks | None = getattr(kwargs.get("cache"), "hooks", None)
    cache: Reading | None = None if hooks is None else hooks.single
    if cache is not None and isinstance(input_ids, Tensor) and input_ids.ndim == 2:
        begins, cut = kwargs.get("is_first_iteration"), kwargs.get("next_sequence_length")
        vectors = kwargs.get("inputs_embeds")
        if begins and cache.length:
            check_text(cache, input_ids, cut, input_ids.shape[1] if vectors is None else vectors.shape[1])
        if begins and cache.length and cut is None:  # the input is only the new tokens
            cache.record.note_text(None)
        elif input_ids.shape[1] > cache.length and cache.rows in (0, len(input_ids)):  # otherwise the pass is refused
            cache.record.note_text(digest_text(input_ids, None if begins else cache.record.text))
    if cache is not None and model.config.model_type in _DROPS_CACHES:  # uses the function of other families
        method = getattr(super(next(one for one in type(model).__mro__ if PREPARE in vars(one)), model), PREPARE)
    return method(input_ids, *args, **kwargs)


def check_text(cache: Reading, ids: Tensor, cut: int | None, given: int) -> None:
    """Raise UsageError if ``generate`` begins with a text that ``cache`` has not read. cut: the number of tokens that
    transformers regards as new; None if it passes all of them. given: the number of tokens of the text, whose ids may
    be unknown."""
    read, text, length = cache.length, cache.record.text, ids.shape[1]
    if cut is not None and cut <= 0:
        raise UsageError(f"The cache already holds {read} tokens, and this text has {given}. {GOES_ON}")
    if text is None or text[0] != read or len(text[1]) != len(ids) or length < read:
        return
    same = text == digest_text(ids[:, :read])
    if cut is not None and not same:
        raise UsageError(f"The cache already holds {read} tokens of another text. {GOES_ON}")
    if cut is None and same:
        raise UsageError(
            f"The cache already holds the first {read} tokens, and transformers' assisted decoding would read them "
            "again; call reset() first."
        )


def digest_text(ids: Tensor, known: tuple[int, list[int]] | None = None) -> tuple[int, list[int]]:
    """Return the number of tokens, and a digest of each row of ``ids``; another text has the same digest with
    probability 2**-64. known: the result for the first tokens, which are then skipped. ``generate`` waits for the
    device at every token anyway."""
    length = ids.shape[1]
    start, before = known or (0, [0] * len(ids))
    mixed = ids[:, start:].long() * 0x1E3779B97F4A7C15
    mixed += torch.arange(start, length, device=ids.device) * 0x2545F4914F6CDD1D
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    added = (mixed ^ (mixed >> 32)).sum(1).tolist()
    return length, [(old + new) % 2**64 for old, new in zip(before, added, strict=True)]
