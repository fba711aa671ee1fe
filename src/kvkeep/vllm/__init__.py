"""A connector for vLLM that keeps blocks of prompts and answers on disk: :class:`KeepConnector`.

It runs in vLLM's environment, which it is found in by ``kv_connector_module_path``; see ``docs/vllm.md``. Everything
but ``connector.py`` is free of vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvkeep.vllm.connector import KeepConnector

__all__ = ["KeepConnector"]


def __getattr__(name: str) -> Any:
    if name != "KeepConnector":
        raise AttributeError(f"module 'kvkeep.vllm' has no attribute '{name}'")
    from kvkeep.vllm.connector import KeepConnector

    return KeepConnector
