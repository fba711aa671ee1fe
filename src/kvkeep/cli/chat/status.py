"""What a chat says of an answer in one line: what the cache holds, how fast it was, why it is empty or cut."""

from __future__ import annotations

from typing import Any

import torch

from kvkeep.cache import KeepCache
from kvkeep.contracts.entries import EntryState
from kvkeep.contracts.exactness import Exactness
from kvkeep.decode.generate import Generation
from kvkeep.units import size

_BECAME = {
    EntryState.CHECKPOINTED: "stored",
    EntryState.QUANTISED: "in fewer bits",
    EntryState.MERGED: "merged",
    EntryState.SKETCHED: "in a sketch",
    EntryState.DROPPED: "dropped",
}


def status(cache: Any, result: Generation) -> str:
    """Return the line after an answer: "kept 57 of 256 tokens, all of it exact, 3.1 MB + 12.0 MB on disk, 41
    tokens/s"."""
    parts = [kept(cache), held(result)]
    if rate := result.timing.decode_tokens_per_s:
        parts.append(f"{rate:.0f} tokens/s" if rate >= 10 else f"{rate:.1f} tokens/s")
    return ", ".join(parts)


def kept(cache: Any) -> str:
    """Return how many tokens are resident, on average over layers and heads, and what became of the others."""
    length, exact = cache.get_seq_length(), True
    shares = {EntryState.RESIDENT: 1.0}
    if isinstance(cache, KeepCache):
        shares, exact = _shares(cache), cache.exactness is Exactness.EXACT
    counts = {state: round(share * length) for state, share in shares.items()}
    resident = counts.pop(EntryState.RESIDENT, 0)
    if resident == length:
        return f"kept all {length} tokens" + (", exact" if exact else "")
    line = f"kept {resident} of {length} tokens"
    if exact:
        return f"{line}, all of it exact"
    others = [(count, _BECAME[state]) for state, count in sorted(counts.items()) if count]
    if len(others) == 1:
        return f"{line}, the others {others[0][1]}"
    return ", ".join([line, *(f"{count} {became}" for count, became in others)])


def _shares(cache: KeepCache) -> dict[EntryState, float]:
    """Return the share of entries in each state, over all layers of full attention, or all where there are none."""
    layers = cache.geometry.full_layers or cache.geometry.layers
    states = cache.entry_states()
    counts = torch.zeros(len(EntryState), dtype=torch.int64)
    for layer in layers:
        counts += torch.bincount(states[layer.index].flatten().long(), minlength=len(EntryState))
    total = max(int(counts.sum()), 1)
    return {state: int(counts[state]) / total for state in EntryState}


def held(result: Generation) -> str:
    """Return the bytes beside the model, and those of checkpoints in other places."""
    memory = result.memory
    own = memory.resident_bytes + memory.compressed_bytes + memory.checkpoint_bytes["device"]
    places = {place: count for place, count in memory.checkpoint_bytes.items() if count and place != "device"}
    return " + ".join([size(own), *(f"{size(count)} on {place}" for place, count in places.items())])


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
