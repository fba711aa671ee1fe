"""One forward pass for many sessions: their new tokens packed into one row, attention by each session's own cache.

Weights are read once for all of them. Everything but attention treats tokens one by one, and attention goes by sessions
(:mod:`kvkeep.hooks`). Where products do not depend on the number of rows, as with the native library in bfloat16,
logits are those of each session alone to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvkeep.cache import KeepCache
from kvkeep.errors import KvkeepError
from kvkeep.hooks import ForwardHooks, NoSessionLeft, SessionPass
from kvkeep.models.adapter import decoder_of
from kvkeep.models.binding import bind

CHUNK = 512
"""Tokens of a prompt read in a pass where the method itself sets no limit and does not mind."""
PART = 128
"""Those beside sessions that write, which wait for them: in fewer, a token of a prompt costs more."""


@dataclass(eq=False)
class Read:
    """Tokens that a session's model is to read next, after all that its cache holds.

    ids: their ids. keep: of how many of the last ones logits are wanted. cut: more of the same text follows. first: the
    position of the first one, by default the cache's next.
    """

    cache: KeepCache
    ids: Sequence[int]
    keep: int = 1
    cut: bool = False
    first: int | None = None


class Batch(Cache):
    """The caches of some reads as the one cache of a row in which their tokens follow one another."""

    def __init__(self, reads: Sequence[Read]) -> None:
        super().__init__(layers=[])
        self.sessions, start = [], 0
        for read in reads:
            span = slice(start, start := start + len(read.ids))
            self.sessions.append(SessionPass(read.cache.stream, read.cache, span, read.first, read.cut))
        self.geometry = reads[0].cache.geometry
        self.hooks = ForwardHooks(self.sessions, self.geometry, packed=True)

    @property
    def is_sliding(self) -> list[bool]:
        """By layer, as masks are chosen by it."""
        return [layer.kind == "sliding" for layer in self.geometry.layers]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: every token of the row has a position of its own."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return that masks cover the row alone; none is used."""
        return query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Give each session its keys and values, (1, kv_heads, row, dim) of all."""
        self.hooks.update(layer_idx, key_states, value_states)
        return key_states, value_states


def packs(cache: KeepCache) -> bool:
    """Return whether a cache's tokens can be packed into a row with others': not where it runs the model itself, or
    where layers have a state that is not keys and values."""
    again = cache.checkpoint is not None and cache.checkpoint.replays
    return not (again or cache.stream.pass_hooks) and not cache.geometry.other_layers


@torch.no_grad()
def forward(model: Any, reads: Sequence[Read]) -> list[Tensor | Exception]:
    """Run the model once over all ``reads``, and return of each the logits (keep, vocabulary) of its last tokens, or
    what it failed by: then its cache is as it was before. Where the model itself fails for want of memory, or by some
    other RuntimeError, so does each. Raises what else it raises, and torch.AcceleratorError: a device is lost."""
    bind(model)
    batch = Batch(reads)
    ids = torch.tensor([[one for read in reads for one in read.ids]], device=next(model.parameters()).device)
    pairs = list(zip(batch.sessions, reads, strict=True))
    kept = [number for one, read in pairs for number in range(one.span.stop - read.keep, one.span.stop)]
    rows = torch.tensor(kept or [0], device=ids.device)
    try:
        logits = model(input_ids=ids, past_key_values=batch, use_cache=True, logits_to_keep=rows).logits[0]
    except NoSessionLeft:
        return [session.error or RuntimeError("no attention") for session in batch.sessions]
    except torch.AcceleratorError:
        raise
    except (MemoryError, RuntimeError) as error:
        batch.hooks.abandon()
        return [session.error or _of_all(error, len(reads)) for session in batch.sessions]
    parts = logits[: len(kept)].split([read.keep for read in reads])
    return [part if one.error is None else one.error for one, part in zip(batch.sessions, parts, strict=True)]


def _of_all(error: Exception, sessions: int) -> KvkeepError:
    """Return the error for each of the ``sessions`` whose common pass ended with ``error``."""
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate" in str(error)
    why = "there was not enough memory" if short else type(error).__name__  # its words may be those of a prompt
    shared = KvkeepError(
        f"The answer failed: the step that processed {sessions} sessions at once failed ({why}); retry."
    )
    shared.__cause__ = error
    return shared


@torch.no_grad()
def forward_one(model: Any, read: Read) -> Tensor | Exception:
    """Run the model over one read by itself; the same as :func:`forward` of it, whatever it fails by. Raises
    torch.AcceleratorError alone."""
    cache, ids = read.cache, torch.tensor([[*read.ids]], device=next(model.parameters()).device)
    first = cache.get_seq_length() if read.first is None else read.first
    positions = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
    given = {"input_ids": ids, "position_ids": positions, "past_key_values": cache, "use_cache": True}
    cache.stream.cut = read.cut
    try:
        if not read.keep and (decoder := decoder_of(model)) is model.base_model:
            decoder(**given)
            return positions.new_empty(0)
        logits: Tensor = model(**given, logits_to_keep=max(1, read.keep)).logits[0]
        return logits
    except torch.AcceleratorError:
        raise
    except Exception as error:
        return error
    finally:
        cache.stream.cut = False


def chunk_of(cache: KeepCache) -> int:
    """Return how many tokens of a prompt a cache is given in one pass."""
    chunk: int = cache.stream.chunk
    free = chunk > CHUNK and cache.method.exactness == "exact" and not cache.method.oneshot
    return CHUNK if free else chunk


def part_of(cache: KeepCache) -> int:
    """Return how many it is given beside sessions that write: fewer, where neither its answer depends on how a text is
    cut, nor every pass rebuilds what left."""
    stored = cache.checkpoint
    cut = cache.method.exactness == "exact" and not cache.method.oneshot and cache.round is None
    kept = stored is None or not (stored.capacity or stored.by_token or stored.replays)
    return min(PART, chunk_of(cache)) if cut and kept else chunk_of(cache)
