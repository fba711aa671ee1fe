"""The refusal of models whose heads are split over processes."""

from __future__ import annotations

from typing import Any

from kvkeep.errors import UnsupportedModelError
from kvkeep.models.sharded import processes


def check_heads_together(model: Any, name: str) -> None:
    """Raise UnsupportedModelError if a process has only some heads of ``model``, for the part ``name``, in which the
    entries of one head depend on others."""
    if (parts := processes(model)) > 1:
        raise UnsupportedModelError(
            f"The heads of this model are split over {parts} processes (tensor parallel), and {name} decides for KV "
            "heads together; use 'full', 'kv-direct', 'h2o' or 'snapkv', which treat each head by itself."
        )
