"""The forward pass in progress: the cache of this thread's attention.

transformers passes a module and tensors to the attention function, not the cache. The hooks of
:mod:`kvkeep.models.binding` note the cache here when a forward pass begins; a context variable keeps
threads (the sessions of a server) apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn


class Attender(Protocol):
    """Computes the attention of a layer in place of stock attention."""

    def attends(self, layer_idx: int) -> bool:
        """Return whether layer ``layer_idx`` attends through :meth:`attend` in this forward pass."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor | None:
        """Return attention output (batch, heads, queries, value_dim) of ``query`` over past and new entries. None:
        transformers computes the attention.

        key, value: the *new* entries only. mask: over the new entries, or over past and new ones.
        """


class Hooks(Attender, Protocol):
    """The hooks of a bounded cache in a forward pass. A model finds them as the cache's ``hooks``, and ignores other
    caches."""

    @property
    def streams(self) -> bool:
        """Whether any layer attends through these hooks."""

    @property
    def single(self) -> Any:
        """The cache that reads the input, a :class:`Reading`; None if several caches share it."""

    def begin_forward(
        self, ids: Tensor | None, embeddings: Tensor | None, positions: Tensor | None, mask: Any
    ) -> Tensor | None:
        """Record the tokens of a pass. Return the positions for the model; None: the model computes them."""

    def enter_layer(self, layer_idx: int, hidden: Tensor) -> None:
        """Receive the residual entering a layer, (batch, new, hidden_size)."""

    def recur(
        self, layer_idx: int, run: Callable[..., Tensor], hidden: Tensor, cache: Any, mask: Tensor | None
    ) -> Tensor:
        """Return the output of a layer's recurrent module, (batch, new, hidden_size), for ``hidden`` of the same
        shape. run: the module; it takes some of the tokens, their cache, and their padding mask (batch, tokens)."""

    def keep_outputs(self, earlier: list[Tensor], last: int) -> None:
        """Keep what the outputs of a prompt's last chunk need, until :meth:`take_outputs`. earlier: the outputs of the
        chunks before it, (batch, n, hidden_size); last: the number of its last positions that are used; 0: all."""

    def take_outputs(self) -> tuple[list[Tensor], int]:
        """Return what :meth:`keep_outputs` was given last, and forget it."""

    def end_forward(self, completed: bool) -> None:
        """End the forward pass; ``completed`` is False after an exception."""


class Reading(Protocol):
    """The state of a cache that reads a text; prompts are read in chunks."""

    observes: bool
    """Whether every query may influence the choice of entries."""
    record: Any
    """What is known of the text (:class:`~kvkeep.passes.record.TextRecord`)."""
    decoder: Any
    """The only decoder whose passes the cache takes part in; None: any."""
    chunk: int
    """Tokens of a chunk."""
    rehearsing: bool
    """Whether the entries of the pass are discarded."""
    owner: Any
    """The thread whose pass uses the cache (:class:`~kvkeep.passes.pass_owner.PassOwner`)."""
    pass_hooks: Any
    """Called before and after a pass (:class:`~kvkeep.contracts.hook.PassHook`)."""

    @property
    def must_reread(self) -> bool:
        """Whether a text was read, and the cache must call ``compress()`` before it continues."""

    @property
    def length(self) -> int:
        """Tokens processed."""

    @property
    def rows(self) -> int:
        """Rows of the batch in the cache; 0 before the first token."""

    def chunks(self, count: int) -> Sequence[int]:
        """Return the sizes of the chunks in which ``count`` new tokens are read."""

    def admit(self, tokens: int) -> None:
        """Raise if ``tokens`` more do not fit, before any of them is processed."""


_attender: ContextVar[Attender | None] = ContextVar("kvkeep_attender", default=None)
_probe: ContextVar[Any] = ContextVar("kvkeep_probe", default=None)


def current_attender() -> Attender | None:
    """Return the attender of this context, or None for stock attention."""
    return _attender.get()


def set_attender(attender: Attender | None) -> None:
    """Set the attender of this context."""
    _attender.set(attender)


@contextmanager
def attending(attender: Attender | None) -> Iterator[None]:
    """Set ``attender`` within the block and restore the previous one."""
    before = _attender.get()
    _attender.set(attender)
    try:
        yield
    finally:
        _attender.set(before)


def current_probe() -> Any:
    """Return the callable that layer hooks call in this context, if any."""
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
