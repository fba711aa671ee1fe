"""What a method does around the forward passes of one cache, and in a second reading of its text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvkeep.attention.inputs import AttentionInputs


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


class ReadingHook(ABC):
    """What a fate learns of one layer when its text is read a second time (:mod:`kvkeep.reconstruction`)."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that it holds."""
        return ()

    @abstractmethod
    def attended(self, layer: Any, step: AttentionInputs) -> None:
        """Called in each pass of the second reading, when the layer has attended."""

    @abstractmethod
    def chosen(self, source: Any, target: Any) -> None:
        """Called when the layer ``target`` has taken the entries that stay. ``source`` still holds all of them."""
