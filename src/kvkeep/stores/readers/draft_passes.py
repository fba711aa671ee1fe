"""Draft passes: the model drafts tokens with the resident entries of a cache. They leave no trace in it."""

from __future__ import annotations

from typing import Any

from kvkeep.memory.ledger import Ledger
from kvkeep.stores.dynamic import WindowState, noted


class DraftPasses:
    """The draft passes of one cache. tail: the maximum number of tokens that they read in a row."""

    def __init__(self, tail: int, ledger: Ledger) -> None:
        self.tail, self.ledger = tail, ledger
        self.active = False
        """Whether the next pass drafts: its tokens attend to resident entries, and are forgotten by :meth:`end`."""
        self.begun = 0
        """The number of tokens before the drafts."""
        self.layers: list[Any] = []
        """The layers that draft."""
        self.windows: list[Any] = []
        """The layers with a sliding window."""
        self.states: dict[int, Any] = {}
        """The recurrent states, by layer."""
        self._before: list[WindowState] = []

    @property
    def kept(self) -> int:
        """The number of tokens without drafts."""
        return self.begun if self.active else self.ledger.length

    def begin(self, choose: bool) -> None:
        """Begin: until :meth:`end`, each pass reads one token. choose: the resident entries are first chosen again from
        all entries, by the attention of the last tokens, where that is possible."""
        if choose:
            for layer in self.layers:
                layer.reader.choose(layer)
        self.begun, self._before, self.active = self.ledger.length, [], True
        self._before = noted(self.windows)
        for state in self.states.values():
            state.note()

    def end(self) -> None:
        """Forget the drafts. An interrupted call can be repeated."""
        if not self.active:
            return
        for window in self._before:
            window.restore()
        for state in self.states.values():
            state.go_back()
        for layer in self.layers:
            layer.truncate(self.begun)
        self.ledger.truncate(self.begun)
        self._before, self.active = [], False
