"""Draft passes: the model drafts tokens with the resident entries of a cache. They leave no trace in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvkeep.memory.inference import outside_inference_mode
from kvkeep.memory.ledger import Ledger
from kvkeep.stores.sliding import WindowState, noted


class DraftPasses:
    """The draft passes of one cache. tail: the maximum number of tokens that they read in a row. latent: the cache
    holds latents, so that no step is planned."""

    def __init__(self, tail: int, ledger: Ledger, device: torch.device, latent: bool) -> None:
        self.tail, self.ledger, self.device = tail, ledger, device
        self.uniform = device.type == "cuda" and not latent
        """Whether the steps of all drafts have the same shapes and numbers, so that one graph serves them all."""
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
        self.first: Tensor | None = None
        """:attr:`begun` on the device, (1,) int64, for steps that are :attr:`uniform`."""
        self._before: list[WindowState] = []

    @property
    def kept(self) -> int:
        """The number of tokens without drafts."""
        return self.begun if self.active else self.ledger.length

    @outside_inference_mode
    def begin(self, choose: bool) -> None:
        """Begin: until :meth:`end`, each pass reads one token. choose: the resident entries are first chosen again from
        all entries, by the attention of the last tokens, where that is possible."""
        for layer in self.layers:
            layer.reader.begin(layer, choose)
        if self.uniform:  # always in the same memory: graphs read it
            self.first = torch.zeros(1, dtype=torch.int64, device=self.device) if self.first is None else self.first
            self.first.fill_(self.ledger.length)
        self.begun, self._before, self.active = self.ledger.length, [], True
        for window in self.windows:
            window.reserve(self.tail)
            window.uniform = self.uniform
        self._before = noted(self.windows)
        for state in self.states.values():
            state.note()

    def place(self) -> Tensor:
        """Return how many drafts precede the present one, on the device, (1,) int64."""
        assert self.first is not None
        return self.ledger.number(self.ledger.length - 1) - self.first

    def end(self) -> None:
        """Forget the drafts. An interrupted call can be repeated."""
        if not self.active:
            return
        for window in self._before:
            window.restore()
            window.layer.uniform = False
        for state in self.states.values():
            state.go_back()
        self.forget_from(self.begun)
        self._before, self.active = [], False

    def forget_from(self, length: int) -> None:
        """Forget the drafts from slot ``length`` on."""
        for layer in self.layers:
            layer.reader.forget_drafts(layer, length)
        self.ledger.truncate(length)
