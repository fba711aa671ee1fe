"""The forward pass in progress: which cache the attention of this thread belongs to.

transformers hands the attention function a module and tensors, not the cache. The hooks of
:mod:`kvkeep.models.binding` note the cache here when a forward pass begins; a context variable keeps
threads (the sessions of a server) apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn


class Attender(Protocol):
    """Whatever answers the attention of a layer in place of stock attention over whole K and V."""

    def attends(self, layer_idx: int) -> bool:
        """Tell whether layer ``layer_idx`` attends through :meth:`attend` in this forward pass."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
    ) -> Tensor:
        """Return attention output (batch, heads, queries, value_dim) of ``query`` over past and new entries.

        key, value: the *new* entries only; mask: over the new entries, or over past and new ones.
        """


class Taking(Attender, Protocol):
    """What takes part in the forward pass for a cache: prompts in chunks, residuals, streamed attention. Hooks find it
    as the cache's ``stream``, and let every other cache pass. streams: whether any layer attends through it. decoder:
    the only one that it takes part in, None: any."""

    streams: bool
    decoder: Any
    chunk: int
    earlier_outputs: list[Tensor]

    @property
    def length(self) -> int:
        """Tokens processed."""

    def begin_forward(
        self, ids: Tensor | None, embeddings: Tensor | None, positions: Tensor | None, mask: Any
    ) -> Tensor | None:
        """Take note of the tokens about to be processed (at most ``chunk``); return the positions to tell the model,
        None for its own."""

    def admit(self, tokens: int) -> None:
        """Raise if there is no room for ``tokens`` more, before any of them is processed."""

    def end_forward(self, completed: bool) -> None:
        """Close the forward pass; ``completed`` is False where it was left by an exception."""

    def enter_layer(self, layer_idx: int, hidden: Tensor) -> None:
        """Take note of the residual entering a layer, (batch, new, hidden_size)."""


_attender: ContextVar[Attender | None] = ContextVar("kvkeep_attender", default=None)
_probe: ContextVar[Any] = ContextVar("kvkeep_probe", default=None)


def current_attender() -> Attender | None:
    """Return who answers attention in this context, or None for stock attention."""
    return _attender.get()


def set_attender(attender: Attender | None) -> None:
    """Make ``attender`` answer attention in this context from now on."""
    _attender.set(attender)


@contextmanager
def attending(attender: Attender | None) -> Iterator[None]:
    """Let ``attender`` answer attention within the block, then whoever did before."""
    before = _attender.get()
    _attender.set(attender)
    try:
        yield
    finally:
        _attender.set(before)


def current_probe() -> Any:
    """Return the callable that layer hooks report to in this context, if any."""
    return _probe.get()


@contextmanager
def probing(probe: Any) -> Iterator[None]:
    """Within the block, let hooks call ``probe(layer_idx, hidden)`` for each layer entered."""
    before = _probe.get()
    _probe.set(probe)
    try:
        yield
    finally:
        _probe.set(before)
