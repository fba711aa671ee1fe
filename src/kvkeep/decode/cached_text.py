"""The tokens that a conversation's cache holds, and how the next prompt continues them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import Cache

from kvkeep.cache import KeepCache
from kvkeep.contracts.exactness import Exactness
from kvkeep.errors import EntriesLost, KvkeepError
from kvkeep.memory.extent import ShapeError
from kvkeep.transfer import rewind

log = logging.getLogger(__name__)


def common_prefix(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(ids), len(others)))


class CachedText:
    """A cache (also one of transformers' caches), and the token ids that it has processed."""

    def __init__(self, cache: Cache, ids: Sequence[int] = ()) -> None:
        self.cache, self.ids = cache, list(ids)

    def align(self, prompt: Sequence[int], pin: int | None = None) -> None:
        """Remove the tokens after the common prefix with ``prompt`` from the cache, and the last prompt token. The two
        may differ because a template can close an answer in another way than the model did. If a window or a recurrent
        state cannot be cropped, the cache goes back to the last block's end before that at which it was kept
        (:func:`kvkeep.blocks.beginnings.watch`), or is reset. A cache whose entries depend on all tokens that it has
        read (:attr:`KeepCache.crops`) is reset in any case: the model reads the prompt again. So is one that has lost
        entries on disk, or in an unfinished step. pin: first tokens of the prompt to pin if the cache is then empty;
        None: as before."""
        if isinstance(self.cache, KeepCache):
            try:
                self.cache.stream.check_disk()
            except EntriesLost as error:
                log.warning("A text of %d tokens is read again. %s", len(self.ids), error)
                self.cache.reset()
            if self.cache.stream.record.take_undone() and not self.cache.crops:
                self.cache.reset()
        self.cut(common_prefix(self.ids, prompt[:-1]))
        if pin is not None and isinstance(self.cache, KeepCache) and not self.ids:
            self.cache.pin(pin)

    def cut(self, length: int) -> None:
        """Remove all tokens after the first ``length`` from the cache, as :meth:`align` does; it may then have
        fewer."""
        known = self.cache.get_seq_length()
        crops = not isinstance(self.cache, KeepCache) or self.cache.crops
        if length < known and not (length and crops and self._go_back(length, known)):
            self.cache.reset()
        self.settle(self.ids)

    def _go_back(self, shared: int, length: int) -> bool:
        """Remove the tokens after the first ``shared`` of ``length``; return whether that is possible."""
        try:
            self.cache.crop(shared - length)
        except (RuntimeError, KvkeepError):
            return self._rewind(shared)
        return True

    def _rewind(self, length: int) -> bool:
        """Go back to the last block's end within the first ``length`` tokens at which windows and recurrent states were
        kept; return whether there is one. The cache may have been cropped in part. One that has discarded entries is
        not what it was there."""
        ends: dict[int, Any] = {}
        if isinstance(self.cache, KeepCache) and self.cache.exactness is Exactness.EXACT:
            ends = self.cache.stream.record.ends
        end = max((end for end in ends if end <= length), default=0)
        try:
            if end:
                rewind(self.cache, end, ends[end])
        except (KvkeepError, ShapeError):
            return False
        return end > 0

    def settle(self, sequence: Sequence[int]) -> None:
        """Note that the cache holds the first tokens of ``sequence``, up to the cache's length."""
        self.ids = list(sequence[: self.cache.get_seq_length()])

    def recover(self, known: int) -> None:
        """Undo an unfinished step. If that is impossible, go back to a block's end as :meth:`align` does, or reset the
        cache. known: the number of tokens before the step."""
        if isinstance(self.cache, KeepCache):
            try:
                self.cache.stream.abandon()
            except KvkeepError:
                if not self._rewind(known):
                    self.cache.reset()
        elif self.cache.get_seq_length() != known:
            self.cache.reset()
