"""The contract of a peer: its parameters and its reader of prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from torch import Tensor
from transformers import Cache

from kvkeep.budget import Budget
from kvkeep.contracts.exactness import Exactness
from kvkeep.geometry import ModelGeometry
from kvkeep.memory.meter import Memory


class PeerReader(ABC):
    """Reads one prompt and its continuation, for peers that are more than a cache in the model's forward pass."""

    exactness: Exactness = Exactness.LOSSY
    """Exactness class, as in kvkeep's caches."""
    entries: int | None = None
    """Entries per layer, as in kvkeep's caches; None: unbounded."""

    @abstractmethod
    def step(self, ids: Tensor) -> tuple[Tensor, float]:
        """Read ``ids`` (1, tokens): first the complete prompt, then one token at a time. Return the logits
        (vocabulary,) after the last token, in float32 on the CPU, and the seconds."""

    @abstractmethod
    def memory(self) -> Memory:
        """Return the current and the peak bytes."""


@dataclass(frozen=True)
class Peer(ABC):
    """An implementation by others: a frozen dataclass whose fields are its parameters."""

    about: ClassVar[str]
    """Description in one line."""
    needs: ClassVar[str] = ""
    """Required packages; "" for none."""

    @property
    def takes(self) -> tuple[str, ...]:
        """The accepted options: ("budget",) or ()."""
        return ()

    @property
    def versions(self) -> dict[str, str]:
        """Versions of its packages by name, if they are known before the first prompt."""
        return {}

    @abstractmethod
    def open(self, model: Any, budget: str | None, context: int) -> Cache | PeerReader:
        """Return a cache or reader for one prompt with ``model``. ``context``: tokens of prompt and answer, the base of
        a budget in percent. Raises UsageError if the peer cannot run here, BudgetError for an impossible budget."""


def entries_of(model: Any, budget: str, context: int) -> int:
    """Return the entries per layer of a budget as the user wrote it. Raises the errors of parsing a budget."""
    return Budget.parse(budget).entries(ModelGeometry.from_config(model.config, model.dtype.itemsize), context=context)


def installed(package: str) -> dict[str, str]:
    """Return the version of a package by its name; empty if it is not installed."""
    try:
        return {package: version(package)}
    except PackageNotFoundError:
        return {}
