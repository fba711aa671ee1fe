"""Asks before the model reads for minutes: after the first of them, Ctrl-C would throw the time away."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from kvkeep.cache import KeepCache
from kvkeep.cli.chat.state import Chat
from kvkeep.decode.cached_text import common_prefix
from kvkeep.decode.generate import Generation

LONG_S = 60.0
"""The chat asks before it reads for more than this many estimated seconds."""
SAMPLE_TOKENS = 128
"""The minimum number of tokens whose reading says how fast the model reads."""
YES = ("y", "yes")


def agreed(chat: Chat, prompt: Sequence[int]) -> bool:
    """Show how long the model will read before it answers ``prompt``, if that is long, and return whether to read it.
    Without a terminal no question is asked, because the next line is the next message."""
    shared = common_prefix(chat.talk.ids, prompt[:-1])
    tokens = len(prompt) - shared
    if tokens < 2 * SAMPLE_TOKENS:
        return True
    rate = chat.read_per_s or _measured(chat, prompt[:SAMPLE_TOKENS])
    if tokens < LONG_S * rate:
        return True
    takes = f"Reading {tokens:,} tokens takes at least {_duration(tokens / rate)}"
    if not chat.screen.interactive:
        chat.screen.note(f"{takes}.")
        return True
    chat.screen.note(f"{takes}; 'y' reads them, anything else does not:")
    with suppress(KeyboardInterrupt), chat.signals.exit_at_once():
        if chat.screen.ask().strip().lower() in YES:
            return True
    chat.screen.note(
        "Nothing was read. For one question about a long file, 'kvkeep generate --file FILE --excerpts 2048 --prompt "
        "QUESTION' reads only the passages that have the words of the question."
    )
    return False


def learn(chat: Chat, answered: Generation) -> None:
    """Remember how fast the prompt of an answer was read, if it was long enough to tell."""
    if answered.timing.prefill_tokens >= SAMPLE_TOKENS:
        chat.read_per_s = answered.timing.prefill_tokens_per_s


def _measured(chat: Chat, ids: Sequence[int]) -> float:
    """Return the tokens per second at which the model reads ``ids`` alone; a long text takes longer for each."""
    model = chat.talk.model
    with torch.inference_mode():
        start = time.perf_counter()
        model(torch.tensor([[*ids]], device=model.device), cache=KeepCache(model))
        chat.read_per_s = len(ids) / (time.perf_counter() - start)
    return chat.read_per_s


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} minute{'' if minutes == 1 else 's'}" if minutes < 100 else f"{round(minutes / 60)} hours"
