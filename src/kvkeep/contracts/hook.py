"""What a method does around the forward passes of one cache."""

from __future__ import annotations

from typing import Any


class PassHook:
    """What a method does around the forward passes of one cache, beside what its parts do in each layer. A fate or a
    recall makes it (``hook()``), and it holds state of that cache. Tokens of such a cache share no pass with others'.
    """

    def before(self, cache: Any, given: dict[str, Any]) -> None:
        """Called before tokens are read, for every chunk of a prompt. cache: the
        :class:`~kvkeep.cache.KeepCache`, perhaps with an unfinished step, which ``cache.stream.roll_back()`` undoes.
        given: the arguments of the pass of the model's decoder. What is raised here refuses the tokens."""

    def after(self, cache: Any) -> None:
        """Called when the tokens have been read and their entries are settled."""
