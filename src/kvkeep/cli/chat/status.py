"""The line after an answer: the state of the cache, the speed, and the reason if the answer is empty or cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvkeep.cache import KeepCache
from kvkeep.contracts.entries import EntryState
from kvkeep.contracts.exactness import Exactness
from kvkeep.decode.generate import Generation
from kvkeep.memory.meter import Memory
from kvkeep.stores.checkpoints.spec import CheckpointSpec
from kvkeep.units import size

_FORMS = {
    EntryState.CHECKPOINTED: "in segments",  # for a method without a checkpoint
    EntryState.QUANTISED: "in fewer bits",
    EntryState.MERGED: "merged",
    EntryState.SKETCHED: "in a sketch",
}
"""Other forms of entries in memory."""


def status(cache: Any, result: Generation) -> str:
    """Return the line after an answer: "exact: 57 tokens in memory (3.1 MB), 199 on disk (12.0 MB), 41 tokens/s"."""
    parts = places(cache, result.memory)
    if rate := result.timing.decode_tokens_per_s:
        parts.append(f"{rate:.0f} tokens/s" if rate >= 10 else f"{rate:.1f} tokens/s")
    return ", ".join(parts)


def places(cache: Any, memory: Memory) -> list[str]:
    """Return the mean number of tokens in memory over layers and heads, the place or source of the other tokens, and
    the number of dropped tokens, with bytes."""
    length, exact, spec = cache.get_seq_length(), "exact: ", None
    counts = {EntryState.RESIDENT: length}
    if isinstance(cache, KeepCache):
        counts, exact, spec = _counts(cache, length), _exact(cache), cache.spec
    resident, dropped = counts.pop(EntryState.RESIDENT, 0), counts.pop(EntryState.DROPPED, 0)
    away = counts.pop(EntryState.CHECKPOINTED, 0) if spec is not None else 0
    tokens = f"{'all ' if resident == length else ''}{resident:,} token{'' if resident == 1 else 's'}"
    here = " and ".join([tokens, *(f"{count:,} {_FORMS[state]}" for state, count in counts.items())])
    bytes_here, stored = memory.resident_bytes + memory.compressed_bytes + memory.checkpoint_bytes["device"], 0
    if spec is not None and spec.kind != "tokens":  # a checkpoint of kind "tokens" has only ids
        stored = memory.checkpoint_bytes[spec.where]
        bytes_here -= stored if spec.where == "device" else 0
    parts = [f"{exact}{here} in memory ({size(bytes_here)})"]
    if isinstance(cache, KeepCache) and cache.exact_part is not None:
        parts.append(f"{size(memory.bookkeeping_bytes)} of recalled blocks and bookkeeping")
    if away and spec is not None:
        parts.append(f"{away:,} {_source(spec, stored)}")
    elif stored and spec is not None:
        parts.append(f"{size(stored)} on {spec.where}")
    return parts + ([f"{dropped:,} dropped"] if dropped else [])


def _exact(cache: KeepCache) -> str:
    """Return the beginning of the line: whether the cache is exact, or up to how many tokens it was."""
    if cache.exactness is Exactness.EXACT:
        return "exact: "
    return "" if cache.exact_part is None else f"exact up to {cache.exact_part:,} tokens: "


class Passed(NamedTuple):
    """What a cache has come to."""

    tokens: int
    lost: int
    """Tokens whose entries were discarded from a full checkpoint."""

    @classmethod
    def of(cls, cache: Any) -> Passed:
        """Return it for any cache."""
        return cls(cache.get_seq_length(), cache.lost_tokens if isinstance(cache, KeepCache) else 0)


def limits_passed(cache: Any, before: Passed) -> list[str]:
    """Return a sentence for each limit that the cache has passed since ``before``: the tokens that it attends to
    exactly, and the capacity of its checkpoint."""
    if not isinstance(cache, KeepCache):
        return []
    now, exact, sentences = Passed.of(cache), cache.exact_tokens, []
    if exact is not None and before.tokens <= exact < now.tokens:
        sentences.append(
            "From here on answers are not exact: a step attends to the newest tokens and to recalled parts of the "
            f"older ones, because the conversation has more than {exact:,} tokens."
        )
    if now.lost and not before.lost:
        sentences.append(
            f"The checkpoint is full ({cache.request.capacity:,} tokens, --capacity): from here on its oldest entries "
            "are dropped, and no longer recalled."
        )
    return sentences


def _source(spec: CheckpointSpec, count: int) -> str:
    """Return the place of ``count`` bytes of evicted entries, or the source that they are rebuilt from."""
    if spec.kind == "tokens":
        return "from token ids"
    return f"on {spec.where} ({size(count)})" if spec.kind == "kv" else f"from {size(count)} on {spec.where}"


def _counts(cache: KeepCache, length: int) -> dict[EntryState, int]:
    """Return the mean number of ``length`` tokens in each state, without states that are empty."""
    counts = {state: round(share * length) for state, share in _shares(cache).items()}
    counts[max(counts, key=lambda state: counts[state])] += length - sum(counts.values())
    return {state: count for state, count in counts.items() if count}


def _shares(cache: KeepCache) -> dict[EntryState, float]:
    """Return the share of entries in each state, over the layers of full attention, or over all layers if there are
    none."""
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
            why = "the first token was the end of the answer" if len(result.tokens) < 2 else "it has only blanks"
            return f"The model's answer is empty: {why}; /retry samples another one, and /undo forgets the question."
        if result.stopped == "interrupted":
            return "Stopped before the first word; /continue resumes it, and /undo forgets the question."
        return "The answer has no visible text; /retry samples another one, and /undo forgets the question."
    if result.stopped == "length":
        return f"Cut off after {len(result.tokens)} tokens (--max-tokens); /continue resumes it."
    if result.stopped == "positions":
        return f"Cut off: the model's context of {positions:,} tokens is full; /context shows how to continue."
    if result.stopped == "interrupted":
        return "Stopped; /continue resumes it."
    return None
