"""kvkeep: language models inside a hard budget for the key/value cache."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.budget import Budget
    from kvkeep.cache import KeepCache
    from kvkeep.decode.chat import Conversation
    from kvkeep.decode.generate import generate
    from kvkeep.decode.session import Session, load_session, save_session
    from kvkeep.decode.verified import verified
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
    from kvkeep.plan.planner import recommend

# Torch and transformers take seconds to import: each name brings in its module when it is first asked for.
_HOMES = {
    "Budget": "budget",
    "BudgetError": "errors",
    "Conversation": "decode.chat",
    "KeepCache": "cache",
    "KvkeepError": "errors",
    "ModelError": "errors",
    "ModelGeometry": "geometry",
    "Session": "decode.session",
    "SessionError": "errors",
    "StoreError": "errors",
    "UnsupportedModelError": "errors",
    "UsageError": "errors",
    "generate": "decode.generate",
    "load": "models.loading",
    "load_session": "decode.session",
    "recommend": "plan.planner",
    "save_session": "decode.session",
    "verified": "decode.verified",
}
__all__ = [
    "Budget",
    "BudgetError",
    "Conversation",
    "KeepCache",
    "KvkeepError",
    "ModelError",
    "ModelGeometry",
    "Session",
    "SessionError",
    "StoreError",
    "UnsupportedModelError",
    "UsageError",
    "generate",
    "load",
    "load_session",
    "recommend",
    "save_session",
    "verified",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvkeep' has no attribute '{name}'")
    return getattr(import_module(f"kvkeep.{_HOMES[name]}"), name)
