"""One forward pass for several sessions: their new tokens are packed into one row; each cache does its attention.

The pass reads the weights once for all sessions. Attention and recurrent modules run per session
(:mod:`kvkeep.passes.hooks`); every other operation treats tokens independently. Where matrix products do not depend
on the number of rows, as with the native library in bfloat16, the logits equal those of a separate pass to the last
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvkeep.cache import KeepCache
from kvkeep.errors import KvkeepError, OutOfMemory, UnsupportedModelError, out_of_memory, ran_out_of_memory, release
from kvkeep.models.binding import bind
from kvkeep.native.library import trim_memory
from kvkeep.passes.hooks import ForwardHooks, NoSessionLeft, SessionPass


@dataclass(eq=False)
class Read:
    """Tokens that the model reads next for one session. They follow the tokens in its cache."""

    cache: KeepCache
    ids: Sequence[int]
    keep: int = 1
    """The number of last tokens whose logits are returned."""
    cut: bool = False
    """Whether more of the same text follows."""


class Batch(Cache):
    """One cache for a row of tokens. It passes the tokens of each read to that read's cache."""

    def __init__(self, reads: Sequence[Read]) -> None:
        super().__init__(layers=[])
        self.sessions, start = [], 0
        for read in reads:
            span = slice(start, start := start + len(read.ids))
            self.sessions.append(SessionPass(read.cache.stream, read.cache, span, read.cut))
        self.geometry = reads[0].cache.geometry
        self.hooks = ForwardHooks(self.sessions, self.geometry, packed=True)

    @property
    def is_sliding(self) -> list[bool]:
        """Whether each layer has a sliding window; transformers chooses masks by it."""
        return [layer.kind == "sliding" for layer in self.geometry.layers]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: every token of the row has its position."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the row's length and offset 0. No mask is used."""
        return query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass each session its part of the keys and values, each (1, kv_heads, row, dim)."""
        self.hooks.update(layer_idx, key_states, value_states)
        return key_states, value_states


def can_pack(cache: KeepCache) -> bool:
    """Return whether a cache can share a pass with others. It cannot if it runs the model itself, or if kvkeep does not
    know what computes the states of its layers."""
    geometry, again = cache.geometry, cache.checkpoint is not None and cache.checkpoint.replays
    if again or cache.stream.pass_hooks or geometry.unbounded_layers:
        return False
    if not geometry.recurrent_layers:
        return True
    try:
        return bind(cache.model).runs_all(geometry.recurrent_layers)
    except UnsupportedModelError:
        return False


@torch.no_grad()
def forward(model: Any, reads: Sequence[Read]) -> list[Tensor | Exception]:
    """Run the model once over all ``reads``; return the logits (keep, vocabulary) of each read's last tokens.

    A failed read returns its exception, and its cache is restored. If the model itself raises a RuntimeError, every
    read fails. A read for which there was not enough memory is tried once more, in a pass of its own, if its cache is
    what it was before; otherwise it returns OutOfMemory. Other errors of the model are raised; torch.AcceleratorError
    is always raised, because the device is lost.
    """
    found = _forward(model, reads)
    for number, (read, result) in enumerate(zip(reads, found, strict=True)):
        if isinstance(result, Exception) and ran_out_of_memory(result):
            release(result)
            trim_memory()
            # Once the pass is undone, no entry is evicted for good, no draft forgotten, and no window moved.
            restored = read.cache.crops and read.cache.draft_passes is None and not read.cache.stream.moving
            again = restored and len(reads) > 1
            (result,) = _forward(model, [read]) if again else (result,)
            found[number] = without_memory(read, result)
    return found


def without_memory(read: Read, result: Tensor | Exception) -> Tensor | Exception:
    """Return the result of a read, as OutOfMemory if it failed for lack of memory."""
    if not isinstance(result, Exception) or isinstance(result, OutOfMemory) or not ran_out_of_memory(result):
        return result
    return out_of_memory(f"reading {len(read.ids)} tokens after {read.cache.get_seq_length()}", result)


def _forward(model: Any, reads: Sequence[Read]) -> list[Tensor | Exception]:
    """Run the model once over all ``reads``, as :func:`forward` does."""
    bind(model)
    batch = Batch(reads)
    pairs = list(zip(batch.sessions, reads, strict=True))
    kept = [number for one, read in pairs for number in range(one.span.stop - read.keep, one.span.stop)]
    try:
        ids = torch.tensor([[one for read in reads for one in read.ids]], device=next(model.parameters()).device)
        rows = torch.tensor(kept or [0], device=ids.device)
        logits = model(input_ids=ids, cache=batch, use_cache=True, logits_to_keep=rows).logits[0]
    except NoSessionLeft:
        return [session.error or RuntimeError("no attention") for session in batch.sessions]
    except torch.AcceleratorError:
        raise
    except (MemoryError, RuntimeError, KvkeepError) as error:
        batch.hooks.abandon()
        return [session.error or _shared_error(error, len(reads)) for session in batch.sessions]
    parts = logits[: len(kept)].split([read.keep for read in reads])
    return [part if one.error is None else one.error for one, part in zip(batch.sessions, parts, strict=True)]


def _shared_error(error: Exception, sessions: int) -> KvkeepError:
    """Return the error for each of the ``sessions`` whose shared pass failed with ``error``."""
    if sessions == 1 and ran_out_of_memory(error):
        return out_of_memory("reading the next tokens", error)
    kind = OutOfMemory if ran_out_of_memory(error) else KvkeepError
    why = "there was not enough memory" if kind is OutOfMemory else type(error).__name__  # no message: it may quote
    shared = kind(f"The answer failed: the step that processed {sessions} sessions at once failed ({why}); retry.")
    shared.__cause__ = error
    return shared
