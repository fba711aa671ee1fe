"""The tokens that a conversation's cache holds, and how the next prompt continues them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers.cache_utils import Cache

from kvkeep.cache import KeepCache
from kvkeep.errors import KvkeepError


def common_prefix(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((number for number, (one, other) in pairs if one != other), min(len(ids), len(others)))


class CachedText:
    """A cache (also one of transformers' caches), and the token ids that it has processed."""

    def __init__(self, cache: Cache, ids: Sequence[int] = ()) -> None:
        self.cache, self.ids = cache, list(ids)

    def align(self, prompt: Sequence[int], crops: bool = True) -> None:
        """Crop the cache to its common prefix with ``prompt``, without the last prompt token. The two may differ
        because a template can close an answer in another way than the model did. Without ``crops`` the cache is reset
        instead: the entries of a lossy cache depend on all tokens that it has read."""
        surplus = self.cache.get_seq_length() - common_prefix(self.ids, prompt[:-1])
        try:
            if surplus and not crops:
                self.cache.reset()
            elif surplus:
                self.cache.crop(-surplus)
        except (RuntimeError, KvkeepError):  # a sliding window cannot be cropped: read the prompt again
            self.cache.reset()
        self.settle(prompt)

    def settle(self, sequence: Sequence[int]) -> None:
        """Note that the cache holds the first tokens of ``sequence``, up to the cache's length."""
        self.ids = list(sequence[: self.cache.get_seq_length()])

    def recover(self, known: int) -> None:
        """Undo an unfinished step; reset the cache if that is impossible. known: the number of tokens before the
        step."""
        if isinstance(self.cache, KeepCache):
            try:
                self.cache.stream.abandon()
            except KvkeepError:
                self.cache.reset()
        elif self.cache.get_seq_length() != known:
            self.cache.reset()
