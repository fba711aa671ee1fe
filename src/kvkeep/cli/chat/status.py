"""The line after an answer: the state of the cache, the speed, and the reason if the answer is empty or cut."""

from __future__ import annotations

from typing import Any

from kvkeep.cache import KeepCache
from kvkeep.contracts.entries import EntryState
from kvkeep.contracts.exactness import Exactness
from kvkeep.decode.generate import Generation
from kvkeep.units import size


def status(cache: Any, result: Generation) -> str:
    """Return the line after an answer: "exact: 57 tokens in memory (3.1 MB), 199 on disk (12.0 MB), 41 tokens/s". The
    numbers of tokens are means over layers and heads."""
    length, memory, away, dropped, exact = cache.get_seq_length(), result.memory, 0, 0, "exact: "
    spec = cache.spec if isinstance(cache, KeepCache) else None
    if isinstance(cache, KeepCache):
        away = 0 if spec is None else _count(cache, EntryState.CHECKPOINTED)
        dropped = _count(cache, EntryState.DROPPED)
        if cache.exactness is not Exactness.EXACT:
            exact = "" if cache.exact_part is None else f"exact up to {cache.exact_part:,} tokens: "
    here, stored = length - away - dropped, 0 if spec is None else memory.checkpoint_bytes[spec.where]
    beside = 0 if spec is not None and spec.where == "device" else memory.checkpoint_bytes["device"]
    tokens = f"{'all ' if here == length else ''}{here:,} token{'' if here == 1 else 's'}"
    parts = [f"{exact}{tokens} in memory ({size(memory.resident_bytes + memory.compressed_bytes + beside)})"]
    if spec is not None and (away or stored):
        parts.append(f"{away:,} on {spec.where} ({size(stored)})" if away else f"{size(stored)} on {spec.where}")
    parts += [f"{dropped:,} dropped"] if dropped else []
    rate = result.timing.decode_tokens_per_s
    return ", ".join([*parts, f"{rate:.0f} tokens/s" if rate >= 10 else f"{rate:.1f} tokens/s"])


def _count(cache: KeepCache, state: EntryState) -> int:
    """Return the mean number of tokens in a state, over the layers of full attention, or over all layers if there are
    none."""
    layers = cache.geometry.full_layers or cache.geometry.layers
    states = cache.entry_states()
    shares = [(states[layer.index] == state).float().mean().item() for layer in layers]
    return round(cache.get_seq_length() * sum(shares) / max(len(shares), 1))


def remark(result: Generation, positions: int | None) -> str | None:
    """Return a sentence on an answer that is empty or was cut, else None."""
    if not result.text.strip():
        if result.stopped == "interrupted":
            return "Stopped before the first word; /continue resumes it, and /undo forgets the question."
        return "The model's answer is empty; /retry samples another one, and /undo forgets the question."
    return {
        "length": f"Cut off after {len(result.tokens)} tokens (--max-tokens); /continue resumes it.",
        "positions": f"Cut off: the model's context of {positions or 0:,} tokens is full; /context shows how to "
        "continue.",
        "interrupted": "Stopped; /continue resumes it.",
    }.get(result.stopped)
