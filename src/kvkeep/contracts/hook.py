"""What a method does around the forward passes of one cache."""

from __future__ import annotations

from typing import Any


class PassHook:
    """What a method does around the forward passes of one cache, besides the work of its parts in each layer. A fate or
    a recall makes it (``hook()``). It holds state of that cache. A cache with a hook shares no pass with other caches.
    """

    def before(self, cache: Any, given: dict[str, Any]) -> None:
        """Called before each chunk of a prompt is read. cache: the :class:`~kvkeep.cache.KeepCache`, perhaps with an
        unfinished step, which ``cache.stream.roll_back()`` undoes. given: the arguments of the decoder's forward pass.
        An exception raised here refuses the tokens."""

    def after(self, cache: Any) -> None:
        """Called when the tokens have been read and their entries are settled."""
