"""What a user asks of the connector: ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvkeep.budget import Budget
from kvkeep.errors import BudgetError, UsageError, unknown
from kvkeep.models.folders import cache_folder
from kvkeep.vllm.codec import bits_of


@dataclass(frozen=True)
class Options:
    """folder: of the blocks, by default in the user's cache folder; quota: bytes of all blocks in it, of all engines
    together; codec: "exact", "int8" or "int4"; queue: bytes that wait to be written at most."""

    folder: Path
    quota: int
    codec: str
    queue: int

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Options:
        """Read ``folder``, ``quota`` and ``queue`` (such as "10GB"), and ``codec``, each of which may be missing.
        Raises UsageError for what cannot be understood."""
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                raise unknown("setting of KeepConnector", name, known)
        codec, folder = str(given.get("codec", "exact")), given.get("folder")
        bits_of(codec)
        return cls(
            cache_folder() / "vllm" if folder is None else Path(folder).expanduser().absolute(),
            _bytes("quota", given.get("quota", "10GB")),
            codec,
            _bytes("queue", given.get("queue", "256MB")),
        )


def _bytes(name: str, value: Any) -> int:
    try:
        budget = Budget.parse(value)
    except BudgetError:
        budget = None
    if budget is None or budget.unit != "bytes" or budget.amount < 1:
        raise UsageError(f"The {name} of KeepConnector is a number of bytes such as '10GB', not '{value}'.")
    return int(budget.amount)
