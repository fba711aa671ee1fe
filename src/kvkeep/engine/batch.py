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
"""Tokens of a prompt that one pass reads, if the method allows any number."""
SHORT_CHUNK = 128
"""Tokens of a prompt that one pass reads while other sessions write and wait for the pass. A smaller number would make
each token of the prompt more expensive."""


@dataclass(eq=False)
class Read:
    """Tokens that the model reads next for one session, after those that its cache holds."""

    cache: KeepCache
    ids: Sequence[int]
    keep: int = 1
    """The number of last tokens whose logits are returned."""
    cut: bool = False
    """More of the same text follows."""
    first: int | None = None
    """The position of the first token; None: the cache's next position."""


class Batch(Cache):
    """One cache for a row of tokens: it passes each read's tokens to the cache of that read."""

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
        """Return the length of the row and offset 0. No mask is used."""
        return query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Give each session its keys and values, (1, kv_heads, row, dim) of all."""
        self.hooks.update(layer_idx, key_states, value_states)
        return key_states, value_states


def can_pack(cache: KeepCache) -> bool:
    """Return whether a cache can share a pass with others. A cache that runs the model itself cannot, nor can one whose
    layers hold a state other than keys and values."""
    again = cache.checkpoint is not None and cache.checkpoint.replays
    return not (again or cache.stream.pass_hooks) and not cache.geometry.other_layers


@torch.no_grad()
def forward(model: Any, reads: Sequence[Read]) -> list[Tensor | Exception]:
    """Run the model once over all ``reads``, and return the logits (keep, vocabulary) of each read's last tokens. For a
    read that fails, return its exception; its cache is then as before. If the model itself runs out of memory or raises
    another RuntimeError, every read fails. All other errors of the model are raised, and so is torch.AcceleratorError,
    because a device is lost."""
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
        return [session.error or _shared_error(error, len(reads)) for session in batch.sessions]
    parts = logits[: len(kept)].split([read.keep for read in reads])
    return [part if one.error is None else one.error for one, part in zip(batch.sessions, parts, strict=True)]


def _shared_error(error: Exception, sessions: int) -> KvkeepError:
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
    """Run the model over a single read. Return its logits as :func:`forward` does, or the exception of any failure.
    Raises torch.AcceleratorError only."""
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


def chunk_size(cache: KeepCache) -> int:
    """Return how many tokens of a prompt one pass reads into a cache."""
    chunk: int = cache.stream.chunk
    free = chunk > CHUNK and cache.method.exactness == "exact" and not cache.method.oneshot
    return CHUNK if free else chunk


def short_chunk_size(cache: KeepCache) -> int:
    """Return how many tokens of a prompt one pass reads while other sessions write. The chunk is shortened only if the
    answer does not depend on how the text is cut, and no pass rebuilds evicted entries."""
    stored = cache.checkpoint
    cut = cache.method.exactness == "exact" and not cache.method.oneshot and cache.round is None
    kept = stored is None or not (stored.capacity or stored.by_token or stored.replays)
    return min(SHORT_CHUNK, chunk_size(cache)) if cut and kept else chunk_size(cache)
