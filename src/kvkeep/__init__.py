"""kvkeep: language models inside a hard budget for the key/value cache."""

from kvkeep.budget import Budget
from kvkeep.cache import KeepCache
from kvkeep.errors import (
    BudgetError,
    KvkeepError,
    ModelError,
    SessionError,
    StoreError,
    UnsupportedModelError,
    UsageError,
)
from kvkeep.geometry import ModelGeometry
from kvkeep.models.loading import load

__all__ = [
    "Budget",
    "BudgetError",
    "KeepCache",
    "KvkeepError",
    "ModelError",
    "ModelGeometry",
    "SessionError",
    "StoreError",
    "UnsupportedModelError",
    "UsageError",
    "load",
]
__version__ = "0.1.0"
