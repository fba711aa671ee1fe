"""The contract of a peer: parameters, and a reader of prompts."""

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
    """Reads one prompt and what follows it, where a cache in the model's own forward pass does not say it all.

    exactness, entries: as a cache of kvkeep's has them.
    """

    exactness: Exactness = Exactness.LOSSY
    entries: int | None = None

    @abstractmethod
    def step(self, ids: Tensor) -> tuple[Tensor, float]:
        """Read ``ids`` (1, tokens): all of the prompt at first, then one token at a time. Return the logits
        (vocabulary,) after the last of them, in float32 on the CPU, and the seconds it took."""

    @abstractmethod
    def memory(self) -> Memory:
        """Return the bytes that are held now, and the most that were."""


@dataclass(frozen=True)
class Peer(ABC):
    """An implementation by others: a frozen dataclass whose fields are its parameters.

    about: what it is, in a line. needs: what has to be installed, "" for nothing.
    """

    about: ClassVar[str]
    needs: ClassVar[str] = ""

    @property
    def takes(self) -> tuple[str, ...]:
        """The options that it takes: ("budget",) or none."""
        return ()

    @property
    def versions(self) -> dict[str, str]:
        """What of its own took part, by name, as far as anything was read yet."""
        return {}

    @abstractmethod
    def open(self, model: Any, budget: str | None, context: int) -> Cache | PeerReader:
        """Return what reads one prompt with ``model``; ``context``: tokens read and written, which a budget in percent
        is of. Raises UsageError where it cannot be used here, BudgetError for a budget that it cannot keep."""


def entries_of(model: Any, budget: str, context: int) -> int:
    """Return the entries of a layer that a budget in the user's words is; raises as reading a budget does."""
    return Budget.parse(budget).entries(ModelGeometry.from_config(model.config, model.dtype.itemsize), context=context)


def installed(package: str) -> dict[str, str]:
    """Return the version of a package by its name, nothing where there is none."""
    try:
        return {package: version(package)}
    except PackageNotFoundError:
        return {}
