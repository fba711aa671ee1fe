"""What a chat says of an answer in one line: what the cache holds, how fast it was, why it is empty or cut."""

from __future__ import annotations

from typing import Any

import torch

from kvkeep.cache import KeepCache
from kvkeep.contracts.entries import EntryState
from kvkeep.contracts.exactness import Exactness
from kvkeep.decode.generate import Generation
from kvkeep.memory.meter import Memory
from kvkeep.stores.checkpoints.spec import CheckpointSpec
from kvkeep.units import size

_BECAME = {
    EntryState.CHECKPOINTED: "in segments",  # of a method that has no checkpoint
    EntryState.QUANTISED: "in fewer bits",
    EntryState.MERGED: "merged",
    EntryState.SKETCHED: "in a sketch",
}
"""What entries became that are in memory in another form."""


def status(cache: Any, result: Generation) -> str:
    """Return the line after an answer: "exact: 57 tokens in memory (3.1 MB), 199 on disk (12.0 MB), 41 tokens/s"."""
    parts = kept(cache, result.memory)
    if rate := result.timing.decode_tokens_per_s:
        parts.append(f"{rate:.0f} tokens/s" if rate >= 10 else f"{rate:.1f} tokens/s")
    return ", ".join(parts)


def kept(cache: Any, memory: Memory) -> list[str]:
    """Return what of the tokens is in memory, on average over layers and heads, where the others are or what they are
    rebuilt from, and how many were dropped, with the bytes."""
    length, exact, spec = cache.get_seq_length(), True, None
    counts = {EntryState.RESIDENT: length}
    if isinstance(cache, KeepCache):
        counts, exact, spec = _counts(cache, length), cache.exactness is Exactness.EXACT, cache.spec
    resident, dropped = counts.pop(EntryState.RESIDENT, 0), counts.pop(EntryState.DROPPED, 0)
    away = counts.pop(EntryState.CHECKPOINTED, 0) if spec is not None else 0
    tokens = f"{'all ' if resident == length else ''}{resident:,} token{'' if resident == 1 else 's'}"
    here = " and ".join([tokens, *(f"{count:,} {_BECAME[state]}" for state, count in counts.items())])
    own, stored = memory.resident_bytes + memory.compressed_bytes + memory.checkpoint_bytes["device"], 0
    if spec is not None and spec.kind != "tokens":  # of which a checkpoint has the ids alone, on the device
        stored = memory.checkpoint_bytes[spec.where]
        own -= stored if spec.where == "device" else 0
    parts = [f"{'exact: ' if exact else ''}{here} in memory ({size(own)})"]
    if away and spec is not None:
        parts.append(f"{away:,} {_source(spec, stored)}")
    elif stored and spec is not None:
        parts.append(f"{size(stored)} on {spec.where}")
    return parts + ([f"{dropped:,} dropped"] if dropped else [])


def _source(spec: CheckpointSpec, count: int) -> str:
    """Return where evicted entries are, or what they are rebuilt from, of so many bytes."""
    if spec.kind == "tokens":
        return "from token ids"
    return f"on {spec.where} ({size(count)})" if spec.kind == "kv" else f"from {size(count)} on {spec.where}"


def _counts(cache: KeepCache, length: int) -> dict[EntryState, int]:
    """Return how many of ``length`` tokens are in each state that has any, on average."""
    counts = {state: round(share * length) for state, share in _shares(cache).items()}
    counts[max(counts, key=lambda state: counts[state])] += length - sum(counts.values())
    return {state: count for state, count in counts.items() if count}


def _shares(cache: KeepCache) -> dict[EntryState, float]:
    """Return the share of entries in each state, over all layers of full attention, or all where there are none."""
    layers = cache.geometry.full_layers or cache.geometry.layers
    states = cache.entry_states()
    counts = torch.zeros(len(EntryState), dtype=torch.int64)
    for layer in layers:
        counts += torch.bincount(states[layer.index].flatten().long(), minlength=len(EntryState))
    total = max(int(counts.sum()), 1)
    return {state: int(counts[state]) / total for state in EntryState}


def remark(result: Generation, positions: int | None) -> str | None:
    """Return a sentence on an answer that is empty or was cut, else None."""
    if not result.text.strip():
        if result.stopped == "eos":
            why = (
                "the first token that it chose was the one that ends an answer"
                if len(result.tokens) < 2
                else ("it wrote nothing but blanks and then ended the answer")
            )
            return f"The model's answer is empty: {why}; /retry samples another one, and /undo forgets the question."
        if result.stopped == "interrupted":
            return "Stopped before the first word; /continue goes on, and /undo forgets the question."
        return (
            "What the model wrote has no visible text; /retry samples another answer, and /undo forgets the question."
        )
    if result.stopped == "length":
        return f"Cut after {len(result.tokens)} tokens (--max-tokens); /continue goes on."
    if result.stopped == "positions":
        return f"Cut: all {positions:,} positions of the model are used; /window says how it can go on."
    if result.stopped == "interrupted":
        return "Stopped; /continue goes on."
    return None
