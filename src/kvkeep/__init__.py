"""kvkeep: language models inside a hard budget for the key/value cache."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # "X as X" exports X to type checkers
    from kvkeep.blocks.sessions import Session as Session
    from kvkeep.blocks.sessions import load_session as load_session
    from kvkeep.blocks.sessions import save_session as save_session
    from kvkeep.budget import Budget as Budget
    from kvkeep.cache import KeepCache as KeepCache
    from kvkeep.contracts.entries import EntryState as EntryState
    from kvkeep.contracts.exactness import Exactness as Exactness
    from kvkeep.contracts.fate import Fate as Fate
    from kvkeep.contracts.recall import Reader as Reader
    from kvkeep.contracts.recall import Recall as Recall
    from kvkeep.contracts.selector import Selector as Selector
    from kvkeep.contracts.store import EvictedStore as EvictedStore
    from kvkeep.decode.chat import Conversation as Conversation
    from kvkeep.decode.generate import generate as generate
    from kvkeep.errors import BudgetError as BudgetError
    from kvkeep.errors import KvkeepError as KvkeepError
    from kvkeep.errors import ModelError as ModelError
    from kvkeep.errors import OutOfMemory as OutOfMemory
    from kvkeep.errors import SessionError as SessionError
    from kvkeep.errors import StoreError as StoreError
    from kvkeep.errors import UnsupportedModelError as UnsupportedModelError
    from kvkeep.errors import UsageError as UsageError
    from kvkeep.geometry import ModelGeometry as ModelGeometry
    from kvkeep.memory.meter import Memory as Memory
    from kvkeep.models.loading import load as load
    from kvkeep.policies.methods import methods as methods
    from kvkeep.policies.registry import Method as Method
    from kvkeep.policies.registry import Preset as Preset
    from kvkeep.policies.registry import register as register

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
    "policies.methods": ("methods",),
    "policies.registry": ("Method", "Preset", "register"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)
__version__ = "0.1.0"


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'kvkeep' has no attribute '{name}'")
        return getattr(import_module(f"kvkeep.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
