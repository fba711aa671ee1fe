"""A connector for vLLM that keeps blocks of prompts and answers on disk: :class:`KeepConnector`.

It runs in vLLM's environment. vLLM imports it by the setting ``kv_connector_module_path`` (docs/vllm.md). Only
``connector.py`` imports vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep_vllm.connector import KeepConnector

__all__ = ["KeepConnector"]


def __getattr__(name: str) -> Any:
    if name != "KeepConnector":
        raise AttributeError(f"module 'kvkeep_vllm' has no attribute '{name}'")
    from kvkeep_vllm.connector import KeepConnector

    return KeepConnector
