"""kvkeep: language models inside a hard budget for the key/value cache."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.blocks.sessions import Session, load_session, save_session
    from kvkeep.budget import Budget
    from kvkeep.cache import KeepCache
    from kvkeep.contracts.entries import EntryState
    from kvkeep.contracts.exactness import Exactness
    from kvkeep.contracts.fate import Fate
    from kvkeep.contracts.recall import Reader, Recall
    from kvkeep.contracts.selector import Selector
    from kvkeep.contracts.store import EvictedStore
    from kvkeep.decode.chat import Conversation
    from kvkeep.decode.generate import generate
    from kvkeep.engine.verified import verified
    from kvkeep.errors import (
        BudgetError,
        KvkeepError,
        ModelError,
        OutOfMemory,
        SessionError,
        StoreError,
        UnsupportedModelError,
        UsageError,
    )
    from kvkeep.geometry import ModelGeometry
    from kvkeep.memory.meter import Memory
    from kvkeep.models.loading import load
    from kvkeep.policies.methods import Method, methods
    from kvkeep.policies.registry import Preset, register

# Torch and transformers take seconds to import, so the first use of a name imports its module.
_HOMES = {
    "budget": ("Budget",),
    "cache": ("KeepCache",),
    "contracts.entries": ("EntryState",),
    "contracts.exactness": ("Exactness",),
    "contracts.fate": ("Fate",),
    "contracts.recall": ("Reader", "Recall"),
    "contracts.selector": ("Selector",),
    "contracts.store": ("EvictedStore",),
    "decode.chat": ("Conversation",),
    "decode.generate": ("generate",),
    "blocks.sessions": ("Session", "load_session", "save_session"),
    "engine.verified": ("verified",),
    "errors": (
        "BudgetError",
        "KvkeepError",
        "ModelError",
        "OutOfMemory",
        "SessionError",
        "StoreError",
        "UnsupportedModelError",
        "UsageError",
    ),
    "geometry": ("ModelGeometry",),
    "memory.meter": ("Memory",),
    "models.loading": ("load",),
    "policies.methods": ("Method", "methods"),
    "policies.registry": ("Preset", "register"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [
    "Budget",
    "BudgetError",
    "Conversation",
    "EntryState",
    "EvictedStore",
    "Exactness",
    "Fate",
    "KeepCache",
    "KvkeepError",
    "Memory",
    "Method",
    "ModelError",
    "ModelGeometry",
    "OutOfMemory",
    "Preset",
    "Reader",
    "Recall",
    "Selector",
    "Session",
    "SessionError",
    "StoreError",
    "UnsupportedModelError",
    "UsageError",
    "generate",
    "load",
    "load_session",
    "methods",
    "register",
    "save_session",
    "verified",
]
__version__ = "0.1.0"


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'kvkeep' has no attribute '{name}'")
        return getattr(import_module(f"kvkeep.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
